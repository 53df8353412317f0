"""`layout` imports no other package, so it has a copy of the checks of whole numbers: the copies must agree."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pipegrid.core.fields as original
import pipegrid.layout.errors as copy
from pipegrid.layout import LayoutError


@pytest.mark.parametrize("name", ["shown", "index_of"])
def test_functions_of_the_same_name_have_the_same_source(name: str) -> None:
    assert inspect.getsource(getattr(copy, name)) == inspect.getsource(getattr(original, name))


VALUES = st.one_of(
    st.integers(-3, 6),
    st.floats(),
    st.text(max_size=3),
    st.booleans(),
    st.none(),
    st.sampled_from([torch.tensor(2), torch.tensor(True), torch.tensor([1]), Fraction(2), 10**400, object]),
)


def outcome(check: Any) -> Any:
    try:
        return check()
    except LayoutError as error:
        return str(error)


@given(VALUES, st.integers(-1, 2), st.none() | st.integers(2, 4))
def test_integers_are_checked_alike(value: Any, least: int, most: int | None) -> None:
    rule = Annotated[int, original.integer(least, most)]
    assert outcome(lambda: copy.integer(value, "pp", least=least, most=most)) == outcome(
        lambda: original.checked(value, rule, "pp", LayoutError)
    )
