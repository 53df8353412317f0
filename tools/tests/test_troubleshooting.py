"""docs/troubleshooting.md quotes texts that the packages raise, and is short."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
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


VALUES = ("3", "'dp'", "60", "[0, 1, 2]", "stage 1, microbatch 7", "layers.3.mlp (Linear)", "0.5", "runs/a")
SEARCHED = """
const searched = require(process.argv[1]), [queries, texts] = JSON.parse(process.argv[2]);
console.log(JSON.stringify(queries.map((query) => searched(query, texts))));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed; it runs the script of the search")
def test_a_pasted_error_is_searched_by_its_words():
    def filled(text):
        values = iter(VALUES)
        return re.sub("…", lambda _: next(values), text)

    script = ROOT / "docs" / "javascripts" / "pasted_errors.js"
    # As a terminal shows it, and with what is said before and after it.
    pasted = [filled(text) for text in QUOTED]
    pasted += [f"PipelineError: rank 1: ValueError: {filled(text)}. Do this, or that" for text in QUOTED]
    queries = [*pasted, "zero bubble", "the loss of each microbatch on the last rank"]
    command = ["node", "-e", SEARCHED, str(script), json.dumps([queries, QUOTED])]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found[-2:] == queries[-2:]  # no error
    searched = zip([*QUOTED, *QUOTED], found[:-2], strict=True)
    assert {
        text: words for text, words in searched if set(words.split()) - set(re.findall("[a-z_]+", text.lower()))
    } == {}


def test_the_page_is_short():
    assert 20 <= len(QUOTED) <= 35
    assert len(PAGE.split()) <= 2000
