"""The import contract holds, and bites: each planted upward import is reported by name, under its contract.

One run sees all of them, each in a module of its own; a second one sees a circle in every package.
"""

from __future__ import annotations

import ast
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


def plant(sources: Path, package: str, name: str, text: str, *, folder: str = "") -> str:
    """Write a module; its dotted name."""
    (sources / package / "src" / "pipegrid" / package / folder / f"{name}.py").write_text(text)
    return ".".join(part for part in ("pipegrid", package, *folder.split("/"), name) if part)


def broken(report: str) -> dict[str, str]:
    """What a run says of each broken contract, by its name."""
    parts = re.split(r"^(.+)\n-+\n", report.partition("Broken contracts")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Copies all packages, to plant violations in."""

    def copy(name: str) -> Path:
        target = tmp_path_factory.mktemp(name) / "packages"
        shutil.copytree(ROOT / "packages", target, ignore=shutil.ignore_patterns("tests"))
        return target

    return copy


def test_the_contract_holds(copied):
    result = lint_imports(copied("clean"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


# Package, folder, line, and the beginning of the name of the contract that it breaks.
PLANTED = [
    ("topology", "", "import pipegrid.transport", "strictly downward"),
    ("topology", "", "import pipegrid.layout", "strictly downward"),
    ("core", "", "import pipegrid.topology", "strictly downward"),
    ("plans", "verify", "import pipegrid.search", "strictly downward"),
    ("timeline", "", "import pipegrid.search", "strictly downward"),
    ("search", "", "import pipegrid.schedules", "strictly downward"),
    ("layout", "", "import pipegrid.topology", "strictly downward"),
    ("transport", "", "from pipegrid.bridges import graph", "strictly downward"),
    ("bridges", "", "import pipegrid.schedules", "strictly downward"),
    ("schedules", "", "import pipegrid.training", "strictly downward"),
    ("schedules", "", "import pipegrid.planner", "strictly downward"),
    ("planner", "", "import pipegrid.training", "strictly downward"),
    ("planner", "", "import pipegrid.goodput", "strictly downward"),
    ("stages", "", "import pipegrid.schedules", "strictly downward"),
    ("checkpoint", "stored", "import pipegrid.survive", "strictly downward"),
    ("survive", "", "import pipegrid.training", "strictly downward"),
    ("goodput", "", "import pipegrid.training", "strictly downward"),
    ("reshard", "", "import pipegrid.transport", "strictly downward"),
    ("reshard", "", "import torch", "reshard, planner and goodput have no torch"),
    ("planner", "", "import torch", "reshard, planner and goodput have no torch"),
    ("testing", "", "import pipegrid.topology", "testing imports fake_nccl alone"),
    ("fake_nccl", "", "import pipegrid.topology", "testing imports fake_nccl alone"),
    ("fake_nccl", "groups", "import pipegrid.testing", "fake_nccl is below testing"),
    ("transport", "", "import pipegrid.testing", "no package imports testing"),
    ("bridges", "bridge", "import pipegrid.fake_nccl", "no package imports testing"),
    ("training", "", "import pipegrid.testing", "no package imports testing"),
    ("layout", "", "import torch", "core, layout, plans, timeline and search have no torch"),
    ("plans", "passes", "import torch", "core, layout, plans, timeline and search have no torch"),
    ("autograd", "", "import pipegrid.transport", "strictly downward"),
    ("monitor", "epochs", "import pipegrid.gradients", "strictly downward"),
    ("gradients", "", "import pipegrid.schedules", "strictly downward"),
    ("schedules", "runtime", "import pipegrid.schedules.megatron", "schedules: from the step functions down"),
    ("gradients", "reduction", "import pipegrid.gradients.clip", "gradients: from reduction"),
    ("plans", "verify", "import pipegrid.plans.simulate", "plans: from passes down"),
    ("plans", "generators", "import pipegrid.plans.passes", "plans: from passes down"),
    ("search", "", "import torch", "core, layout, plans, timeline and search have no torch"),
    ("transport", "backends", "import pipegrid.transport.lane", "transport: from the communicator down to an edge"),
    ("bridges", "bridge", "import pipegrid.bridges.colocated", "bridges: from many modules down to a graph"),
    ("bridges", "vtp", "import pipegrid.bridges.multimodule", "bridges: from many modules down to a graph"),
]


@pytest.fixture(scope="module")
def of_planted(copied):
    """The modules with the lines of `PLANTED`, and the reports on them."""
    sources = copied("planted")
    names = [
        plant(sources, package, f"planted_{number}", f"{line}\n", folder=folder)
        for number, (package, folder, line, _) in enumerate(PLANTED)
    ]
    result = lint_imports(sources)
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
    sources = copied("circles")
    for package in PACKAGES:
        for kind, back in BACK.items():
            there = plant(
                sources, package, f"planted_{kind}_b", f"{back}\n    import pipegrid.{package}.planted_{kind}_a\n"
            )
            plant(sources, package, f"planted_{kind}_a", f"import {there}\n")
    result = lint_imports(sources)
    assert result.returncode == 1, result.stdout + result.stderr
    return broken(result.stdout)["no circles inside packages"]


@pytest.mark.parametrize("kind", BACK)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_planted_circle_is_reported(of_circles, package, kind):
    (own,) = [
        text for text in of_circles.split("No cycles are allowed in ") if text.startswith(f"pipegrid.{package}.\n")
    ]
    assert f".planted_{kind}_b -> .planted_{kind}_a" in own


def imported_by(package: str, sources: Path) -> set[str]:
    """The packages of ours that a package imports, also in functions and for types."""
    trees = (ast.parse(path.read_text()) for path in (sources / package / "src").rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("pipegrid.")} - {package}


def declared_by(package: str, sources: Path) -> set[str]:
    """The packages of ours that the metadata of a package declares."""
    project = tomllib.loads((sources / package / "pyproject.toml").read_text())["project"]
    return {name for need in project["dependencies"] for name in re.findall(r"^pipegrid-(\w+)", need)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_metadata_declares_what_a_package_imports_and_no_more(package):
    assert imported_by(package, ROOT / "packages") == declared_by(package, ROOT / "packages")


def test_an_import_that_is_not_declared_is_found(copied):
    sources = copied("undeclared")
    plant(sources, "plans", "planted", "def later():\n    import pipegrid.layout\n", folder="verify")
    assert imported_by("plans", sources) - declared_by("plans", sources) == {"layout"}


def required_by(package: str) -> set[str]:
    """Everything from outside that installing a package brings."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", need)[0] for need in project["dependencies"]}
    ours = {name for name in names if name.startswith("pipegrid-")}
    return (names - ours).union(*(required_by(name.removeprefix("pipegrid-")) for name in ours))


WITHOUT_TORCH = ("core", "topology", "layout", "plans", "timeline", "search", "reshard", "planner", "goodput")


@pytest.mark.parametrize("package", PACKAGES)
def test_what_plans_installs_without_torch(package):
    if package in WITHOUT_TORCH:
        assert {"attrs"} <= required_by(package) <= {"attrs", "cattrs"}
    else:
        assert "torch" in required_by(package)


def test_what_installs_without_torch_is_imported_without():
    lines = "; ".join(f"from pipegrid.{package} import *" for package in WITHOUT_TORCH)
    code = f"import sys; sys.modules['torch'] = sys.modules['numpy'] = None; {lines}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
