"""The notebook runs without torch and without ranks, and shows what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import run_notebook  # noqa: E402  -- a script beside this folder, not an installed package

pytestmark = pytest.mark.thorough


def test_the_notebook_shows_what_a_run_prints():
    pytest.importorskip("nbclient", reason="the contract session has it")
    written = json.loads(run_notebook.NOTEBOOK.read_text(encoding="utf-8"))
    found = run_notebook.run()
    assert run_notebook.printed(found) == run_notebook.printed(written)
    drawn = [output for cell in found.cells for output in cell.get("outputs", ()) if "data" in output]
    assert {kind for output in drawn for kind in output["data"]} == {"image/svg+xml", "text/html", "text/plain"}


def test_the_notebook_has_its_results():
    written = json.loads(run_notebook.NOTEBOOK.read_text(encoding="utf-8"))
    texts = run_notebook.printed(written)
    assert "no deadlock even if sends block" in texts[2]
    assert "wait for each other in a cycle" in texts[3]
    assert "zero_bubble_v" in texts[5]
    source = "".join(line for cell in written["cells"] for line in cell["source"])
    assert "import torch" not in source
