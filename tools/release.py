"""One version for all packages, their files in `dist/`, and the proof that these can be installed.

    python tools/release.py version 0.2.0    # in every pyproject.toml, CITATION.cff and CHANGELOG.md
    python tools/release.py build            # a wheel and an sdist of each package into dist/; needs hatchling
    python tools/release.py check            # what is in them (tools/dist_files.py)
    python tools/release.py install          # each alone and all together, into empty environments, with a first use

`python -m nox -s release` does the last three. A tag `v0.2.0` does, too, and publishes: .github/workflows/release.yml.
A package index shows a README without the repository around it: `build --repository https://host/owner/name` makes its
links absolute, to the tag of the version; without it they become their text.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from dist_files import faults_of
from documentation import with_links

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
META = "pipegrid"
"""The package without files that requires all others."""

FOLDERS = {
    tomllib.loads(path.read_text())["project"]["name"]: path.parent
    for path in sorted([*ROOT.glob("packages/*/pyproject.toml"), ROOT / "meta" / "pyproject.toml"])
}
"""Each package by its name."""

JOB = ROOT / "docs" / "examples" / "jobs" / "vlm.toml"
SMOKE: dict[str, list[list[str]]] = {
    "pipegrid-layout": [["-m", "pipegrid.layout", "Et*3|t*4L", "--pp", "2"]],
    "pipegrid-schedules": [
        ["-m", "pipegrid.schedules", "show", "zero_bubble_v", "--pp", "4", "--microbatches", "8", "--html", "plan.html"]
    ],
    "pipegrid-planner": [
        ["-m", "pipegrid.planner", "plan", str(JOB), "--gpus", "8", "--memory", "1TB", "--limit", "20"]
    ],
    "pipegrid-goodput": [["-m", "pipegrid.goodput", "--help"]],
    "pipegrid-testing": [["-m", "pytest", "--version", "--backend", "gloo"]],
    META: [["-m", "torch.distributed.run", "--nproc-per-node", "4", str(ROOT / "docs" / "examples" / "quickstart.py")]],
}
"""What is run after a package is installed, besides importing its public names: python's arguments."""


def set_version(text: str, version: str) -> str:
    """``text`` of a pyproject.toml with its version and its pins on sibling packages replaced."""
    text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text, count=1)
    return re.sub(r'"(pipegrid-[a-z_]+(?:\[[a-z]+\])?)==[^"]+"', rf'"\1=={version}"', text)


def set_changelog(text: str, version: str, day: str) -> str:
    """``text`` of the changelog with its unreleased changes under the version, and an empty heading above."""
    released = text.replace(f"{version} (unreleased)", version)
    return released.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - {day}\n", 1)


