"""What every public name says to what it cannot use: one kind of error, which names the value and the rule."""

from __future__ import annotations

import math

import pytest

import pipegrid.layout
from pipegrid.layout import (
    Balance,
    LayerMemory,
    LayerType,
    LayoutError,
    LayoutGrammar,
    LayoutReport,
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
REPORT = report(LAYOUT, COSTS)
GRAMMAR = LayoutGrammar()

NO_NUMBER = ["x", object(), [], {}, True, ArrayScalar(True, "bool")]
NO_SIZE = [*NO_NUMBER, None, 0, -1, 1.5, math.nan, 10**30]
NO_SIZE_OR_NONE = [*NO_NUMBER, 0, -1, 1.5, math.nan]
NO_COUNT = [*NO_NUMBER, -1, 1.5, math.nan]
NO_AMOUNT = [*NO_NUMBER, None, -1, -0.5, math.nan, math.inf, 10**200]
NO_LIST = [None, "x", object(), 3, math.nan]
NO_FLAG = [None, 0, 1, "yes", [], object(), ArrayScalar(True, "bool")]
NO_GRAMMAR = ["standard", 5, {"v": "vision"}, LayoutGrammar, object()]
NO_KIND = [None, "x", "", 5, [], object(), math.nan]
NO_TEXT = [None, 5, True, b"t|t", ["t"], object()]
NO_PLACE = [*NO_COUNT, 2, 10**30]
NO_PEAKS = ["x", 5, [], [[]], [[[1]]], [[[1]], [[-1]]], [[[1]], [[True]]], [[[1]], [[None]]], [[[1, 1]], [[1]]]]
NO_LAYERS = ["", "t|t", 5, object(), ["x"], [None], []]
NO_COSTS = [None, "x", 5, object(), [], [1, 2], {}, {"x": 1}, {"decoder": [1]}, {"decoder": -1}, [None] * 3, {1: 2}]


def balanced(**changed):
    return balance(**{"costs": [1, 1, 1], "pp": 2, "memory": [1, 1, 1], "limit": 100, **changed})


def reported(**changed):
    return report(**{"layout": LAYOUT, "costs": COSTS, "memory": COSTS, "limit": 100, **changed})


def made(cls, **given):
    def call(**changed):
        return cls(**{**given, **changed})

    return call


a_report = made(LayoutReport, layout=LAYOUT, costs=(1, 2), costs_by_kind=({}, {}))
a_balance = made(Balance, layout=LAYOUT, report=REPORT, lower_bound=1.0, optimal=True)

REFUSED = [
    (
        "layout",
        made(PipelineParallelLayerLayout, pipeline_model_parallel_size=1),
        "layout",
        [*NO_LIST[2:], None, [], {}],
    ),
    ("layout", made(PipelineParallelLayerLayout, pipeline_model_parallel_size=1), "layout", [["t"], [["x"]], [[None]]]),
    ("layout", made(PipelineParallelLayerLayout, layout="t|t"), "pipeline_model_parallel_size", [*NO_SIZE, 3]),
    ("layout", made(PipelineParallelLayerLayout, layout="t", pipeline_model_parallel_size=1), "grammar", NO_GRAMMAR),
    ("from_str", made(PipelineParallelLayerLayout.from_str, pipeline_model_parallel_size=1), "layout", NO_TEXT),
    ("from_str", made(PipelineParallelLayerLayout.from_str, layout="t"), "pipeline_model_parallel_size", NO_SIZE),
    ("parse_str_to_list", PipelineParallelLayerLayout.parse_str_to_list, "layout_str", NO_TEXT),
    ("parse_str_to_list", made(PipelineParallelLayerLayout.parse_str_to_list, layout_str="t"), "grammar", NO_GRAMMAR),
    ("get_num_stages_from_str", PipelineParallelLayerLayout.get_num_stages_from_str, "layout_str", NO_TEXT),
    (
        "from_json",
        PipelineParallelLayerLayout.from_json,
        "text",
        [*NO_TEXT[:2], object(), "", "[]", "{", '{"layout": 5}'],
    ),
    ("position", LAYOUT.position, "stage", [*NO_PLACE, None]),
    ("stage", made(LAYOUT.stage, vp_stage=0), "pp_rank", [*NO_PLACE, None]),
    ("stage", made(LAYOUT.stage, pp_rank=0), "vp_stage", [*NO_PLACE[:-2], 1]),
    ("get_num_layers_to_build", made(LAYOUT.get_num_layers_to_build, pp_rank=0), "layer_type", NO_KIND),
    ("get_num_layers_to_build", LAYOUT.get_num_layers_to_build, "pp_rank", [*NO_PLACE, None]),
    ("get_layer_offset", made(LAYOUT.get_layer_offset, pp_rank=0), "layer_type", NO_KIND),
    ("get_layer_offset", LAYOUT.get_layer_offset, "pp_rank", [*NO_PLACE, None]),
    ("get_layer_id_list", made(LAYOUT.get_layer_id_list, pp_rank=0), "layer_type", NO_KIND),
    ("get_layer_id_list", LAYOUT.get_layer_id_list, "pp_rank", [*NO_PLACE, None]),
    ("validate_layer_layout", LAYOUT.validate_layer_layout, "num_layers", [*NO_COUNT, None, 5]),
    ("validate_layer_layout", made(LAYOUT.validate_layer_layout, num_layers=4), "mtp_num_layers", [*NO_COUNT, 1]),
    (
        "validate_counts",
        LAYOUT.validate_counts,
        "counts",
        [*NO_LIST, [4], {"x": 1}, {"decoder": None}],
    ),
    ("grammar", LayoutGrammar, "symbols", [None, "v", 5, ["v"], {"v": None}, {"vv": "x"}, {5: "x"}, {"v": ""}]),
    ("symbol", GRAMMAR.symbol, "kind", NO_KIND),
    ("kind", GRAMMAR.kind, "name", NO_KIND),
    ("layer memory", LayerMemory, "fixed", NO_AMOUNT),
    ("layer memory", LayerMemory, "per_microbatch", NO_AMOUNT),
    ("balance", balanced, "costs", [*NO_COSTS, {"decoder": 1, "x": 1}]),
    ("balance", balanced, "pp", NO_SIZE),
    ("balance", balanced, "vpp", NO_SIZE),
    ("balance", balanced, "layers", NO_LAYERS),
    ("balance", balanced, "memory", NO_COSTS[1:]),
    ("balance", balanced, "limit", [*NO_NUMBER, -1, math.nan, [1], [1, None], [1, 2, 3]]),
    ("balance", balanced, "microbatches", NO_SIZE_OR_NONE),
    ("balance", balanced, "in_flight", NO_PEAKS),
    ("balance", balanced, "nodes", NO_COUNT),
    ("balance", balanced, "grammar", NO_GRAMMAR),
    ("balance result", a_balance, "layout", ["t", None]),
    ("balance result", a_balance, "report", ["t", None]),
    ("balance result", a_balance, "lower_bound", [None, "x", -1, math.nan, True]),
    ("balance result", a_balance, "optimal", NO_FLAG),
    ("even", made(even, pp=2), "num_layers", [*NO_COUNT, None, 10**30]),
    ("even", made(even, num_layers=4), "pp", NO_SIZE),
    ("even", made(even, num_layers=4, pp=2), "vpp", NO_SIZE),
    ("even", made(even, num_layers=4, pp=2), "first", [*NO_COUNT, 5]),
    ("even", made(even, num_layers=4, pp=2), "last", [*NO_COUNT, 5]),
    ("even", made(even, num_layers=4, pp=2), "account_for_embedding", NO_FLAG),
    ("even", made(even, num_layers=4, pp=2), "account_for_loss", NO_FLAG),
    ("even", made(even, num_layers=4, pp=2), "ends", NO_FLAG),
    ("even", made(even, num_layers=4, pp=2), "layer_type", NO_KIND),
    ("even", made(even, num_layers=4, pp=2), "grammar", NO_GRAMMAR),
    ("in_flight_1f1b", in_flight_1f1b, "pp", NO_SIZE),
    ("in_flight_1f1b", made(in_flight_1f1b, pp=2), "vpp", NO_SIZE),
    ("in_flight_1f1b", made(in_flight_1f1b, pp=2), "microbatches", NO_SIZE_OR_NONE),
    ("report", reported, "layout", [*NO_LIST, [["t"]], PipelineParallelLayerLayout]),
    ("report", reported, "costs", NO_COSTS),
    ("report", reported, "memory", NO_COSTS[1:]),
    ("report", reported, "limit", [*NO_NUMBER, -1, math.nan, [1], [1, None]]),
    ("report", reported, "microbatches", NO_SIZE_OR_NONE),
    ("report", reported, "in_flight", NO_PEAKS),
    ("report result", a_report, "layout", ["t", None]),
    ("report result", a_report, "costs", [None, [1, 2], (1,), (1, -1), (1, math.nan), (1, None)]),
    ("report result", a_report, "costs_by_kind", [None, ({},), ({}, 5)]),
    ("report result", a_report, "memory", ["x", (1,), (1, -1)]),
    ("report result", a_report, "rank_memory", ["x", (1,), (1, None)]),
    ("report result", a_report, "limits", ["x", (1,), (1, True)]),
]


@pytest.mark.parametrize(
    ("call", "argument", "values"),
    [pytest.param(call, argument, values, id=f"{name}-{argument}") for name, call, argument, values in REFUSED],
)
def test_what_an_argument_cannot_be_is_refused_in_words(call, argument, values):
    for value in values:
        with pytest.raises(LayoutError) as refused:
            call(**{argument: value})
        assert len(str(refused.value)) > 30, value  # what was given, and what may be


def test_every_public_name_is_in_the_list_or_takes_nothing():
    errors = {name for name in pipegrid.layout.__all__ if name.endswith("Error")}
    listed = {"PipelineParallelLayerLayout", "LayoutGrammar", "LayerMemory", "Balance", "LayoutReport"}
    listed |= {"balance", "even", "in_flight_1f1b", "report"}
    assert set(pipegrid.layout.__all__) == errors | listed | {"LayerType"}
    with pytest.raises(ValueError, match="'x' is not a valid LayerType"):
        LayerType("x")


def test_whole_numbers_of_other_libraries_are_whole_numbers():
    four, two = ArrayScalar(4, "int64"), ArrayScalar(2, "int64")
    assert even(four, two) == even(4, 2)
    assert PipelineParallelLayerLayout("t|t", two).pipeline_model_parallel_size.__class__ is int
    assert in_flight_1f1b(two, two, four) == in_flight_1f1b(2, 2, 4)
    assert balance([1] * 4, two, nodes=four).layout == balance([1] * 4, 2).layout
    peaks = [[[two]], [[two]]]
    assert reported(in_flight=peaks).memory == reported(in_flight=[[[2]], [[2]]]).memory


def test_what_adds_up_past_the_largest_cost_is_still_reported():
    assert report(LAYOUT, dict.fromkeys(COSTS, 9e99)).bottleneck == pytest.approx(2.7e100)
