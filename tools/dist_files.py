"""What a wheel and an sdist of a package must be: its sources and no more, typed, licensed, with pinned siblings."""

from __future__ import annotations

import email
import email.message
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from documentation import links


def faults_of(dist: Path, name: str, folder: Path, version: str) -> Iterator[str]:
    """What is wrong with the two files of a package in ``dist``, a sentence each."""
    stem = f"{name.replace('-', '_')}-{version}"
    wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    for path in (wheel, sdist):
        if not path.exists():
            yield f"{path.name} is not in {dist}"
    if wheel.exists():
        with zipfile.ZipFile(wheel) as archive:
            files = {entry: archive.read(entry) for entry in archive.namelist() if not entry.endswith("/")}
        yield from (f"{wheel.name}: {fault}" for fault in _in_wheel(files, stem, folder))
        yield from (f"{wheel.name}: {fault}" for fault in _metadata(files, stem, project, version))
    if sdist.exists():
        with tarfile.open(sdist) as tar:
            held = {one.name: one.isfile() for one in tar.getmembers()}
        yield from (f"{sdist.name}: {fault}" for fault in _in_sdist(held, stem, folder))


def _sources(folder: Path) -> dict[str, bytes]:
    """The files that a package is made of, by their path in a wheel."""
    files = [path for path in (folder / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder / "src").as_posix(): path.read_bytes() for path in files}


def _in_wheel(files: dict[str, bytes], stem: str, folder: Path) -> Iterator[str]:
    sources, info = _sources(folder), f"{stem}.dist-info/"
    carried = {name: data for name, data in files.items() if not name.startswith(info)}
    yield from (f"lacks {name}" for name in sorted(sources.keys() - carried))
    yield from (f"has {name}, which is no source of it" for name in sorted(carried.keys() - sources))
    yield from (f"{name} differs from its source" for name in sorted(carried) if carried[name] != sources.get(name))
    if "pipegrid/__init__.py" in carried:
        yield "pipegrid/__init__.py would hide the other packages of the namespace"
    for package in {name.split("/")[1] for name in sources}:
        if f"pipegrid/{package}/py.typed" not in carried:
            yield f"lacks pipegrid/{package}/py.typed"
    if (
        files.get(f"{info}licenses/LICENSE")
        != (folder.parents[0 if folder.name == "meta" else 1] / "LICENSE").read_bytes()
    ):
        yield "lacks the text of the licence"


def _metadata(files: dict[str, bytes], stem: str, project: dict[str, Any], version: str) -> Iterator[str]:
    written = email.message_from_bytes(files.get(f"{stem}.dist-info/METADATA", b""))
    wanted = {
        "Name": project["name"],
        "Version": version,
        "License-Expression": "Apache-2.0",
        "Requires-Python": project["requires-python"],
        "Summary": project["description"],
    }
    for key, value in wanted.items():
        if written[key] != value:
            yield f"{key} is {written[key]!r}; it must be {value!r}"
    if len(str(written.get_payload())) < 200:
        yield "has no description; it is the package's README"
    for target in links(str(written.get_payload())):
        yield f"its README links to {target}, which an index does not have: build with --repository, or without links"
    yield from _pins(written, version)


def _pins(written: email.message.Message, version: str) -> Iterator[str]:
    for requirement in written.get_all("Requires-Dist", []):
        found = re.match(r"(pipegrid-[a-z_-]+)(\[[a-z,]+\])?(.*?)(;|$)", str(requirement))
        if found and found[3].strip() != f"=={version}":
            yield f"requires {requirement}; a sibling is required at =={version}"


def _in_sdist(held: dict[str, bool], stem: str, folder: Path) -> Iterator[str]:
    wanted = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", *(f"src/{name}" for name in _sources(folder))}
    for name in sorted(wanted):
        if not held.get(f"{stem}/{name}"):
            yield f"lacks {name}"
    for name in sorted(held):
        if "__pycache__" in name or name.endswith((".pyc", ".so")) or not name.startswith(f"{stem}/"):
            yield f"has {name}"
