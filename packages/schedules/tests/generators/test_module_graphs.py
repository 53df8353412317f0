"""Any named schedule for a graph of modules: its plan, where stages are placed, and what it does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    ActionKind,
    PlanError,
    find_schedule,
    fitting_schedules,
    lower,
    multi_module_1f1b,
    schedule_for,
    stage_places,
    verify,
)
from pipegrid.schedules import step_plan


def encoders_before(places, *, encoders=(1, 2)):
    """Encoders of these depths on ranks of their own before a module with stages on ``places``."""
    depths = {f"encoder {i}": depth for i, depth in enumerate(encoders)}
    graph = ModuleGraph({**depths, "main": len(places)}, [(name, "main") for name in depths])
    first = sum(encoders)
    return graph, (*((stage,) for stage in range(first)), *((first + place,) for place in places))


LOOPED = {"1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs"}
FITTING = {
    1: {"gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_h2", "u_shape"},
    2: {*LOOPED, "zero_bubble_v", "v_half", "v_min", "dualpipe_v"},
    3: LOOPED,
}


@pytest.mark.parametrize("num_chunks", FITTING)
def test_which_schedule_fits_follows_from_the_stages_on_a_position(num_chunks):
    """Of those that are named here; a new schedule may fit as well."""
    assert set(fitting_schedules(num_chunks)) & set().union(*FITTING.values()) == FITTING[num_chunks]


def test_stages_are_placed_round_forth_and_back_or_in_a_u():
    assert stage_places("1f1b", 3) == (0, 1, 2)
    assert stage_places("1f1b", 2, 2) == (0, 1, 0, 1)
    assert stage_places("interleaved", 2) == (0, 1, 0, 1)
    assert stage_places("Zero-Bubble-V", 3) == (0, 1, 2, 2, 1, 0)
    assert stage_places("u_shape", 3) == (0, 1, 2, 0)


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_a_fitting_schedule_has_a_proof_around_encoders(data, pp, num_chunks, microbatches, frozen):
    name = data.draw(st.sampled_from(fitting_schedules(num_chunks)))
    graph, placement = encoders_before(stage_places(name, pp, num_chunks))
    without = ("encoder 0",) if frozen else ()
    verify(step_plan(graph, microbatches, placement=placement, frozen=without, schedule=name), lanes="shared")


@given(st.data(), st.integers(1, 2), st.integers(1, 2), st.integers(1, 6), st.booleans())
def test_stages_of_encoders_lie_on_positions_in_any_way(data, pp, num_chunks, microbatches, frozen):
    name = data.draw(st.sampled_from(fitting_schedules(num_chunks)))
    depths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    graph, placement = encoders_before(stage_places(name, pp, num_chunks), encoders=depths)
    first = sum(depths)
    places = data.draw(st.lists(st.integers(0, pp + 1), min_size=first, max_size=first))  # on the main module's as well
    chosen = [*places, *(place - first for (place,) in placement[first:])]
    number = {place: index for index, place in enumerate(sorted(set(chosen)))}
    without = ("encoder 0",) if frozen else ()
    verify(step_plan(graph, microbatches, placement=[number[c] for c in chosen], frozen=without, schedule=name))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"])
def test_the_main_module_alone_has_its_own_schedule(name):
    places = stage_places(name, 2)
    graph = ModuleGraph({"main": len(places)})
    plan = schedule_for(graph, name, 4, placement=places)
    alone = find_schedule(name).plan(2, 4)
    assert plan.placement == alone.placement
    if name != "1f1b":
        assert plan.positions == alone.positions


def test_1f1b_is_that_of_any_graph():
    graph, placement = encoders_before((0, 1))
    assert schedule_for(graph, "1f1b", 5, placement=placement) == multi_module_1f1b(graph, 5, placement=placement)


def test_a_frozen_encoder_runs_no_backward():
    graph, placement = encoders_before(stage_places("zero_bubble_v", 2), encoders=(1,))
    plan = schedule_for(graph, "zero_bubble_v", 4, placement=placement, forward_only=["encoder 0"])
    assert {action.kind for action in plan.actions(0)} == {ActionKind.F}
    verify(lower(plan))


@pytest.mark.parametrize(
    ("graph", "name", "options", "text"),
    [
        (ModuleGraph({"a": 2}), "zero_bubble_x", {}, "there is no schedule"),
        (ModuleGraph({"a": 2}), "forward_only", {}, "forward_only runs no backward"),
        (ModuleGraph({"a": 3}), "zero_bubble_v", {"placement": (0, 1, 0)}, "does not run the 3 stages of 'a' on 2"),
        (
            ModuleGraph({"a": 4}),
            "zero_bubble_v",
            {"placement": (0, 1, 0, 1)},
            r"needs the stages of 'a' on the pp ranks \[0, 1, 1, 0\].*stage_places\('zero_bubble_v', 2, 2\)",
        ),
        (ModuleGraph({"a": 1, "b": 1, "c": 1}, [("a", "b"), ("a", "c")]), "gpipe", {}, "a, b, c branches; only 1f1b"),
        (
            ModuleGraph({"a": 1, "b": 1, "c": 1}, [("a", "b"), ("a", "c"), ("b", "c")]),
            "gpipe",
            {},
            "the graph of a, b, c branches; only 1f1b runs such a graph",
        ),
        (ModuleGraph({"a": 2}), "gpipe", {"forward_only": ["a"]}, "forward_only names 'a', the module with the loss"),
        (ModuleGraph({"a": 1}), "u_shape", {}, "u_shape does not run the 1 stages of 'a' on 1 positions"),
        (ModuleGraph({"a": 2}), "gpipe", {"placement": (0,)}, "the placement covers 1 stages and the graph has 2"),
    ],
)
def test_what_a_schedule_does_not_fit_is_a_clear_error(graph, name, options, text):
    with pytest.raises(PlanError, match=text):
        schedule_for(graph, name, 4, **options)


def test_a_number_of_stages_that_a_schedule_does_not_run_is_a_clear_error():
    with pytest.raises(PlanError, match="zero_bubble_v does not run 3 stages on each position; these do: 1f1b, inter"):
        stage_places("zero_bubble_v", 2, 3)


def test_a_module_beside_the_main_one_may_feed_several():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, [("a", "b"), ("a", "c"), ("b", "c")])
    assert verify(lower(schedule_for(graph, "gpipe", 4, placement=(0, 1, 0)))).plan.num_positions == 2
