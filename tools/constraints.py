"""What sessions install, pinned: `python tools/constraints.py` writes constraints.txt and the table of docs/install.md.

pip resolves, for one environment, everything that a session of noxfile.py may install and what that needs in turn. Pins
that are there stay; `--upgrade NAME ...` takes the newest release of some, `--upgrade-all` of all but torch. So a fresh
machine installs today what it installed when the tests passed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- tested: begin -->", "<!-- tested: end -->"
_INSTALLING = ("install", "_shared")
_HEAD = """\
# What the sessions of noxfile.py install, whole: `python tools/constraints.py` writes it, `--upgrade NAME` moves a pin.
# The packages' own metadata keeps honest ranges.
"""


def name_of(requirement: str) -> str:
    """The normalized name of a requirement, such as ``pyyaml`` of ``PyYAML>=6``."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared() -> dict[str, list[str]]:
    """The requirements of each package and of the meta package, those of extras and tests too, siblings excepted."""
    found = {}
    for path in sorted([*ROOT.glob("packages/*/pyproject.toml"), ROOT / "meta" / "pyproject.toml"]):
        read: dict[str, Any] = tomllib.loads(path.read_text())
        lists = [read["project"].get("dependencies", []), read["build-system"]["requires"]]
        lists += [
            *read["project"].get("optional-dependencies", {}).values(),
            *read.get("dependency-groups", {}).values(),
        ]
        found[path.parent.name] = [one for each in lists for one in each if not one.startswith("pipegrid-")]
    return found


def requirements(noxfile: str) -> set[str]:
    """All that a session installs: what packages declare, and what noxfile.py names beside."""
    found = {one for each in declared().values() for one in each} | {"virtualenv"}
    for node in ast.walk(ast.parse(noxfile)):
        texts: Iterable[ast.expr] = ()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _INSTALLING:
            texts = node.args
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            named = {target.id for target in node.targets if isinstance(target, ast.Name)}
            texts = node.value.elts if named & {"EVERY_TEST", "NOTEBOOK", "LARGE"} else ()
        found |= {one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def pins(text: str) -> dict[str, str]:
    """The version of each name in a list of pins."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name_of(line): line.partition("==")[2] for line in lines if line}


def resolve(needed: Iterable[str], kept: Mapping[str, str]) -> dict[str, str]:
    """What pip would install into an empty environment, under the pins ``kept``."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "constraints.txt", Path(folder) / "report.json"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--constraint", str(constraints), *sorted(needed)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    found = (one["metadata"] for one in installs)
    # A local version, such as 2.13.0+cpu, is one index's; the pin without it is met by each.
    return {name_of(one["name"]): one["version"].partition("+")[0] for one in found}


def lowest() -> dict[str, str]:
    """The lowest version of each name that the packages' metadata allows, where it gives one."""
    bounds: dict[str, str] = {}
    for requirement in (one for each in declared().values() for one in each):
        bound = re.search(r">=\s*([\d.]+)", requirement)
        if bound is not None:
            known = bounds.setdefault(name_of(requirement), bound[1])
            bounds[name_of(requirement)] = max(
                known, bound[1], key=lambda text: [int(part) for part in text.split(".")]
            )
    return bounds


def to_test(installed: Mapping[str, str], held: Iterable[str]) -> dict[str, list[str]]:
    """By package, its dependencies of which another version is installed than the pinned one, those held excepted."""
    pinned = pins(FILE.read_text())
    changed = {name for name, version in installed.items() if pinned.get(name, version) != version} - set(held)
    by_package = {package: {*map(name_of, needs)} & changed for package, needs in declared().items()}
    return {package: sorted(names) for package, names in by_package.items() if names and package != "meta"}


def table(kind: str, installed: Mapping[str, str], held: Iterable[str], junit: Path | None) -> str:
    """Dependency, tested version, the version installed here, test cases that touch it, and failures among them."""
    cases = _cases(junit) if junit is not None else []
    tested, users = pins(FILE.read_text()), to_test(installed, held)
    lines = [f"| dependency | tested | {kind} | cases | failures |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({name_of(one) for each in declared().values() for one in each}):
        touching = tuple(f"packages.{package}." for package, names in users.items() if name in names)
        own = [case for case in cases if touching and case.get("classname", "").startswith(touching)]
        here = f"{installed.get(name, 'none')}{' (held back)' if name in held else ''}"
        counts = (
            f"{len(own)} | {sum(map(_failed, own))}"
            if touching
            else "as tested | 0"
            if name not in held
            else "not run | 0"
        )
        lines.append(f"| {name} | {tested.get(name, 'none')} | {here} | {counts} |")
    return "\n".join(lines)


def install_table(pinned: Mapping[str, str]) -> str:
    """What the packages need at run time: the versions that they allow, and the one that every test runs with."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    lists = [[project["dependencies"], *project.get("optional-dependencies", {}).values()] for project in projects]
    needs = sorted({one for lists_of in lists for each in lists_of for one in each if not one.startswith("pipegrid-")})
    rows = [f"| {name_of(one)} | {one[len(name_of(one)) :] or 'any'} | {pinned[name_of(one)]} |" for one in needs]
    return "\n".join(["| dependency | allowed | tested |", "| --- | --- | --- |", *rows])


def write_page(page: Path, text: str) -> None:
    """Replace the table between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def _cases(junit: Path) -> list[ET.Element]:
    return list(ET.parse(junit).iter("testcase"))


def _failed(case: ET.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def failures(junit: Path) -> int:
    """How many cases have failed."""
    return sum(map(_failed, _cases(junit)))


def main() -> None:
    """Write the pins and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="NAME", help="their newest releases")
    parser.add_argument("--upgrade-all", action="store_true", help="the newest release of all but torch")
    given = parser.parse_args()
    free = {name_of(name) for name in given.upgrade}
    now = pins(FILE.read_text())
    kept = {name: at for name, at in now.items() if name not in free and (name == "torch" or not given.upgrade_all)}
    found = resolve(requirements((ROOT / "noxfile.py").read_text()), kept)
    FILE.write_text(_HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)))
    write_page(PAGE, install_table(found))
    for name in sorted({*now, *found}):
        if now.get(name) != found.get(name):
            print(f"{name}: {now.get(name, 'none')} -> {found.get(name, 'none')}")


if __name__ == "__main__":
    main()
