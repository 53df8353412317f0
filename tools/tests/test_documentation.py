"""What the site is made of: which files are pages, how their links change, what `llms.txt` says of a page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import documentation  # noqa: E402


@pytest.fixture
def repository(tmp_path):
    texts = {
        "docs/index.md": "# Home\n\nFirst sentence. Second.\n",
        "docs/concepts/a.md": "# A\n",
        "docs/picture.svg": "<svg/>",
        "packages/x/README.md": "# x\n",
        "packages/x/src/x.py": "",
        "ARCHITECTURE.md": "# Architecture\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("page", "written", "on_the_site"),
    [
        ("ARCHITECTURE.md", "[a](docs/concepts/a.md#b)", "[a](concepts/a.md#b)"),
        ("ARCHITECTURE.md", "[`x`](packages/x/README.md)", "[`x`](packages/x.md)"),
        ("ARCHITECTURE.md", "[`x.py`](packages/x/src/x.py), more", "`x.py`, more"),
        ("packages/x/README.md", "[a](../../docs/concepts/a.md)", "[a](../concepts/a.md)"),
        ("docs/concepts/a.md", "![p](../picture.svg)", "![p](../picture.svg)"),
        ("docs/concepts/a.md", "[x](../../packages/x/README.md)", "[x](../packages/x.md)"),
        (
            "docs/concepts/a.md",
            "[here](#a) [there](https://example.org/x.md)",
            "[here](#a) [there](https://example.org/x.md)",
        ),
        ("docs/concepts/a.md", "```python\na[0](gone.md)\n```", "```python\na[0](gone.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(repository, page, written, on_the_site):
    (repository / page).write_text(written, encoding="utf-8")
    assert documentation.relinked(repository / page, documentation.sources(repository)) == on_the_site


@pytest.mark.parametrize(
    ("written", "on_the_site"),
    [
        ("| `a\\|b` | c\\|d |\n", "| `a|b` | c\\|d |\n"),
        ("`a\\|b`\n", "`a\\|b`\n"),  # no table: the code has the bar's escape itself
        ("```text\n| `a\\|b` |\n```\n", "```text\n| `a\\|b` |\n```\n"),
    ],
)
def test_code_in_tables_has_bars_as_the_site_reads_them(written, on_the_site):
    assert documentation.for_site(written) == on_the_site


@pytest.mark.parametrize(
    ("text", "title", "sentence"),
    [
        ("# Home\n\nFirst sentence. Second.\n", "Home", "First sentence."),
        (
            "# T\n\n    a command\n\nWhat [it](x.md) does, over\ntwo lines. More.\n",
            "T",
            "What it does, over two lines.",
        ),
        ("# T\n\n![p](x.svg)\n\nIn short: this.\n", "T", "In short"),
    ],
)
def test_the_index_has_the_title_and_the_first_sentence(text, title, sentence):
    assert documentation.summary(text) == (title, sentence)


def test_an_entry_of_the_reference_has_a_heading_and_is_in_no_class():
    html = (
        '<a id="pipegrid.x.made"></a>'  # a module that is called like a function
        '<h2 id="pipegrid.x.one.told" class="doc doc-heading">'
        '<h2 id="pipegrid.x.Record" class="doc doc-heading">'
        '<h3 id="pipegrid.x.Record.sent" class="doc doc-heading">'
        '<h2 id="said">'
    )
    assert documentation.entries_of(html) == {"told", "Record"}


def test_every_page_is_in_the_navigation_and_no_other():
    pytest.importorskip("yaml")
    listed = [page for _, pages in documentation.navigation() for page in pages]
    assert len(listed) == len(set(listed))
    assert set(listed) == {page for page in documentation.sources().values() if page.suffix == ".md"}


def test_the_readme_and_the_pages_of_concepts_are_short():
    assert len((documentation.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
    pages = (documentation.ROOT / "docs" / "concepts").glob("*.md")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 30_000
