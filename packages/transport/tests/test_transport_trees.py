"""Trees of tensors, numbers and None: taken apart, put together, walked side by side."""

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.transport.messages.trees import (
    describe,
    flatten,
    mapped,
    parts_of,
    places,
    select,
    unflatten,
)

TREES = st.recursive(
    st.one_of(st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab", max_size=2) | st.integers(0, 3), inner, max_size=3),
    ),
    max_leaves=8,
)


class Output(NamedTuple):
    hidden: Any
    mask: Any


class MismatchError(Exception):
    pass


@given(TREES)
def test_a_value_is_its_structure_and_its_leaves(value):
    leaves, tree = flatten(value)
    assert None not in leaves
    assert unflatten(tree, leaves) == value
    assert select(tree, value, MismatchError) == leaves
    found = [(path, leaves[leaf]) for path, leaf in places(tree) if leaf is not None]
    assert [leaf for _, leaf in found] == leaves
    assert all(eval(f"value{path}", {"value": value}) == leaf for path, leaf in found)
    assert describe(tree, leaves) == str(value).replace(",)", ")")


@given(TREES)
def test_a_function_of_each_part_keeps_the_containers(value):
    assert mapped(lambda part: part, value) == value
    assert mapped(lambda one, other: one is other, value, value) == mapped(lambda _: True, value)


def test_subclasses_are_walked_and_only_named_tuples_and_lists_stay_what_they_are():
    value = [Output(1, OrderedDict(b=2, a=None))]
    doubled = mapped(lambda part: part and 2 * part, value)
    assert doubled == [Output(2, {"b": 4, "a": None})]
    assert type(doubled[0]) is Output
    assert mapped(lambda one, other: (one or 0) + (other or 0), value, doubled) == [Output(3, {"b": 6, "a": 0})]
    assert parts_of(value) == [1, None, 2]  # by key


def test_exact_structures_are_those_that_a_receiver_can_rebuild():
    value = [MappingProxyType({(1, 2): 3}), Output(4, None)]
    assert flatten(value) == (value, ("list", (0, 1)))
    assert flatten(value, exact=False) == ([3, 4], ("list", (("dict", (((1, 2), 0),)), ("tuple", (1, None)))))
    assert flatten({True: 1}) == ([{True: 1}], 0)


@pytest.mark.parametrize(
    ("declared", "value", "path"),
    [
        ({"a": [1, 2]}, {"a": [1]}, "['a']"),
        ({"a": [1, 2]}, {"a": {0: 1, 1: 2}}, "['a']"),
        ([1, None], (1, []), "[1]"),
        ([1, [2]], (1, None), "[1]"),
        ([1, {}], (1, ()), "[1]"),
    ],
)
def test_a_value_of_another_structure_is_named_by_its_place(declared, value, path):
    _, tree = flatten(declared)
    with pytest.raises(MismatchError) as failure:
        select(tree, value, MismatchError)
    assert failure.value.args[0] == path
