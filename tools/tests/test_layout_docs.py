"""docs/concepts/layout.md: its code runs and prints what the page says; its picture is the one that the code draws."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "concepts"


@pytest.fixture(scope="module")
def page() -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The names that the page's code defines, and for each block what it printed beside what the page says."""
    text = (DOCS / "layout.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    outputs = []
    for code, said in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "layout.md", "exec"), names)  # the page's own code
        outputs.append((printed.getvalue(), said))
    assert len(outputs) == text.count("```python")
    return names, outputs


def test_the_code_prints_what_the_page_says(page: tuple[dict[str, Any], list[tuple[str, str]]]) -> None:
    for printed, said in page[1]:
        assert printed == said


def test_the_picture_is_the_one_of_the_example(page: tuple[dict[str, Any], list[tuple[str, str]]]) -> None:
    picture = (DOCS / "layout" / "balance.svg").read_text(encoding="utf-8")
    assert picture == page[0]["tight"].report.svg()
