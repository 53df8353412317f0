"""What sessions install, pinned: `python tools/constraints.py` writes constraints.txt and the tables of what is tested.

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
MODULE = ROOT / "packages" / "stages" / "src" / "pipegrid" / "stages" / "tested_versions.py"
# What the tool writes is between these in each.
MARKS = {
    PAGE: ("<!-- tested: begin -->\n\n", "\n\n<!-- tested: end -->"),
    MODULE: ("TESTED: Final = {", "}\n"),
}
# Releases newer than the pinned one that `nox -s tests-torch` runs with.
NEWER = {"torch": "2.15"}
# Of what a job is told when it runs with another release.
TOLD = ("torch", "transformers")
# What a release of a dependency may break: the names of files of tests, which are quick. For a dependency that is not
# here: in each package that declares it, the smallest file that imports it.
TOUCHING = {
    "attrs": ("test_core_fields", "test_topology_mistakes", "test_layout_mistakes", "test_arguments"),
    "cattrs": ("test_layout_command_line", "test_command_line", "test_goodput_inputs"),
    "numpy": ("test_testing_ranks", "test_training_rows"),
    "pytest": ("test_testing_options", "test_testing_failures"),
    "rich": ("test_topology_placement", "test_command_line"),
    "safetensors": ("test_checkpoint_weights", "test_stages_pretrained"),
    "torch": (
        "test_topology_torch_compat",
        "test_transport_torch_facts",
        "test_torch_facts",
        "test_stages_cut_values",
    ),
    "transformers": ("test_training_generation", "test_training_slices", "test_stages_cut"),
}
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


def to_test(installed: Mapping[str, str], held: Iterable[str]) -> dict[str, list[Path]]:
    """By dependency of which another version is installed than the pinned one, those held excepted: what touches it."""
    pinned = pins(FILE.read_text())
    users: dict[str, set[str]] = {}
    for package, needs in declared().items():
        for need in needs:
            users.setdefault(name_of(need), set()).add(package)
    changed = {name for name in users if installed.get(name, pinned[name]) != pinned[name]} - set(held)
    return {name: touching(name, users[name]) for name in sorted(changed)}


def touching(name: str, packages: Iterable[str]) -> list[Path]:
    """The files of tests for a dependency of ``packages``: those of `TOUCHING`, or the smallest of each."""
    if name in TOUCHING:
        return [path for stem in TOUCHING[name] for path in sorted(ROOT.glob(f"packages/*/tests/**/{stem}.py"))]
    uses = re.compile(rf"^\s*(import|from) {name.replace('-', '_')}\b|importorskip\(.{name}.\)", re.MULTILINE)
    found = []
    for package in sorted(packages):
        paths = [path for path in ROOT.glob(f"packages/{package}/tests/**/test_*.py") if uses.search(path.read_text())]
        found += sorted(paths, key=lambda path: (path.stat().st_size, path))[:1]
    return found


def table(kind: str, installed: Mapping[str, str], held: Iterable[str], junit: Path | None) -> str:
    """Dependency, tested version, the version installed here, test cases that touch it, and failures among them."""
    cases = _cases(junit) if junit is not None else []
    pinned, files = pins(FILE.read_text()), to_test(installed, held)
    lines = [f"| dependency | tested | {kind} | cases | failures |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({name_of(one) for each in declared().values() for one in each} & installed.keys()):
        modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files.get(name, ())}
        own = [case for case in cases if _module_of(case) in modules]
        here = f"{installed[name]}{' (held back)' if name in held else ''}"
        otherwise = "not run | 0" if name in held else "as tested | 0"
        counts = f"{len(own)} | {sum(map(_failed, own))}" if name in files else otherwise
        lines.append(f"| {name} | {pinned[name]} | {here} | {counts} |")
    return "\n".join(lines)


def tested(name: str, pinned: Mapping[str, str]) -> tuple[str, str]:
    """The oldest and the newest release of a dependency that tests run with, without the third number."""
    at = ".".join(pinned[name].split(".")[:2])
    return lowest().get(name, at), NEWER.get(name, at)


def install_table(pinned: Mapping[str, str]) -> str:
    """What the packages need at run time: the versions that they allow, those tested, and the one of every session."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    lists = [[project["dependencies"], *project.get("optional-dependencies", {}).values()] for project in projects]
    needs = sorted({one for lists_of in lists for each in lists_of for one in each if not one.startswith("pipegrid-")})
    rows = []
    for one in needs:
        name = name_of(one)
        ends = " to ".join(dict.fromkeys(tested(name, pinned)))
        rows.append(f"| {name} | {one[len(name) :] or 'any'} | {ends} | {pinned[name]} |")
    return "\n".join(["| dependency | allowed | tested | pinned |", "| --- | --- | --- | --- |", *rows])


def module_table(pinned: Mapping[str, str]) -> str:
    """The entries of the dict in `MODULE`."""
    ends = {name: tested(name, pinned) for name in TOLD}
    return ", ".join(f'"{name}": ("{oldest}", "{newest}")' for name, (oldest, newest) in ends.items())


def write_between(path: Path, text: str) -> None:
    """Replace what is between the marks of a file."""
    begin, end = MARKS[path]
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}")


def _cases(junit: Path) -> list[ET.Element]:
    return list(ET.parse(junit).iter("testcase"))


def _module_of(case: ET.Element) -> str:
    """The module of a case, which a class in it follows; of an error of collection it is the name."""
    place = case.get("classname") or case.get("name") or ""
    return ".".join(part for part in place.split(".") if not part[:1].isupper())


def _failed(case: ET.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def failures(junit: Path) -> int:
    """How many cases have failed."""
    return sum(map(_failed, _cases(junit)))


def main() -> None:
    """Write the pins, the page and the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="NAME", help="their newest releases")
    parser.add_argument("--upgrade-all", action="store_true", help="the newest release of all but torch")
    given = parser.parse_args()
    free = {name_of(name) for name in given.upgrade}
    now = pins(FILE.read_text())
    kept = {name: at for name, at in now.items() if name not in free and (name == "torch" or not given.upgrade_all)}
    found = resolve(requirements((ROOT / "noxfile.py").read_text()), kept)
    FILE.write_text(_HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)))
    write_between(PAGE, install_table(found))
    write_between(MODULE, module_table(found))
    for name in sorted({*now, *found}):
        if now.get(name) != found.get(name):
            print(f"{name}: {now.get(name, 'none')} -> {found.get(name, 'none')}")


if __name__ == "__main__":
    main()
