"""docs/troubleshooting.md has every error class, with the message that is raised now, its cause and its remedy."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import troubleshooting
from error_examples import EXAMPLES

CLASSES = {error.name: error for error in troubleshooting.error_classes()}


def subclasses(kind):
    return {kind, *(found for below in kind.__subclasses__() for found in subclasses(below))}


def test_the_page_is_the_one_that_the_tool_writes():
    assert troubleshooting.PAGE.read_text(encoding="utf-8") == troubleshooting.page(), "run tools/troubleshooting.py"


def test_no_error_class_that_python_knows_is_missing():
    for error in CLASSES.values():
        assert issubclass(getattr(importlib.import_module(error.module), error.name), Exception)
    loaded = {kind for kind in subclasses(Exception) if kind.__module__.startswith("pipegrid.")}
    assert {kind.__name__ for kind in loaded if not kind.__name__.startswith("_")} <= {*CLASSES, "Leave"}


def test_every_class_has_a_remedy_a_cause_and_words_to_search_for():
    assert tomllib.loads(troubleshooting.REMEDIES.read_text(encoding="utf-8")).keys() == CLASSES.keys()
    assert all(error.cause for error in CLASSES.values())
    wordless = {name for name, error in CLASSES.items() if not error.texts} - EXAMPLES.keys()
    assert wordless == {"P2PError"}  # a base, never raised itself
