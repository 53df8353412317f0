"""The import contract holds, and bites: a planted upward import is reported by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("topology", "layout", "transport", "bridges", "schedules", "training", "planner", "testing")


def lint_imports(sources: Path) -> subprocess.CompletedProcess[str]:
    """Run the contract of the root pyproject over the packages copied below ``sources``."""
    path = os.pathsep.join(str(sources / name / "src") for name in PACKAGES)
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml", "--no-cache"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=sources,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def sources(tmp_path):
    """A copy of all packages, to plant violations in."""
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=shutil.ignore_patterns("tests"))
    return tmp_path / "packages"


def plant(sources: Path, package: str, line: str, *, folder: str = "") -> None:
    module = sources / package / "src" / "pipegrid" / package / folder / "planted.py"
    module.write_text(f"{line}\n")


def test_the_contract_holds(sources):
    result = lint_imports(sources)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("package", "line", "contract"),
    [
        ("topology", "import pipegrid.transport", "strictly downward"),
        ("topology", "import pipegrid.layout", "strictly downward"),
        ("layout", "import pipegrid.topology", "strictly downward"),
        ("transport", "from pipegrid.bridges import graph", "strictly downward"),
        ("bridges", "import pipegrid.schedules", "strictly downward"),
        ("schedules", "import pipegrid.training", "strictly downward"),
        ("schedules", "import pipegrid.planner", "strictly downward"),
        ("planner", "import pipegrid.training", "strictly downward"),
        ("planner", "import torch", "planner has no torch"),
        ("testing", "import pipegrid.topology", "testing imports no pipegrid package"),
        ("transport", "import pipegrid.testing", "no package imports testing"),
        ("training", "import pipegrid.testing", "no package imports testing"),
        ("layout", "import torch", "layout has no torch and no numpy"),
    ],
)
def test_a_planted_violation_is_reported(sources, package, line, contract):
    plant(sources, package, line)
    result = lint_imports(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract}" in result.stdout
    assert f"pipegrid.{package}.planted" in result.stdout


@pytest.mark.parametrize(
    ("package", "folder", "line", "contract"),
    [
        ("schedules", "gradients", "import pipegrid.schedules.megatron", "schedules: from the step functions down"),
        ("schedules", "gradients", "import pipegrid.schedules.runtime", "schedules: from the step functions down"),
        ("schedules", "monitor", "import pipegrid.schedules.gradients", "schedules: from the step functions down"),
        ("schedules", "gradients/reduction", "import pipegrid.schedules.gradients.clip", "gradients: from reduction"),
        ("schedules", "verify", "import pipegrid.schedules.simulate", "schedules: from a plan that runs down"),
        (
            "schedules",
            "generators",
            "import pipegrid.schedules.passes",
            "schedules: from a plan that runs down",
        ),
        ("schedules", "search", "import torch", "schedules: planning has no torch"),
        (
            "transport",
            "backends",
            "import pipegrid.transport.lane",
            "transport: from the communicator down to an edge",
        ),
        ("bridges", "reshard", "import pipegrid.bridges.bridge", "bridges: from many modules down to a graph"),
        ("bridges", "bridge", "import pipegrid.bridges.colocated", "bridges: from many modules down to a graph"),
        ("bridges", "vtp", "import pipegrid.bridges.multimodule", "bridges: from many modules down to a graph"),
    ],
)
def test_a_planted_violation_between_folders_is_reported(sources, package, folder, line, contract):
    plant(sources, package, line, folder=folder)
    result = lint_imports(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(contract in text and text.endswith("BROKEN") for text in result.stdout.splitlines())
    assert f"pipegrid.{package}.{folder.replace('/', '.')}.planted" in result.stdout


@pytest.mark.parametrize("back", ["def later():", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_planted_circle_is_reported(sources, package, back):
    folder = sources / package / "src" / "pipegrid" / package
    (folder / "planted_a.py").write_text(f"import pipegrid.{package}.planted_b\n")
    (folder / "planted_b.py").write_text(f"{back}\n    import pipegrid.{package}.planted_a\n")
    result = lint_imports(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "no circles inside packages BROKEN" in result.stdout
