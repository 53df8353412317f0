"""The import contract holds, and bites: a planted upward import is reported by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("topology", "layout", "transport", "bridges", "schedules", "testing")


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


def plant(sources: Path, package: str, line: str) -> None:
    module = sources / package / "src" / "pipegrid" / package / "planted.py"
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
        ("testing", "import pipegrid.topology", "testing imports no pipegrid package"),
        ("transport", "import pipegrid.testing", "no package imports testing"),
        ("layout", "import torch", "layout has no torch and no numpy"),
    ],
)
def test_a_planted_violation_is_reported(sources, package, line, contract):
    plant(sources, package, line)
    result = lint_imports(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract}" in result.stdout
    assert f"pipegrid.{package}.planted" in result.stdout
