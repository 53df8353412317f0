"""`layout` has a check of whole numbers of its own, which says what that of `core` says."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import pipegrid.core.fields as core
import pipegrid.layout.fields as own
from pipegrid.layout import LayoutError

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
    rule = Annotated[int, core.integer(least, most)]
    assert outcome(lambda: own.integer(value, "pp", least=least, most=most)) == outcome(
        lambda: core.checked(value, rule, "pp", LayoutError)
    )
