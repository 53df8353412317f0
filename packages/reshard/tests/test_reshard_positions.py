"""Which ranks act alike, and which edges are collectives."""

from __future__ import annotations

import pytest

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.reshard import (
    Box,
    BridgeError,
    Partial,
    Positions,
    alike,
    boundary_side,
    check_plan,
    plan_reshard,
    positions_of,
    replica_side,
)
from pipegrid.reshard.positions import collective_edges
from reshard_kit.grids import grid, sizes_of


def job(grids, edges, **placement):
    """The positions of modules whose stages lie at one place each unless ``placement`` says otherwise."""
    places = {name: placement.get(name, range(sizes_of(g).get("pp", 1))) for name, g in grids.items()}
    graph = ModuleGraph({name: len(places[name]) for name in grids}, edges)
    return graph, positions_of(graph, grids, places)


def collectives(grids, edges, **placements):
    graph, positions = job(grids, edges)
    sides = [
        (
            src,
            dst,
            boundary_side(grids[src], "source", placements=placements.get(src)),
            boundary_side(grids[dst], "destination", placements=placements.get(dst)),
        )
        for src, dst in graph.edges
    ]
    return collective_edges(graph, positions, sides)


def test_modules_on_ranks_of_their_own_have_a_position_for_each_stage():
    _, positions = job({"enc": grid(4, dp=2), "llm": grid(0, tp=2, pp=2)}, {"enc": ["llm"]})
    assert positions == Positions(ranks=((4, 5), (0, 1), (2, 3)), placement=((0,), (1,), (2,)))


def test_a_colocated_encoder_lies_on_every_position_of_the_language_model():
    _, positions = job({"enc": grid(dp=4), "llm": grid(dp=2, pp=2)}, {"enc": ["llm"]})
    assert positions == Positions(ranks=((0, 1), (2, 3)), placement=((0, 1), (0,), (1,)))


def test_an_encoder_on_some_ranks_divides_a_stage_into_two_positions():
    _, positions = job({"enc": grid(dp=1), "llm": grid(dp=2)}, {"enc": ["llm"]})
    assert positions == Positions(ranks=((0,), (1,)), placement=((0,), (0, 1)))


def test_virtual_stages_share_a_position():
    _, positions = job({"enc": grid(), "llm": grid(1, pp=2)}, {"enc": ["llm"]}, llm=(0, 1, 0, 1))
    assert positions == Positions(ranks=((0,), (1,), (2,)), placement=((0,), (1,), (2,), (1,), (2,)))


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        ({"enc": grid(0, dp=2), "llm": grid(2, pp=2)}, ()),
        ({"enc": grid(0, dp=2), "llm": grid(0, dp=2)}, ()),
        ({"enc": grid(0, dp=2), "llm": grid(0, tp=2)}, (Edge(0, 1),)),
        ({"enc": grid(0, dp=2), "llm": grid(0, pp=2)}, (Edge(0, 1),)),
        ({"enc": grid(0, dp=2), "llm": grid(1, dp=2)}, (Edge(0, 1),)),
        # The boundary of the encoder is its last stage, which the language model's first stage does not touch.
        ({"enc": grid(0, pp=2), "llm": grid(0, pp=2)}, ()),
    ],
)
def test_an_edge_is_a_collective_where_its_ends_share_ranks_and_hold_the_data_differently(grids, expected):
    assert collectives(grids, {"enc": ["llm"]}) == expected


def test_copies_on_two_positions_make_every_edge_of_their_module_a_collective():
    grids = {"enc": grid(0, tp=2), "llm": grid(0, pp=2), "gen": grid(2)}
    flow = {"enc": ["llm", "gen"], "llm": ["gen"]}
    assert collectives(grids, flow) == (Edge(0, 1), Edge(0, 3))
    grids["enc"] = grid(0, dp=2)
    assert collectives(grids, flow) == (Edge(0, 1),)


def test_partial_sums_do_not_stay_where_they_are():
    grids = {"enc": grid(cp=2), "llm": grid(cp=2)}
    assert collectives(grids, {"enc": ["llm"]}) == ()
    partial = {"cp": Partial()}
    assert collectives(grids, {"enc": ["llm"]}, enc=partial, llm=partial) == (Edge(0, 1),)


SIDE = boundary_side(grid(dp=2), "source")
MISTAKES = [
    (lambda: plan_reshard(SIDE, 3, None), "dst is 3; it must be a Side"),
    (lambda: check_plan(None), "plan is None; it must be a ReshardPlan"),
    (lambda: alike(SIDE, "x"), "destination is 'x'; it must be a Side"),
    (lambda: boundary_side(grid(dp=2), "source", placements=3), "placements is 3; it must be a mapping"),
    (lambda: boundary_side(grid(dp=2), "source", stage="0"), "stage is '0'; it must be an integer of at least 0"),
    (lambda: replica_side(SIDE, 1.0), "replica is 1.0; it must be an integer of at least 0"),
    (lambda: positions_of({"a": 1}, {}, {}), "graph is .*; it must be a ModuleGraph"),
    (lambda: Box((0, 0), (2, 2)).narrow(2, 0, 1), r"axis is 2; box \[0:2, 0:2\] has the axes \[0, 1\]"),
    (lambda: Box((0, 0), (2, 2)).narrow(-1, 0, 1), "axis is -1; box"),
]


@pytest.mark.parametrize(("call", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_an_argument_of_another_kind_is_refused_in_words(call, text):
    with pytest.raises(BridgeError, match=text):
        call()
