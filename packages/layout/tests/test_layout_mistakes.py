"""Mistakes of a user's first hour: each ends in a LayoutError with the value and the rule."""

from __future__ import annotations

import re

import pytest

from pipegrid.layout import (
    LayerMemory,
    LayoutError,
    LayoutGrammar,
    PipelineParallelLayerLayout,
    balance,
    even,
    in_flight_1f1b,
    report,
)


class ArrayScalar:
    """A scalar of an array library: it has a dtype, and an index even where it is a boolean."""

    def __init__(self, value, dtype):
        self.value, self.dtype = value, dtype

    def __index__(self):
        return int(self.value)

    def __repr__(self):
        return f"{self.dtype}({self.value})"


LAYOUT = PipelineParallelLayerLayout("Ett|ttL", 2)
COSTS = {"embedding": 1, "decoder": 1, "loss": 1}

MISTAKES = [
    (lambda: PipelineParallelLayerLayout(None, 2), "a string or a list of stages, each a list of kinds, got None"),
    (lambda: PipelineParallelLayerLayout([], 1), "a string or a list of stages, each a list of kinds, got []"),
    (lambda: PipelineParallelLayerLayout(["t"], 1), "a string or a list of stages, each a list of kinds, got ['t']"),
    (
        lambda: PipelineParallelLayerLayout([["deocder"]], 1),
        "'deocder' is not a kind of layer (did you mean 'decoder'?)",
    ),
    (
        lambda: PipelineParallelLayerLayout("t|t", 0),
        "pipeline_model_parallel_size is 0; it must be an integer of at least",
    ),
    (lambda: PipelineParallelLayerLayout("t|t", True), "pipeline_model_parallel_size is True; it must be an integer"),
    (
        lambda: PipelineParallelLayerLayout("t|t", ArrayScalar(True, "bool")),
        "pipeline_model_parallel_size is bool(True) (ArrayScalar); it must be an integer",
    ),
    (lambda: PipelineParallelLayerLayout("t|t|t", 2), "3 stages do not divide by pipeline_model_parallel_size 2"),
    (lambda: PipelineParallelLayerLayout("Et|vL", 2), "found 'v', expected a layer"),
    (lambda: PipelineParallelLayerLayout.from_json("{"), "not a layout in JSON"),
    (
        lambda: PipelineParallelLayerLayout.from_json("[]"),
        "keys layout, pipeline_model_parallel_size and perhaps symbols; got []",
    ),
    (lambda: LAYOUT.position(2), "stage is 2; it must be an integer of 0 to 1"),
    (lambda: LAYOUT.get_layer_id_list(pp_rank=2), "pp_rank is 2; it must be an integer of 0 to 1"),
    (lambda: LAYOUT.get_num_layers_to_build(), "pp_rank is None; it must be an integer of 0 to 1"),
    (lambda: LAYOUT.get_num_layers_to_build("t", pp_rank=0), "'t' is not a kind of layer"),
    (lambda: LAYOUT.validate_layer_layout(5), "has 4 decoder layers, the model 5"),
    (
        lambda: LAYOUT.validate_layer_layout(None),
        "number of decoder layers is None; it must be an integer of at least 0",
    ),
    (lambda: LAYOUT.validate_counts({"x": 1}), "'x' is not a kind of layer"),
    (lambda: PipelineParallelLayerLayout("v|v", 2, grammar={"v": "vision"}), "grammar is {'v': 'vision'}; it must be"),
    (
        lambda: balance([1, 1], 2, grammar="v"),
        "grammar is 'v'; it must be LayoutGrammar(symbols={'v': 'vision'}), or None",
    ),
    (lambda: LayoutGrammar(symbols=["v"]), "symbols must map a letter to a kind of layer, got ['v']"),
    (lambda: LayoutGrammar(symbols={"vv": "vision"}), "symbols has 'vv': 'vision'; it must be one ASCII letter"),
    (lambda: LayoutGrammar(symbols={1: "vision"}), "symbols has 1: 'vision'; it must be one ASCII letter"),
    (lambda: LayoutGrammar(symbols={"v": ""}), "symbols has 'v': ''; it must be one ASCII letter and a name"),
    (lambda: LayerMemory(fixed=-1), "LayerMemory.fixed is -1; it must be a finite number of at least 0"),
    (lambda: LayerMemory(per_microbatch=None), "LayerMemory.per_microbatch is None; it must be a finite number"),
    (lambda: balance(None, 2), "costs must be a mapping from kinds of layer or a list of numbers, got None"),
    (lambda: balance([], 2), "the model has no layers"),
    (lambda: balance([1, "2"], 2), "cost of layer 1 (decoder) is '2'; it must be a finite number of at least 0"),
    (lambda: balance({"x": 1}, 2), "costs: 'x' is not a kind of layer"),
    (lambda: balance([1, 1], 0), "pp is 0; it must be an integer of at least 1"),
    (lambda: balance([1, 1], 2, layers="t|t"), "layers 't|t' must be one stage; remove the '|'"),
    (lambda: balance([1, 1], 2, limit=5), "a limit needs the memory of each layer"),
    (
        lambda: balance([1, 1], 2, memory=[1, 1], limit=[5]),
        "limit must have 2 values, one for each",
    ),
    (
        lambda: balance([1, 1], 2, memory=[1, 1], limit=5, in_flight=[[1], [1]]),
        "it must have, for each of 2 pp ranks, at least one list of 1",
    ),
    (lambda: even(4, 2, first=5), "first=5 and last=None do not fit 4 layers on 2 pp ranks"),
    (lambda: even("4", 2), "num_layers is '4'; it must be an integer of 0 to 1000000"),
    (lambda: even(4, 2, layer_type="x"), "'x' is not a kind of layer"),
    (lambda: in_flight_1f1b(2, microbatches=0), "microbatches is 0; it must be an integer of at least 1"),
    (lambda: report(LAYOUT, {"decoder": 1}), "costs has no value for embedding, loss; it has decoder"),
    (lambda: report(LAYOUT, [1, 1]), "costs must have 6 values, one for each of the layers"),
    (
        lambda: report(LAYOUT, COSTS, memory={"decoder": {"fix": 1}, "embedding": 1, "loss": 1}),
        "has keys ['fix']; the known ones are",
    ),
    (lambda: report(LAYOUT, COSTS, memory=COSTS, microbatches=4, in_flight=[[[1]], [[1]]]), "not both"),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_a_mistake_names_the_value_and_the_rule(call, text):
    with pytest.raises(LayoutError, match=re.escape(text)):
        call()


def test_integers_of_other_libraries_are_integers():
    four, two = ArrayScalar(4, "int64"), ArrayScalar(2, "int64")
    assert even(four, two) == even(4, 2)
    assert PipelineParallelLayerLayout("t|t", two).pipeline_model_parallel_size.__class__ is int
    assert in_flight_1f1b(two, two, four) == in_flight_1f1b(2, 2, 4)
    assert balance([1] * 4, two, nodes=four).layout == balance([1] * 4, 2).layout
    peaks = [[[two]], [[two]]]
    assert report(LAYOUT, COSTS, memory=COSTS, in_flight=peaks) == report(
        LAYOUT, COSTS, memory=COSTS, in_flight=[[[2]], [[2]]]
    )


def test_a_sum_above_the_largest_cost_is_legal():
    assert report(LAYOUT, dict.fromkeys(COSTS, 9e99)).bottleneck == pytest.approx(2.7e100)