def set_versions(version: str) -> None:
    """Write the version into all metadata, the citation and the changelog."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit(f"{version!r} is no version; expected MAJOR.MINOR.PATCH with an optional aN, bN or rcN")
    for folder in FOLDERS.values():
        path = folder / "pyproject.toml"
        path.write_text(set_version(path.read_text(), version))
        print(f"{path.relative_to(ROOT)}: {version}")
    citation, changelog = ROOT / "CITATION.cff", ROOT / "CHANGELOG.md"
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {version}", citation.read_text()))
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    changelog.write_text(set_changelog(changelog.read_text(), version, today))


def version_of(name: str) -> str:
    """The version of a package, by its metadata."""
    return str(tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]["version"])


def readme(folder: Path, repository: str | None) -> str:
    """The README of a package as an index shows it: links to the tagged files of ``repository``, or none."""

    def absolute(path: str, is_picture: bool) -> str | None:
        target = Path(os.path.normpath(folder.relative_to(ROOT) / path)).as_posix()
        kind = "raw" if is_picture else "blob"
        return repository and f"{repository}/{kind}/v{version_of(META)}/{target}"

    return with_links((folder / "README.md").read_text(encoding="utf-8"), absolute)


def build(dist: Path, repository: str | None) -> None:
    """Write a wheel and an sdist of each package into an empty ``dist``."""
    shutil.rmtree(dist, ignore_errors=True)
    for folder in FOLDERS.values():
        with tempfile.TemporaryDirectory() as copy:
            unwanted = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build", "dist", "runs")
            shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=unwanted)
            (Path(copy) / "README.md").write_text(readme(folder, repository), encoding="utf-8")
            if repository:
                urls = f'\n[project.urls]\nRepository = "{repository}"\n'
                with (Path(copy) / "pyproject.toml").open("a", encoding="utf-8") as metadata:
                    metadata.write(urls)
            command = [sys.executable, "-m", "hatchling", "build", "-d", str(dist)]
            subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    print(f"built {len(list(dist.iterdir()))} files of {len(FOLDERS)} packages into {dist}")


def check(dist: Path, tag: str | None) -> None:
    """Exit with every fault of the files in ``dist``; with a ``tag``, also unless it is that of the version."""
    version = version_of(META)
    faults = [] if tag in (None, f"v{version}") else [f"the tag is {tag}; the version is {version}: tag v{version}"]
    faults += [fault for name, folder in FOLDERS.items() for fault in faults_of(dist, name, folder, version)]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{dist} has a wheel and an sdist of each of {len(FOLDERS)} packages, version {version}, as they should be")


def install(dist: Path, shared: list[Path], constraints: Path) -> None:
    """Install each package alone, then all together, into an empty environment, and use it.

    ``shared``: folders with packages that every environment has, such as torch, so that it need not be copied.
    """
    for name in FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = str(Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python")
            (site,) = Path(folder).glob("[Ll]ib/**/site-packages")
            (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
            pip = [python, "-m", "pip", "--disable-pip-version-check"]
            # Ours are given as files, so that none comes from an index.
            wheels = [str(dist / _wheel(one)) for one in _required(name)]
            subprocess.run([*pip, "install", "--quiet", "--constraint", str(constraints), *wheels], check=True)
            said = subprocess.run([*pip, "check"], check=False, capture_output=True, text=True).stdout
            if wrong := [line for line in said.splitlines() if line.startswith("pipegrid")]:  # not of what is shared
                sys.exit("\n".join(wrong))
            uses = [["-c", f"from {module} import *"] for module in _modules(name)] + SMOKE.get(name, [])
            for use in uses:
                subprocess.run([python, *use], check=True, cwd=folder, stdout=subprocess.DEVNULL)
            print(f"{name}: installed from {dist.name}, {len(uses)} uses", flush=True)


def _required(name: str) -> list[str]:
    """A package and those of its siblings that it requires, directly or not."""
    found, left = dict[str, None](), [name]
    while left:
        one = left.pop()
        if one not in found:
            found[one] = None
            project = tomllib.loads((FOLDERS[one] / "pyproject.toml").read_text())["project"]
            left += [sibling for sibling in FOLDERS if f"{sibling}==" in "\n".join(project["dependencies"])]
    return list(found)


def _wheel(name: str) -> str:
    return f"{name.replace('-', '_')}-{version_of(name)}-py3-none-any.whl"


def _modules(name: str) -> list[str]:
    """What a package, or all of them, can be imported as."""
    names = [one for one in FOLDERS if one != META] if name == META else [name]
    return [one.replace("-", ".") for one in names]


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("version").add_argument("version", help="for example 0.2.0")
    for name in ("build", "check", "install"):
        commands.add_parser(name).add_argument("--dist", type=Path, default=DIST)
    for name in ("build", "check"):  # the same options, as one line of nox gives them to both
        commands.choices[name].add_argument("--tag", help="which must be that of the version, such as v0.2.0")
        commands.choices[name].add_argument("--repository", help="where links of READMEs lead: https://host/owner/name")
    commands.choices["install"].add_argument(
        "--shared", type=Path, nargs="*", default=[], help="folders with torch, ..."
    )
    commands.choices["install"].add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    given = parser.parse_args()
    if given.command == "version":
        set_versions(given.version)
    elif given.command == "build":
        build(given.dist.resolve(), given.repository)
    elif given.command == "check":
        check(given.dist.resolve(), given.tag)
    else:
        install(given.dist.resolve(), given.shared, given.constraints)


if __name__ == "__main__":
    main()
