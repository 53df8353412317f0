"""ARCHITECTURE.md and its two pages name files that exist, and every folder; links of all pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE, INVARIANTS, VOCABULARY = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("ARCHITECTURE.md", "docs/invariants.md", "docs/vocabulary.md")
)
FOLDERS = ("", "docs", "packages", "tools")
PAGES = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")
    if not {"node_modules", ".nox", "site", "build"} & set(path.parts)
)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_architecture_links_its_files_and_is_short():
    assert len(re.findall(r"\]\(([^)#]+)\)", PAGE)) > 30
    assert len(PAGE.split()) <= 1500


def test_the_tree_has_every_folder():
    tree = VOCABULARY.split("## The tree")[1]
    folders = {
        path.parent.name
        for path in (ROOT / "packages").glob("*/src/pipegrid/**/__init__.py")
        if "__pycache__" not in path.parts
    }
    assert {name for name in folders if f"{name}/ " not in tree} == set()


def test_the_reading_order_has_the_lines_that_it_says():
    text = PAGE.split("## A reading order")[1].split("## ")[0]
    said = int(re.search(r"About ([\d,]+) lines", text)[1].replace(",", ""))
    links = re.findall(r"\]\((packages/[^)]+\.py)\)", text)
    lines = sum((ROOT / link).read_text(encoding="utf-8").count("\n") for link in links)
    assert abs(lines - said) < 0.1 * said, lines


def test_the_names_on_the_page_are_in_the_packages():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "packages").glob("*/src/**/*.py"))
    names = set(
        re.findall(r"`([A-Za-z_]+(?:Error|Runtime|Proof|Plan)|[a-z]+_[a-z_]+)`", PAGE + INVARIANTS + VOCABULARY)
    )
    assert {name for name in names if name not in sources} == set()


def test_the_tests_on_the_page_exist():
    tests = set(re.findall(r"`(test_[a-z_]+\.py)`", INVARIANTS))
    there = {path.name for part in ("packages/*/tests", "integration_tests") for path in ROOT.glob(f"{part}/**/*.py")}
    assert tests <= there
