"""Versions move together: one version in every package, and every package asks for exactly its siblings'."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "meta" / "pyproject.toml"]
}


def test_every_package_has_the_same_version():
    assert len(PROJECTS) > 20  # all were found
    assert len({project["version"] for project in PROJECTS.values()}) == 1


def test_siblings_are_required_at_that_version():
    version = PROJECTS["topology"]["version"]
    for project in PROJECTS.values():
        extras = project.get("optional-dependencies", {}).values()
        for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
            if requirement.startswith("pipegrid-"):
                assert requirement.endswith(f"=={version}"), f"{project['name']} requires {requirement}"


def test_the_meta_package_requires_every_other():
    required = {requirement.partition("==")[0] for requirement in PROJECTS["meta"]["dependencies"]}
    assert required == {project["name"] for name, project in PROJECTS.items() if name != "meta"}


def test_the_changelog_is_of_the_known_form():
    """Keep a Changelog: unreleased changes first, then versions with their days; kinds of changes under each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\S*\] - \d{4}-\d\d-\d\d", one) for one in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_every_package_carries_the_licence():
    licence = (ROOT / "LICENSE").read_bytes()
    for path in [*ROOT.glob("packages/*"), ROOT / "meta"]:
        assert (path / "LICENSE").read_bytes() == licence, path


def test_the_citation_has_the_version():
    assert f"\nversion: {PROJECTS['topology']['version']}\n" in (ROOT / "CITATION.cff").read_text()
