"""ARCHITECTURE.md names files that exist, and every folder of the packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_tree_has_every_folder():
    tree = PAGE.split("## The tree")[1]
    folders = {
        path.parent.name
        for path in (ROOT / "packages").glob("*/src/pipegrid/**/__init__.py")
        if "__pycache__" not in path.parts
    }
    assert {name for name in folders if f"{name}/ " not in tree} == set()


def test_the_names_on_the_page_are_in_the_packages():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "packages").glob("*/src/**/*.py"))
    names = set(re.findall(r"`([A-Za-z_]+(?:Error|Runtime|Proof|Plan)|[a-z]+_[a-z_]+)`", PAGE))
    assert {name for name in names if name not in sources} == set()
