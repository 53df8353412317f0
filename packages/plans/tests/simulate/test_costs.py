"""Costs: one number for all or one each, cut anew with the model, read from JSON, refused when impossible."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.plans.simulate.costs import Costs, CostsError, OtherCutError, costs_from_json, costs_to_json


def test_numbers_for_all_or_one_each():
    assert Costs(F=2).per_stage("F", 3) == [2, 2, 2]
    assert Costs(F=[1, 2, 3]).per_stage("F", 3) == [1, 2, 3]
    assert Costs(I=2, W=[1, 3]).per_stage("B", 2) == [3, 5]
    assert Costs(B=1.5).per_stage("B", 2) == [1.5, 1.5]
    edges = [Edge(0, 1), Edge(1, 2)]
    assert Costs(latency=0.5).per_edge("latency", edges) == dict.fromkeys(edges, 0.5)
    each = Costs(latency={Edge(0, 1): 1, Edge(1, 2): 2})
    assert each.per_edge("latency", edges) == {Edge(0, 1): 1, Edge(1, 2): 2}


def test_are_values():
    assert Costs(F=[1, 2]) == Costs(F=(1, 2))
    assert len({Costs(latency={Edge(0, 1): 1}), Costs(latency=[(Edge(0, 1), 1)])}) == 1


def test_know_for_how_many_stages_they_are():
    assert Costs().stages is None
    assert Costs(F=[1, 2], W=[3, 4], B=2).stages == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Costs(F=-1), r"F is -1; it must be a finite number of at least 0, or one for each stage"),
        (lambda: Costs(I=math.nan), r"I is nan; it must be a finite number"),
        (lambda: Costs(input_release=1.5), r"input_release is 1.5; it must be a share from 0 to 1"),
        (lambda: Costs(W=[1, "2"]), r"W is \[1, '2'\] \(list\); it must be a finite number"),
        (lambda: Costs(F=None), r"F is None; it must be a finite number"),
        (lambda: Costs(F="12"), r"F is '12'; it must be a finite number"),
        (lambda: Costs(F={0: 1}), r"F is \{0: 1\} \(dict\); it must be a finite number"),
        (lambda: Costs(F=10**400), r"F is 10*; it must be a finite number"),
        (
            lambda: Costs(F=[(Edge(0, 1), 3)]),
            r"F is .*Edge.*; it must be a finite number of at least 0, or one for each stage",
        ),
        (lambda: Costs(F=object()), r"F is <object .*; it must be a finite number"),
        (lambda: Costs(overhead=None), r"overhead is None; it must be a finite number"),
        (lambda: Costs(overhead=(1, 2)), r"overhead is \(1, 2\) \(tuple\); it must be a finite number"),
        (lambda: Costs(latency=None), r"latency is None; it must be a finite number"),
        (
            lambda: Costs(latency=[1.0, 2.0]),
            r"latency is \[1.0, 2.0\] .*; it must be a finite number of at least 0, or a dict with one for each Edge",
        ),
        (lambda: Costs(latency=[(Edge(0, 1), 1), 2.0]), r"latency is \[.*; it must be a finite number"),
        (lambda: Costs(F=()), r"F is \(\) \(tuple\); it must be a finite number"),
        (lambda: Costs(bandwidth=0), r"bandwidth is 0; it must be a number above 0 \(infinite: free\), or a dict"),
        (lambda: Costs(overhead=math.inf), r"overhead is inf; it must be a finite number"),
        (lambda: Costs(latency={Edge(0, 1): -2}), r"latency is \{.*-2\}.*; it must be a finite number"),
        (lambda: Costs(latency=[(0, 1)]), r"latency is \[\(0, 1\)\] .*; it must be a finite number"),
        (lambda: Costs().per_stage("latency", 2), r"name is 'latency'; it must be one of F, I, W, B"),
        (lambda: Costs().per_edge("F", [Edge(0, 1)]), r"name is 'F'; it must be one of latency, bandwidth, message"),
        (lambda: Costs(F=[1, 2]).per_stage("F", 3), r"F is given for 2 stages; the plan has 3"),
        (lambda: Costs(F=[1, 2], W=[1, 2, 3]).stages, r"costs are given for \[2, 3\] stages"),
        (
            lambda: Costs(latency={Edge(0, 1): 1}).per_edge("latency", [Edge(0, 1), Edge(1, 2)]),
            r"latency has no number for edge 1>2",
        ),
        (
            lambda: Costs(latency={Edge(0, 1): 1}).cut_into(4, slices=2),
            r"latency is given per edge; a model cut anew has other edges",
        ),
    ],
)
def test_impossible_costs_are_refused(build, message):
    with pytest.raises(CostsError, match=message):
        build()


def test_costs_per_edge_hold_where_the_edges_are_theirs():
    edges = {Edge(0, 1): 1, Edge(1, 2): 2, Edge(2, 3): 3}
    costs = Costs(latency=edges)
    assert costs.cut_into(4, slices=4) == costs
    assert costs.cut_into(4, slices=2) == Costs(F=0.5, I=0.5, W=0.5, latency=edges)  # four stages on two positions
    with pytest.raises(OtherCutError, match=r"other edges \(0>1\) than those given \(0>1, 1>2, 2>3\)"):
        costs.cut_into(2, slices=2)
    branched = Costs(bandwidth={Edge(0, 2): 1, Edge(1, 2): 2})
    assert branched.cut_into(3, slices=3, edges=[Edge(0, 2), Edge(1, 2)]) == branched
    with pytest.raises(OtherCutError, match=r"bandwidth is given per edge; a model cut anew has other edges"):
        branched.cut_into(3, slices=3)


def test_cut_anew_into_equal_shares():
    costs = Costs(F=2, I=[1, 3], W=[3, 6, 9])
    cut = costs.cut_into(6, slices=2)
    assert cut.F == pytest.approx(2 / 3)  # noqa: SIM300 -- approx goes last
    assert cut.I == pytest.approx((1 / 3,) * 3 + (1,) * 3)  # noqa: SIM300 -- approx goes last
    assert cut.W == pytest.approx((1.5, 1.5, 3, 3, 4.5, 4.5))  # noqa: SIM300 -- approx goes last
    assert Costs(F=[1, 2, 3]).cut_into(2, slices=2).F == pytest.approx((2, 4))  # noqa: SIM300 -- approx goes last
    assert costs.cut_into(2, slices=2).F == 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.integers(1, 12))
def test_cut_anew_nothing_is_lost_or_added(values, count):
    cut = Costs(F=values).cut_into(count, slices=1)
    assert math.isclose(sum(cut.per_stage("F", count)), sum(values), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(F=2, I=[1, 2], B=[2, 3], latency={Edge(0, 1): 0.5}, bandwidth=1e9, overhead=1e-5),
        Costs(activation=[1, 2], REDUCE=3),
        Costs(F=10**18 + 1),
    ],
)
def test_read_back_from_json(costs):
    assert costs_from_json(costs_to_json(costs)) == costs


NUMBERS = st.floats(0, allow_infinity=False, allow_nan=False) | st.integers(0, 10**40)
EDGES = st.builds(lambda first, hops: Edge(first, first + hops), st.integers(0, 9), st.integers(1, 9))


@given(
    st.builds(
        Costs,
        F=NUMBERS | st.lists(NUMBERS, min_size=1, max_size=3),
        B=st.none() | NUMBERS,
        latency=NUMBERS | st.dictionaries(EDGES, NUMBERS, min_size=1),
        bandwidth=st.just(math.inf) | st.dictionaries(EDGES, st.just(math.inf) | st.floats(1, 1e9), min_size=1),
        activation=st.none() | NUMBERS,
    )
)
def test_any_costs_are_read_back_from_json(costs):
    assert costs_from_json(costs_to_json(costs)) == costs


def test_edges_in_json():
    assert costs_from_json('{"latency": {"0>1": 0.5}}') == Costs(latency={Edge(0, 1): 0.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"costs cannot be read: line 1, column 2: found"),
        ("[1]", r"costs are \[1\] \(list\); they must be a JSON object such as"),
        ('{"G": 1}', r"'G' is not a cost; the costs are F, I, W, B"),
        ('{"F": "1"}', r"F is '1'; it must be a finite number"),
        ('{"latency": {"0-1": 1}}', r"an edge between stages, such as 1>2, not '0-1'"),
        ('{"F": [1, -1]}', r"F is \[1, -1\] \(list\); it must be a finite number"),
        ('{"F": null}', r"F is None; it must be a finite number"),
        ('{"F": {"0>1": 3}}', r"F is .*Edge.*; it must be a finite number of at least 0, or one for each stage"),
        ('{"F": [[1, 2]]}', r"F is \[\[1, 2\]\] .*; it must be a finite number"),
        ('{"latency": [1, 2]}', r"latency is \[1, 2\] .*; it must be a finite number"),
        ('{"overhead": [1, 2]}', r"overhead is \[1, 2\] .*; it must be a finite number"),
        ('{"latency": {"1>0": 1}}', r"an edge between stages, such as 1>2, not '1>0'"),
        ('{"F": 1' + "0" * 400 + "}", r"F is inf; it must be a finite number"),
        ('{"F": ' + "9" * 5000 + "}", r"F is inf; it must be a finite number"),
        (
            "[" * 200_000,
            r"costs cannot be read: line 1, column 1: found .*; expected JSON .brackets nest too deeply",
        ),
    ],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(CostsError, match=message):
        costs_from_json(text)


def test_a_share_released_is_the_mean_of_what_a_stage_covers():
    costs = Costs(F=[1, 1, 1, 1], input_release=[0, 0.5, 1, 1])
    assert costs.cut_into(2, slices=4).input_release == pytest.approx((0.25, 1))
    assert costs.cut_into(4, slices=4).input_release == (0, 0.5, 1, 1)
    assert Costs(input_release=0.5).cut_into(8, slices=4).input_release == 0.5
