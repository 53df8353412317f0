"""The picture of the packages is what their metadata says today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "draw_packages.py"))


def test_the_committed_picture_is_up_to_date():
    assert TOOL["PICTURE"].read_text(encoding="utf-8") == TOOL["svg"](), "run: python tools/draw_packages.py"


def test_every_package_is_in_it_and_it_is_on_the_page():
    names = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert set(re.findall(r"<text [^>]*>(\w+)</text>", TOOL["svg"]())) == names
    assert "](docs/pictures/packages.svg)" in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_arrows_that_others_imply_are_left_out():
    direct = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset(), "d": frozenset("c")}
    assert TOOL["arrows"](direct) == [("a", "b"), ("b", "c"), ("d", "c")]
    assert TOOL["heights"](direct) == {"a": 2, "b": 1, "c": 0, "d": 1}
    assert {name: row for name, (_, row) in TOOL["places"](direct).items()} == TOOL["heights"](direct)
