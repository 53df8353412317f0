"""The tool for releases: what it builds is right, and what it must not let pass."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import release  # noqa: E402  -- a script beside this folder, not an installed package
from dist_files import faults_of  # noqa: E402
from documentation import links  # noqa: E402

NAME = "pipegrid-layout"
FOLDER = ROOT / "packages" / "layout"
STEM = "pipegrid_layout-0.1.0"
META = {"pipegrid": release.FOLDERS["pipegrid"]}


def written(files, dist):
    """A wheel and an sdist of these files of the wheel."""
    with zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    with tarfile.open(dist / f"{STEM}.tar.gz", "w:gz") as sdist:
        for path in ("pyproject.toml", "README.md", "LICENSE", "src"):
            sdist.add(FOLDER / path, f"{STEM}/{path}", filter=lambda one: None if "__pycache__" in one.name else one)
        sdist.add(FOLDER / "README.md", f"{STEM}/PKG-INFO")


@pytest.fixture
def files():
    """What is in a right wheel."""
    source = FOLDER / "src"
    held = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    head = {"Name": NAME, "Version": "0.1.0", "License-Expression": "Apache-2.0", "Summary": project["description"]}
    lines = [f"{key}: {value}" for key, value in head.items()]
    lines += [f"Requires-Python: {project['requires-python']}", "Requires-Dist: pipegrid-topology==0.1.0"]
    metadata = "\n".join(lines) + "\n\n" + (FOLDER / "README.md").read_text()
    info = f"{STEM}.dist-info"
    return held | {f"{info}/METADATA": metadata.encode(), f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}


def faults(files, dist):
    written(files, dist)
    return list(faults_of(dist, NAME, FOLDER, "0.1.0"))


def test_a_right_package_has_no_faults(files, tmp_path):
    assert faults(files, tmp_path) == []
    (tmp_path / f"{STEM}.tar.gz").unlink()
    assert list(faults_of(tmp_path, NAME, FOLDER, "0.1.0")) == [f"{STEM}.tar.gz is not in {tmp_path}"]


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("pipegrid/layout/py.typed", None, "lacks pipegrid/layout/py.typed"),
        ("pipegrid/layout/text.py", None, "lacks pipegrid/layout/text.py"),
        ("pipegrid/layout/text.py", b"", "pipegrid/layout/text.py differs from its source"),
        ("pipegrid/__init__.py", b"", "pipegrid/__init__.py would hide the other packages"),
        ("tests/test_x.py", b"", "has tests/test_x.py, which is no source of it"),
        (f"{STEM}.dist-info/licenses/LICENSE", None, "lacks the text of the licence"),
        (f"{STEM}.dist-info/METADATA", b"Name: other\n\n", "Name is 'other'"),
        (f"{STEM}.dist-info/METADATA", b"Requires-Dist: pipegrid-topology>=0.1.0\n\n", "is required at ==0.1.0"),
        (f"{STEM}.dist-info/METADATA", b"Requires-Dist: pipegrid-topology\n\n", "is required at ==0.1.0"),
        (f"{STEM}.dist-info/METADATA", b"Name: x\n\n[a](../b.md#c) [d](#e)", "its README links to ../b.md#c, which an"),
    ],
)
def test_a_planted_fault_is_found(files, tmp_path, name, data, text):
    changed = {one: content for one, content in files.items() if one != name} | ({} if data is None else {name: data})
    assert any(text in fault for fault in faults(changed, tmp_path))


def test_a_version_is_set_everywhere_it_stands():
    before = (ROOT / "meta" / "pyproject.toml").read_text()
    after = release.set_version(before, "1.2.3rc1")
    assert "0.1.0" not in after
    assert after.count("1.2.3rc1") == before.count("0.1.0")
    log = "# Changelog\n\n## [Unreleased]\n\n1.2.3 (unreleased), the first.\n\n### Added\n"
    log = release.set_changelog(log, "1.2.3", "2026-12-01")
    assert log == "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n\n1.2.3, the first.\n\n### Added\n"


@pytest.mark.parametrize("folder", release.FOLDERS.values(), ids=lambda path: path.name)
def test_a_readme_on_an_index_has_no_relative_link(folder):
    before = links((folder / "README.md").read_text(encoding="utf-8"))
    assert all((folder / target.partition("#")[0]).exists() for target in before)
    assert links(release.readme(folder, None)) == []
    absolute = release.readme(folder, "https://host.example/owner/name")
    assert links(absolute) == []
    targets = re.findall(r"\]\(https://host\.example/owner/name/blob/v0\.1\.0/([^)]+)\)", absolute)
    assert len(targets) == len(before)
    assert all((ROOT / target.partition("#")[0]).is_file() for target in targets)


@pytest.mark.thorough
def test_what_is_built_leads_to_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "FOLDERS", {"pipegrid-transport": ROOT / "packages" / "transport"} | META)
    release.build(tmp_path, "https://host.example/owner/name")
    with zipfile.ZipFile(tmp_path / "pipegrid_transport-0.1.0-py3-none-any.whl") as wheel:
        text = wheel.read("pipegrid_transport-0.1.0.dist-info/METADATA").decode()
    assert "Project-URL: Repository, https://host.example/owner/name\n" in text
    assert "(https://host.example/owner/name/blob/v0.1.0/docs/concepts/transport.md)" in text
    release.check(tmp_path, "v0.1.0")


def test_a_tag_of_another_version_ends_the_check(tmp_path):
    with pytest.raises(SystemExit, match=r"the tag is v9.9.9; the version is 0.1.0: tag v0.1.0"):
        release.check(tmp_path, "v9.9.9")


def test_every_package_is_released_with_what_it_requires():
    assert set(release.FOLDERS) == {f"pipegrid-{path.name}" for path in ROOT.glob("packages/*")} | {"pipegrid"}
    assert set(release.SMOKE) <= set(release.FOLDERS)
    assert release._required("pipegrid-transport") == ["pipegrid-transport", "pipegrid-topology", "pipegrid-core"]
    assert set(release._required("pipegrid")) == set(release.FOLDERS)


def test_the_workflow_runs_sessions_that_exist_and_publishes_only_tags():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    sessions = re.findall(r"nox -s (\w+)", text)
    noxfile = (ROOT / "noxfile.py").read_text()
    assert sessions
    assert all(f"def {name}(" in noxfile for name in sessions)
    assert 'tags: ["v*"]' in text
    assert "id-token: write" in text
    assert "password" not in text
