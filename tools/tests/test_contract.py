"""The import contract holds, and bites: each planted import is reported by name, under the contract that it breaks.

One run sees all of them, each in a module of its own; a second one sees a circle in every package, a third one metadata
that says otherwise than the imports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
# What README and docs promise; the contract itself is derived from the metadata.
WITHOUT_TORCH = ("core", "topology", "layout", "plans", "timeline", "search", "reshard", "planner", "goodput")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contract over the copy of the packages below ``root``, and nothing of the tree that is installed."""
    sources = [str(root / "packages" / name / "src") for name in PACKAGES]
    others = [path for path in sys.path if not Path(path).joinpath("pipegrid").exists()]
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the .pth files that lead to the sources
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sources, *others])},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def plant(root: Path, package: str, name: str, text: str, *, folder: str = "") -> str:
    """Write a module; its dotted name."""
    (root / "packages" / package / "src" / "pipegrid" / package / folder / f"{name}.py").write_text(text)
    return ".".join(part for part in ("pipegrid", package, *folder.split("/"), name) if part)


def broken(report: str) -> dict[str, str]:
    """What a run says of each broken contract, by its name."""
    parts = re.split(r"^(.+)\n-+\n", report.partition("Broken contracts")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies all packages, to plant violations in."""

    def copy(name: str) -> Path:
        target = tmp_path_factory.mktemp(name)
        shutil.copytree(ROOT / "packages", target / "packages", ignore=shutil.ignore_patterns("tests", "__pycache__"))
        for path in ("pyproject.toml", "tools/contracts.py"):
            (target / path).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / path, target / path)
        return target

    return copy


def test_the_contract_holds(copied):
    result = lint_imports(copied("clean"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


# Package, folder, line, and the beginning of the name of the contract that it breaks.
DECLARED = "each package imports what it declares"
PLANTED = [
    ("topology", "", "import pipegrid.transport", DECLARED),
    ("topology", "", "import pipegrid.layout", DECLARED),
    ("core", "", "import pipegrid.topology", DECLARED),
    ("plans", "verify", "def later():\n    import pipegrid.layout", DECLARED),
    ("plans", "verify", "import pipegrid.search", DECLARED),
    ("timeline", "", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipegrid.search", DECLARED),
    ("transport", "", "from pipegrid.bridges import graph", DECLARED),
    ("schedules", "", "import pipegrid.training", DECLARED),
    ("planner", "", "import pipegrid.goodput", DECLARED),
    ("stages", "", "import pipegrid.schedules", DECLARED),
    ("checkpoint", "stored", "import pipegrid.survive", DECLARED),
    ("reshard", "", "import pipegrid.transport", DECLARED),
    ("autograd", "", "import pipegrid.transport", DECLARED),
    ("monitor", "epochs", "import pipegrid.gradients", DECLARED),
    ("testing", "", "import pipegrid.topology", DECLARED),
    ("fake_nccl", "groups", "import pipegrid.testing", DECLARED),
    ("bridges", "bridge", "import pipegrid.fake_nccl", DECLARED),
    ("training", "", "import pipegrid.testing", DECLARED),
    *((package, "", "import torch", DECLARED) for package in WITHOUT_TORCH if package != "topology"),
    ("plans", "passes", "from torch import nn", DECLARED),
    ("layout", "", "import numpy", DECLARED),
    ("schedules", "runtime", "import pipegrid.schedules.megatron", "schedules: from the step functions down"),
    ("gradients", "reduction", "import pipegrid.gradients.clip", "gradients: from reduction"),
    ("plans", "verify", "import pipegrid.plans.simulate", "plans: from passes down"),
    ("plans", "generators", "import pipegrid.plans.passes", "plans: from passes down"),
    ("transport", "backends", "import pipegrid.transport.lane", "transport: from the communicator down to an edge"),
    ("bridges", "bridge", "import pipegrid.bridges.colocated", "bridges: from many modules down to a graph"),
    ("bridges", "vtp", "import pipegrid.bridges.multimodule", "bridges: from many modules down to a graph"),
]


@pytest.fixture(scope="module")
def of_planted(copied):
    """The modules with the lines of `PLANTED`, and the reports on them."""
    root = copied("planted")
    names = [
        plant(root, package, f"planted_{number}", f"{line}\n", folder=folder)
        for number, (package, folder, line, _) in enumerate(PLANTED)
    ]
    result = lint_imports(root)
    assert result.returncode == 1, result.stdout + result.stderr
    return names, broken(result.stdout)


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[" ".join(row[:3]) for row in PLANTED])
def test_a_planted_violation_is_reported(of_planted, number):
    names, reports = of_planted
    (report,) = [report for contract, report in reports.items() if contract.startswith(PLANTED[number][3])]
    assert re.search(rf"{re.escape(names[number])}\b", report), report


BACK = {"later": "def later():", "types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"}


@pytest.fixture(scope="module")
def of_circles(copied):
    """The report on circles, with one of each kind in every package."""
    root = copied("circles")
    for package in PACKAGES:
        for kind, back in BACK.items():
            there = plant(
                root, package, f"planted_{kind}_b", f"{back}\n    import pipegrid.{package}.planted_{kind}_a\n"
            )
            plant(root, package, f"planted_{kind}_a", f"import {there}\n")
    result = lint_imports(root)
    assert result.returncode == 1, result.stdout + result.stderr
    return broken(result.stdout)["no circles of packages, nor inside them"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BACK)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_planted_circle_is_reported(of_circles, package, kind):
    (own,) = [
        text for text in of_circles.split("No cycles are allowed in ") if text.startswith(f"pipegrid.{package}.\n")
    ]
    assert f".planted_{kind}_b -> .planted_{kind}_a" in own


def test_a_need_that_is_never_imported_and_a_circle_of_packages_are_reported(copied):
    root = copied("metadata")
    path = root / "packages" / "core" / "pyproject.toml"
    needs = '"attrs>=23.2",\n    "pipegrid-topology",\n    "pipegrid-layout",'
    path.write_text(path.read_text().replace('"attrs>=23.2",', needs))
    plant(root, "core", "planted", "import pipegrid.topology\n")
    reports = broken(lint_imports(root).stdout)
    assert reports[DECLARED].strip() == "pipegrid.core declares pipegrid.layout and never imports it"
    assert "No cycles are allowed in pipegrid.\n" in reports["no circles of packages, nor inside them"]
    assert set(reports) == {DECLARED, "no circles of packages, nor inside them"}


def brought_by(package: str) -> set[str]:
    """Everything that installing a package brings."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", need)[0] for need in project["dependencies"]}
    ours = {name.removeprefix("pipegrid-") for name in names if name.startswith("pipegrid-")}
    return names.union(*map(brought_by, ours))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_installing_a_package_brings(package):
    ours = {one for one in brought_by(package) if one.startswith("pipegrid-")}
    outside = brought_by(package) - ours
    if package in WITHOUT_TORCH:
        assert {"attrs"} <= outside <= {"attrs", "cattrs"}
    else:
        assert "torch" in outside
    for_tests = {"pipegrid-testing", "pipegrid-fake_nccl"}
    assert ours == {"testing": {"pipegrid-fake_nccl"}, "fake_nccl": set()}.get(package, ours - for_tests)


def test_what_installs_without_torch_is_imported_without():
    lines = "; ".join(f"from pipegrid.{package} import *" for package in WITHOUT_TORCH)
    code = f"import sys; sys.modules['torch'] = sys.modules['numpy'] = None; {lines}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
