"""`balance` finds the best of all layouts that keep the rules and the limits; it is never worse than `even`."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.layout import (
    LayerMemory,
    LayoutError,
    LayoutGrammar,
    LayoutInfeasibleError,
    PipelineParallelLayerLayout,
    balance,
    even,
    in_flight_1f1b,
    report,
)


def legal(layout: PipelineParallelLayerLayout) -> bool:
    """Does the layout keep the position rules for the layers it has?"""
    counts = {kind: layout.flatten_layout.count(kind) for kind in layout.flatten_layout}
    try:
        layout.validate_counts(counts)
    except LayoutError:
        return False
    return True


def brute_force(kinds, costs, pp, vpp, fits):
    """The least (bottleneck, spread) over all legal layouts of the layers for which ``fits(cuts)``."""
    total = [Fraction(0), *accumulate(map(Fraction, costs))]
    n = len(kinds)
    best = None
    for inner in itertools.combinations_with_replacement(range(n + 1), pp * vpp - 1):
        cuts = (0, *inner, n)
        stages = [total[b] - total[a] for a, b in pairwise(cuts)]
        quality = max(stages), max(stages) - min(stages)
        if (best is None or quality < best) and fits(cuts):
            layout = PipelineParallelLayerLayout([kinds[a:b] for a, b in pairwise(cuts)], pp)
            if legal(layout):
                best = quality
    return best


def exact_spread(layout, costs):
    """The spread of a layout of layers with these costs, without rounding."""
    total = [Fraction(0), *accumulate(map(Fraction, costs))]
    cuts = [0, *accumulate(len(stage) for stage in layout.stages)]
    stages = [total[b] - total[a] for a, b in pairwise(cuts)]
    return max(stages) - min(stages)


def rounded(spread, bottleneck):
    """What a report may say of it: the difference of two stage costs, each of them rounded once."""
    return pytest.approx(float(spread), rel=1e-12, abs=float(bottleneck) * 2**-52)


COSTS = st.floats(0, 10, allow_nan=False) | st.sampled_from([0.1, 0.2, 0.3, 1.0]) | st.integers(0, 5)
SIZES = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (1, 4), (1, 5)])


@st.composite
def models(draw):
    """Kinds of layer in an order that some layout can have, and a cost for each."""
    middle = draw(st.lists(st.sampled_from(["encoder", "decoder"]), max_size=8))
    kinds = ["embedding"] * draw(st.integers(0, 1)) + middle + ["mtp"] * draw(st.integers(0, 2))
    kinds += ["loss"] * draw(st.integers(0, 1))
    kinds = kinds or ["decoder"]
    return kinds, draw(st.lists(COSTS, min_size=len(kinds), max_size=len(kinds)))


@settings(max_examples=50, deadline=None)
@given(models(), SIZES)
def test_it_equals_brute_force(model, sizes):
    kinds, costs = model
    found = balance(costs, *sizes, layers=kinds)
    assert list(found.layout.flatten_layout) == kinds
    assert legal(found.layout)
    assert found.optimal
    bottleneck, spread = brute_force(kinds, costs, *sizes, lambda _: True)
    assert found.report.bottleneck == float(bottleneck) == found.lower_bound
    assert exact_spread(found.layout, costs) == spread
    assert found.report.spread == rounded(spread, bottleneck)
    assert found.gap == 0


def test_a_spread_below_the_rounding_of_the_costs_is_the_least_all_the_same():
    costs = [1.0, 1.0, 3.086297470599911e-16]
    found = balance(costs, 2)
    assert str(found.layout) == "t|tt"
    assert exact_spread(found.layout, costs) == Fraction(costs[2])


@settings(max_examples=50, deadline=None)
@given(models(), SIZES, st.data())
def test_it_equals_brute_force_under_a_limit(model, sizes, data):
    kinds, costs = model
    pp, vpp = sizes
    size = st.integers(0, 4)
    memory = [data.draw(st.builds(LayerMemory, fixed=size, per_microbatch=size) | size) for _ in kinds]
    limit = data.draw(st.integers(0, 60) | st.lists(st.integers(0, 60), min_size=pp, max_size=pp))
    microbatches = data.draw(st.none() | st.integers(1, 6))
    peaks = in_flight_1f1b(pp, vpp, microbatches)
    pairs = [(one.fixed, one.per_microbatch) if isinstance(one, LayerMemory) else (0, one) for one in memory]

    def fits(cuts):
        for rank in range(pp):
            most = limit[rank] if isinstance(limit, list) else limit
            spans = [pairs[cuts[s] : cuts[s + 1]] for s in range(rank, pp * vpp, pp)]
            for peak in peaks[rank]:
                held = sum(f + n * m for span, n in zip(spans, peak, strict=True) for f, m in span)
                if held > most:
                    return False
        return True

    expected = brute_force(kinds, costs, pp, vpp, fits)
    arguments = {"layers": kinds, "memory": memory, "limit": limit, "microbatches": microbatches, "nodes": 100_000}
    if expected is None:
        with pytest.raises(LayoutInfeasibleError) as caught:
            balance(costs, pp, vpp, **arguments)
        assert caught.value.proven
        assert 0 <= caught.value.stage < pp * vpp
        return
    found = balance(costs, pp, vpp, **arguments)
    assert legal(found.layout)
    assert found.optimal
    assert found.report.bottleneck == float(expected[0])
    assert exact_spread(found.layout, costs) == expected[1]
    assert found.report.spread == rounded(expected[1], expected[0])
    limits = limit if isinstance(limit, list) else [limit] * pp
    assert all(held <= most for held, most in zip(found.report.rank_memory, limits, strict=True))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 40),
    SIZES,
    st.lists(COSTS, min_size=42, max_size=42),
    st.booleans(),
    st.booleans(),
)
def test_it_is_never_worse_than_even(num_layers, sizes, costs, embedding, loss):
    pp, vpp = sizes
    rule = even(num_layers, pp, vpp, account_for_embedding=embedding, account_for_loss=loss)
    costs = costs[: num_layers + 2]
    found = balance(costs, pp, vpp, layers=rule.flatten_layout)
    numbers = report(rule, costs)
    assert (found.report.bottleneck, found.report.spread) <= (numbers.bottleneck, numbers.spread)


def test_sums_are_exact():
    # In floats 0.1 + 0.2 > 0.3: added up from the left, the two halves would differ.
    found = balance([0.1, 0.2, 0.3], 2)
    assert found.report.costs == (float(Fraction(0.1) + Fraction(0.2)), 0.3)
    # A layer that is lost in a float sum still decides.
    found = balance([1e16, 1.0, 1.0, 1e16, 1.0], 2)
    assert str(found.layout) == "tt|t*3"
    assert found.report.bottleneck == 1e16 + 2


def test_costs_per_kind_and_per_layer_are_the_same_model():
    by_kind = balance({"embedding": 0.5, "decoder": 1.0, "loss": 1.5}, 4, layers="Et*9L")
    by_layer = balance([0.5, *[1.0] * 9, 1.5], 4, layers="Et*9L")
    counted = balance({"embedding": 0.5, "decoder": [1.0] * 9, "loss": 1.5}, 4)
    assert by_kind == by_layer == counted
    assert by_kind.layout.validate_layer_layout(9) is False
    assert str(by_kind.layout) == "Ett|t*3|t*3|tL"


def test_a_plain_list_is_decoders():
    assert str(balance([1, 1, 1, 3], 2).layout) == "t*3|t"


def test_a_module_of_its_own_kinds():
    grammar = LayoutGrammar(symbols={"v": "vision"})
    found = balance({"vision": [2.0, 1.0, 1.0]}, 2, grammar=grammar)
    assert str(found.layout) == "v|vv"
    found.layout.validate_counts({"vision": 3})


def test_more_stages_than_layers():
    layout = balance({"embedding": 1, "decoder": 1, "loss": 1}, 5).layout
    assert layout.validate_layer_layout(1) is False
    assert layout.stages.count(()) == 2


def test_mtp_keeps_to_the_last_chunk_of_a_later_rank():
    layout = balance({"embedding": 1, "decoder": [1] * 6, "mtp": [1, 1], "loss": 1}, 2, 2).layout
    assert layout.validate_layer_layout(6, 2) is False
    assert layout.stages[3][-3:] == ("mtp", "mtp", "loss")


def test_early_ranks_hold_more_microbatches():
    memory = {"decoder": LayerMemory(fixed=2, per_microbatch=1)}
    found = balance({"decoder": 1}, 4, layers="t*16", memory=memory, limit=24)
    assert found.report.rank_memory == (24, 20, 16, 12)
    tight = balance({"decoder": 1}, 4, layers="t*16", memory=memory, limit=20)
    assert [len(stage) for stage in tight.layout.stages] == [3, 3, 5, 5]
    assert max(tight.report.rank_memory) <= 20
    few = balance({"decoder": 1}, 4, layers="t*16", memory=memory, limit=20, microbatches=2)
    assert [len(stage) for stage in few.layout.stages] == [4, 4, 4, 4]


def test_another_schedule_may_say_what_is_in_flight():
    gpipe = [[[8]]] * 4  # all eight microbatches, on every rank
    found = balance([1] * 16, 4, memory=[1] * 16, limit=32, in_flight=gpipe)
    assert found.report.rank_memory == (32, 32, 32, 32)


def test_a_search_that_is_cut_short_says_how_far_it_may_be():
    arguments = {"memory": [10] * 130, "limit": 1100}
    found = balance([100] * 130, 16, 4, **arguments, nodes=300)
    assert not found.optimal
    assert found.lower_bound < found.report.bottleneck
    assert found.gap == found.report.bottleneck / found.lower_bound - 1
    assert max(found.report.rank_memory) <= 1100


def test_zero_costs_are_legal():
    found = balance({"embedding": 0, "decoder": [1, 1], "loss": 0}, 2)
    assert str(found.layout) == "Et|tL"
    assert balance([0, 0], 2).gap == 0


class TestInfeasible:
    def test_the_tightest_stage_is_named(self):
        with pytest.raises(LayoutInfeasibleError) as caught:
            balance([1] * 32, 4, memory=[1] * 32, limit=12)
        text = str(caught.value)
        assert text.startswith("no layout keeps every rank under its limit: the tightest is stage ")
        assert caught.value.proven
        needed = float(re.search(r"by itself (\S+) of 12;", text)[1])
        assert f"raise the limit by {needed - 12:g}" in text
        balance([1] * 32, 4, memory=[1] * 32, limit=needed)
        with pytest.raises(LayoutInfeasibleError):
            balance([1] * 32, 4, memory=[1] * 32, limit=needed - 1)

    def test_the_tightest_is_where_the_most_is_missing(self):
        with pytest.raises(LayoutInfeasibleError, match=r"with 't' and 1 .* takes by itself 30 of 20;") as caught:
            balance([1] * 8, 4, memory=[1] * 7 + [30], limit=[4, 4, 4, 20])
        assert caught.value.stage == 3

    def test_chunks_that_fit_alone_but_not_together(self):
        with pytest.raises(LayoutInfeasibleError, match="together with the other chunks of its rank") as caught:
            balance([1, 1], 1, 2, memory=[4, 4], limit=7, in_flight=[[[1, 1]]])
        assert caught.value.proven

    def test_a_search_that_found_nothing_does_not_claim_that_there_is_nothing(self):
        arguments = {"memory": [10] * 130, "limit": 900}
        with pytest.raises(LayoutInfeasibleError, match="though there may be one; raise nodes") as caught:
            balance([100] * 130, 16, 4, **arguments, nodes=5)
        assert not caught.value.proven
        assert caught.value.stage is not None


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (([1, 2], 0), "pp is 0; it must be an integer of at least 1"),
        (([1, 2], 2, 1.5), "vpp is 1.5; it must be an integer of at least 1"),
        (([1, 2], 10**7), "make 10000000 stages; the most are 1,000,000"),
        (([], 2), "the model has no layers"),
        (({}, 2), "the model has no layers"),
        ((3, 2), "costs must be a mapping from kinds of layer or a list of numbers, got 3"),
        (("tt", 2), "costs must be a mapping from kinds of layer or a list of numbers, got 'tt'"),
        (([1, -1], 2), "cost of layer 1 (decoder) is -1; it must be a finite number of at least 0 and below 1e+100"),
        (
            ([1, float("nan")], 2),
            "cost of layer 1 (decoder) is nan; it must be a finite number of at least 0 and below 1e+100",
        ),
        (([1, float("inf")], 2), "is inf; it must be a finite number of at least 0 and below 1e+100"),
        (([1, 1e101], 2), "is 1e+101; it must be"),
        (([1, True], 2), "is True; it must be"),
        (([1, "2"], 2), "is '2'; it must be"),
        (({"decodr": [1]}, 2), "costs: 'decodr' is not a kind of layer (did you mean 'decoder'?)"),
        (({"decoder": [1, 1], "embedding": 1}, 2), "embedding must be the first layer"),
        (({"mtp": 1, "decoder": [1, 1]}, 2), "mtp layers must follow all decoders"),
    ],
)
def test_bad_input_is_an_error(arguments, rule):
    with pytest.raises(LayoutError, match=re.escape(rule)):
        balance(*arguments)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"layers": "t|t"}, "layers 't|t' must be one stage; remove the '|'"),
        ({"layers": "tx"}, "column 1 (from 0): found 'x'"),
        ({"layers": ["decoder", "x"]}, "layer 1: 'x' is not a kind of layer"),
        ({"layers": "ttt"}, "costs must have 3 values, one for each of the layers, got [1, 2]"),
        ({"limit": 3}, "a limit needs the memory of each layer; pass memory as well"),
        ({"memory": [1]}, "memory must have 2 values, one for each of the layers, got [1]"),
        ({"memory": {"loss": 1}}, "memory has no value for decoder; it has loss"),
        ({"memory": {"decoder": [1, 2, 3]}}, "memory must have 2 values, one for each of the decoder layers"),
        ({"memory": 3}, "memory must have 2 values, one for each of the layers, got 3"),
        ({"memory": [1, {"fix": 1}]}, "memory of layer 1 (decoder) has keys ['fix']; the known ones are fixed"),
        ({"memory": [1, None]}, "memory of layer 1 (decoder) is None; it must be a finite number of at least 0"),
        (
            {"memory": [1, 1], "limit": [1, 2, 3]},
            "limit must have 2 values, one for each of the pp ranks",
        ),
        ({"memory": [1, 1], "limit": [1, -2]}, "limit of pp rank 1 is -2; it must be a finite number of at least 0"),
        ({"memory": [1, 1], "limit": "big"}, "limit is 'big'; it must be a finite number of at least 0"),
        ({"microbatches": 0}, "microbatches is 0; it must be an integer of at least 1"),
        ({"microbatches": 4, "in_flight": [[[1]], [[1]]]}, "give microbatches (for 1F1B) or in_flight"),
        ({"in_flight": [[[1]]]}, "for each of 2 pp ranks, at least one list of 1 whole numbers"),
        ({"in_flight": [[], [[1]]]}, "in_flight is [[], [[1]]] (list); it must have, for each"),
        ({"in_flight": [[[1]], [[1, 1]]]}, "in_flight is [[[1]], [[1, 1]]] (list); it must have, for each"),
        ({"in_flight": [[[1]], [[-1]]]}, "in_flight of pp rank 1 is -1; it must be an integer of at least 0"),
        ({"nodes": -1}, "nodes is -1; it must be an integer of at least 0"),
    ],
)
def test_bad_options_are_errors(options, rule):
    with pytest.raises(LayoutError, match=re.escape(rule)):
        balance([1, 2], 2, **options)


def test_bad_layer_memory_is_an_error():
    with pytest.raises(LayoutError, match="LayerMemory.per_microbatch is -1; it must be a finite number of at least 0"):
        LayerMemory(per_microbatch=-1)
