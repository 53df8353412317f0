"""`even` follows the rules of thumb, to the layer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout import LayoutError, LayoutGrammar, even


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((8, 4), {}, "Ett|tt|tt|ttL"),
        ((10, 4), {}, "Et*3|t*3|tt|ttL"),
        ((8, 2, 2), {}, "Ett|tt|tt|ttL"),
        ((7, 4), {"account_for_embedding": True}, "Et|tt|tt|ttL"),
        ((7, 4), {"account_for_loss": True}, "Ett|tt|tt|tL"),
        ((6, 4), {"account_for_embedding": True, "account_for_loss": True}, "Et|tt|tt|tL"),
        ((10, 4), {"first": 1, "last": 3}, "Et|t*3|t*3|t*3,L"),
        ((12, 3, 2), {"first": 2}, "Et|t*3|t*3|t|tt|ttL"),
        ((4, 2), {"first": 1, "last": 3}, "Et|t*3,L"),
        ((0, 3), {}, "E||L"),
        ((1, 4), {"account_for_embedding": True, "account_for_loss": True}, "E|t||L"),
        ((3, 1), {}, "Et*3,L"),
    ],
)
def test_examples(arguments, options, text):
    assert str(even(*arguments, **options)) == text


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_layer_is_placed_and_stages_differ_by_at_most_one(num_layers, pp, vpp, embedding, loss):
    layout = even(num_layers, pp, vpp, account_for_embedding=embedding, account_for_loss=loss)
    assert layout.validate_layer_layout(num_layers) is False
    assert layout.virtual_pipeline_model_parallel_size == vpp
    counted = [stage.count("decoder") for stage in layout.stages]
    counted[0] += embedding
    if num_layers + embedding + loss >= pp * vpp:
        counted[-1] += loss
    assert max(counted) - min(counted) <= 1
    assert counted == sorted(counted, reverse=True)


def test_a_module_in_the_middle_of_a_model():
    grammar = LayoutGrammar(symbols={"v": "vision"})
    layout = even(6, 2, layer_type="vision", ends=False, grammar=grammar)
    assert str(layout) == "v*3|v*3"


@pytest.mark.parametrize(
    ("arguments", "options", "rule"),
    [
        ((-1, 2), {}, "num_layers is -1; it must be an integer of 0 to 1000000"),
        ((2.0, 2), {}, "num_layers is 2.0; it must be an integer of 0 to 1000000"),
        ((10**7, 2), {}, "num_layers is 10000000; it must be an integer of 0 to 1000000"),
        ((4, 0), {}, "pp is 0; it must be an integer of at least 1"),
        ((4, 2, 10**6), {}, "the most are 1,000,000"),
        ((4, 1), {"first": 4}, "first=4 and last=None do not fit 4 layers on 1 pp ranks"),
        ((4, 2), {"first": -1}, "first is -1; it must be an integer of at least 0"),
        ((4, 3), {"first": 3, "last": 2}, "first=3 and last=2 do not fit 4 layers on 3 pp ranks"),
        ((4, 2), {"first": 1, "last": 2}, "first=1 and last=2 do not fit 4 layers on 2 pp ranks"),
        ((4, 2), {"first": 1, "account_for_embedding": True}, "account_for_embedding needs ends=True and first=None"),
        ((4, 2), {"last": 1, "account_for_loss": True}, "account_for_loss needs ends=True and last=None"),
        ((4, 2), {"ends": False, "account_for_loss": True}, "account_for_loss needs ends=True"),
        ((4, 2), {"layer_type": "vision"}, "'vision' is not a kind of layer"),
    ],
)
def test_contradictions_are_errors(arguments, options, rule):
    with pytest.raises(LayoutError, match=re.escape(rule)):
        even(*arguments, **options)
