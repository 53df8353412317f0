"""Versions move together: one version in every package, and every package asks for exactly its siblings'."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
}


def test_every_package_has_the_same_version():
    assert len(PROJECTS) == 8
    assert len({project["version"] for project in PROJECTS.values()}) == 1


def test_siblings_are_required_at_that_version():
    version = PROJECTS["topology"]["version"]
    for project in PROJECTS.values():
        for requirement in project["dependencies"]:
            if requirement.startswith("pipegrid-"):
                assert requirement.endswith(f"=={version}"), f"{project['name']} requires {requirement}"


def test_the_changelog_has_a_heading_for_the_version():
    version = PROJECTS["topology"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_the_version():
    assert f"\nversion: {PROJECTS['topology']['version']}\n" in (ROOT / "CITATION.cff").read_text()
