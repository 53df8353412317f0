"""The contract of the packages, from their metadata: `lint-imports` finds it by pyproject.toml.

Each package imports exactly the packages of ours that its metadata declares, in functions and for types as well, and
torch or numpy only where it declares them. Imports count one by one, not chains of them: topology has a half that needs
torch (its extra `run`), and reshard, planner and goodput, which declare no torch, build on the other half. That they,
and all that installs without torch, never reach it is shown by a run (`tools/tests/test_contract.py`).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

PACKAGES = Path(__file__).parents[1] / "packages"
OUTSIDE = {"torch", "numpy"}


def _names(requirements: list[str]) -> set[str]:
    """What ``requirements`` are imported as, those of ours by their dotted names."""
    names = {re.split(r"[^\w-]", one)[0] for one in requirements}
    return {re.sub("^pipegrid-", "pipegrid.", name) for name in names}


class Declared(Contract):
    """Imports and metadata say the same."""

    type_name = "declared"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compare each package's imports with its metadata."""
        del verbose
        faults = []
        for package in sorted(graph.find_children("pipegrid")):
            path = PACKAGES / package.removeprefix("pipegrid.") / "pyproject.toml"
            project = tomllib.loads(path.read_text())["project"]
            declared = _names(project["dependencies"])
            extras = {name for extra in project.get("optional-dependencies", {}).values() for name in _names(extra)}
            found = set()
            for module in sorted({package} | graph.find_descendants(package)):
                for imported in sorted(graph.find_modules_directly_imported_by(module)):
                    other = re.match(r"(?:pipegrid\.)?\w+", imported)[0]  # type: ignore[index]  # of any dotted name
                    found.add(other)
                    ours = other.startswith("pipegrid.") and other != package
                    if (ours and other not in declared) or (other in OUTSIDE and other not in declared | extras):
                        faults.append(f"{module} imports {imported}; {package} does not declare {other}")
            unused = {one for one in declared - found if one.startswith("pipegrid.")}
            faults += [f"{package} declares {one} and never imports it" for one in sorted(unused)]
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the faults, one a line."""
        for fault in check.metadata["faults"]:
            output.print_error(fault, bold=False)
