"""docs/troubleshooting.md quotes texts that the packages raise, and is short."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [text for line in re.findall(r"^### (.+)$", PAGE, re.MULTILINE) for text in re.findall(r"`([^`]+)`", line)]


@cache
def texts():
    """Every text in the sources, with its values as an ellipsis."""
    found = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(re.sub("…+", "…", text) for text in found)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_text_is_raised(quoted):
    """Its words between values, each in one text of the sources."""
    parts = [part.strip() for part in re.split(r"…|\(…\)", quoted) if len(part.split()) > 1]
    assert parts
    assert any(all(part in text for part in parts) for text in texts().split("\n"))


def test_the_page_is_short():
    assert 20 <= len(QUOTED) <= 35
    assert len(PAGE.split()) <= 2000
