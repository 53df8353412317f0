"""The pictures of the docs are what tools/draw_docs.py draws today, and each is shown on a page."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRAWN = runpy.run_path(str(ROOT / "tools" / "draw_docs.py"))


@pytest.mark.thorough
def test_committed_pictures_are_up_to_date():
    pictures = DRAWN["pictures"]()
    committed = {path.name: path.read_text(encoding="utf-8") for path in DRAWN["FOLDER"].glob("*.svg")}
    stale = sorted(name for name in pictures.keys() | committed if pictures.get(name) != committed.get(name))
    assert not stale, f"{stale} differ from what is drawn; run: python tools/draw_docs.py"


def test_every_picture_is_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "concepts").glob("*.md"))
    for name in DRAWN["pictures"]():
        assert f"](timelines/{name})" in pages
