"""The mistakes of `tools/mutations.py` are still those of the sources: each place is there, once, and still code."""

from __future__ import annotations

import ast
import collections
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "tools" / "mutations.py")
mutations = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mutations)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda one: f"{one.file}: {one.breaks}")
def test_a_mistake_is_one_of_the_source_as_it_is(mutation):
    text = (ROOT / mutation.path).read_text()
    wrong = mutation.applied_to(text)
    assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(text))
    (_, near), *_ = mutations.runs(mutation, ROOT)
    assert all(Path(path).is_file() for path in near)


def test_there_are_forty_in_every_part_of_the_core():
    counts = collections.Counter(mutation.package for mutation in mutations.MUTATIONS)
    assert counts.total() == 40
    assert {"plans", "transport", "reshard", "bridges", "gradients", "schedules"} <= counts.keys()
