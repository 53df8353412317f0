"""Gathered parameters in a plan: where they are gathered, freed and reduced; the proof, the costs and the picture."""

from __future__ import annotations

from itertools import product

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Action,
    ActionKind,
    Costs,
    PlanError,
    dualpipe_v,
    forward_only,
    from_csv,
    from_json,
    from_text,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    simulate,
    to_csv,
    to_json,
    to_text,
    verify,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.plans.passes.sharding import _swaps
from pipegrid.plans.plan import SHARDING, Group, actions_of

UNSHARD, RESHARD, REDUCE_GRAD = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD
PLANS = {
    "1f1b": one_f_one_b(3, 4),
    "interleaved": interleaved_1f1b(2, 4, num_chunks=3),
    "zero bubble h1": zero_bubble_h1(2, 4),
    "zero bubble v": zero_bubble_v(2, 4),
    "dualpipe v": dualpipe_v(2, 4),
    "evaluation": forward_only(2, 3),
}


def sharding(plan, position):
    return [str(action) for action in plan.actions(position) if action.kind in SHARDING]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("reduce", ["step", "microbatch"])
@pytest.mark.parametrize("name", PLANS)
def test_a_lowered_plan_gathers_within_its_window_and_reduces_what_it_computes(name, reduce, prefetch):
    computes = PLANS[name]
    plan = lower(computes, shard=reduce, prefetch=prefetch)
    proof = verify(plan, window=prefetch + 1)
    assert max(proof.peak_gathered) == min(prefetch + 1, computes.num_chunks)
    assert f"of at most {max(proof.peak_gathered)} stages at once" in str(proof)
    bare = lower(computes)
    for position, steps in enumerate(plan.positions):
        rest = [step for step in steps if not (isinstance(step, Action) and step.kind in SHARDING)]
        assert rest == list(bare.positions[position]), "sharding moves nothing else"
        actions = list(plan.actions(position))
        for stage in computes.stages_at[position]:
            trained = stage not in computes.forward_only
            count = computes.num_microbatches if reduce == "microbatch" else 1
            assert sum(a == Action(REDUCE_GRAD, stage) for a in actions) == count * trained
    for write, read in ((to_text, from_text), (to_json, from_json), (to_csv, from_csv)):
        assert read(write(plan)) == plan


def test_the_places_of_a_small_plan():
    plan = lower(zero_bubble_v(2, 2), shard="step", prefetch=0)
    assert sharding(plan, 1)[:3] == ["1UNSHARD", "1RESHARD", "2UNSHARD"]
    assert str(next(plan.actions(1))) == "1UNSHARD", "gathered while the first activation is on its way"
    assert sharding(lower(one_f_one_b(2, 2), shard="microbatch"), 0) == [
        *("0UNSHARD", "0REDUCE_GRAD", "0REDUCE_GRAD", "0RESHARD")
    ]


def test_only_the_named_modules_are_sharded_and_frozen_ones_have_nothing_to_reduce():
    graph = ModuleGraph({"images": 1, "language": 2}, [("images", "language")])
    computes = multi_module_1f1b(graph, 3)
    assert {
        a.stage for p in range(3) for a in lower(computes, shard={"language": "step"}).actions(p) if a.kind in SHARDING
    } == {*(1, 2)}
    frozen = lower(multi_module_1f1b(graph, 3, forward_only=["images"]), shard="step")
    assert sharding(frozen, 0) == ["0UNSHARD", "0RESHARD"]
    verify(frozen)
    for shard, error in (
        ({"audio": "step"}, "shard names module 'audio'; the plan has 'images', 'language'"),
        ("always", "shard is 'always'"),
        ({"images": "always"}, r"shard\['images'\] is 'always'"),
    ):
        with pytest.raises(PlanError, match=error):
            lower(computes, shard=shard)
    with pytest.raises(PlanError, match="prefetch is -1"):
        lower(computes, shard="step", prefetch=-1)


def without(plan, position, number):
    """The plan without the sharding action ``number`` of ``position``."""
    positions = [list(steps) for steps in plan.positions]
    places = [i for i, step in enumerate(positions[position]) if isinstance(step, Action) and step.kind in SHARDING]
    del positions[position][places[number]]
    return evolve(plan, positions=positions)


@pytest.mark.parametrize("name", ["1f1b", "zero bubble v"])
def test_a_plan_that_lacks_any_of_its_sharding_actions_has_a_fault(name):
    plan = lower(PLANS[name], shard="step", prefetch=0)
    for position in range(plan.num_positions):
        for number in range(len(sharding(plan, position))):
            with pytest.raises(PlanError, match=r"UNSHARD|RESHARD|REDUCE_GRAD|gathered already"):
                verify(without(plan, position, number))


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ("0UNSHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD", "0UNSHARD: stage 0 is gathered already"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "0B0 needs 0UNSHARD before it; step 2 has freed it"),
        ("0F0 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD", "0F0 needs 0UNSHARD before it; nothing has gathered it"),
        ("0UNSHARD 0F0 0B0 0RESHARD", "0REDUCE_GRAD after the last backward of stage 0: to be done here, and never"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD", "0RESHARD: to be done at the end"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0RESHARD", "no backward of stage 0 comes before it that is not"),
        ("0UNSHARD 0F0 0I0 0REDUCE_GRAD 0W0 0RESHARD", "0REDUCE_GRAD after the last backward of stage 0"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD", "0REDUCE_GRAD needs 0UNSHARD before it"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD 7RESHARD", "the table has actions of 2 of 8 stages"),
    ],
)
def test_faults_of_a_written_plan(steps, error):
    with pytest.raises(PlanError, match=error):
        verify(from_text(f"0: {steps}\n"))


def test_a_tied_parameter_is_summed_after_its_stages_are_reduced():
    plan = lower(one_f_one_b(2, 2), shard="step", tied={"word": [0, 1]})
    assert [str(step) for step in plan.positions[0][-3:]] == ["0REDUCE_GRAD", "0RESHARD", "0REDUCE@word"]
    steps = list(plan.positions[0])
    early = evolve(plan, positions=[[*steps[:-3], steps[-1], *steps[-3:-1]], plan.positions[1]])
    with pytest.raises(PlanError, match="0REDUCE@word sums gradients of stage 0, which needs 0REDUCE_GRAD first"):
        verify(early)


def test_a_window_that_is_too_small_is_a_fault():
    plan = lower(interleaved_1f1b(2, 4, num_chunks=3), shard="step", prefetch=1)
    with pytest.raises(PlanError, match="2 stages are gathered at once; the window is 1"):
        verify(plan, window=1)


def test_no_action_of_sharding_is_in_a_batch():
    with pytest.raises(PlanError, match="messages and collectives are batched, and nothing else"):
        evolve(one_f_one_b(1, 1), positions=[[(Action(UNSHARD, 0), Action(RESHARD, 0))]])


def lanes_of(plan, count):
    """``count`` replicas as one plan: each gather and reduction is a collective of the copies of a position."""
    stages, places = plan.num_stages, plan.num_positions
    positions = []
    for lane, steps in product(range(count), range(places)):
        moved = []
        for step in plan.positions[steps]:
            own = []
            for action in actions_of(step):
                if action.kind is RESHARD:
                    continue
                if action.kind in SHARDING:
                    own.append(Action(ActionKind.COLLECTIVE, action.stage + lane * stages, group=f"lanes{steps}"))
                    continue
                edge = action.edge and type(action.edge)(
                    *(end + lane * stages for end in (action.edge.source, action.edge.destination))
                )
                own.append(Action(action.kind, action.stage + lane * stages, action.microbatch, edge))
            if own:
                moved.append(own[0] if len(own) == 1 else tuple(own))
        positions.append(moved)
    return evolve(
        plan,
        positions=positions,
        graph=ModuleGraph({f"lane{lane}": stages for lane in range(count)}),
        placement=[[place + lane * places for place in held] for lane in range(count) for held in plan.placement],
        forward_only=[stage + lane * stages for lane in range(count) for stage in plan.forward_only],
        groups=[Group(f"lanes{place}", [place + lane * places for lane in range(count)]) for place in range(places)],
    )


@pytest.mark.parametrize("lanes", ["separate", "shared"])
@pytest.mark.parametrize("name", PLANS)
def test_replicas_that_block_in_each_gather_and_reduction_do_not_deadlock(name, lanes):
    """The proof treats the ranks of a position as one; here each replica is a pipeline of its own."""
    for prefetch, reduce in product((0, 1), ("step", "microbatch")):
        verify(lanes_of(lower(PLANS[name], shard=reduce, prefetch=prefetch), 2), lanes=lanes)


def fewest(needs, window):
    """The fewest gathers, by trying every stage to free."""
    states = {frozenset(): 0}
    for stage in needs:
        after = {}
        for held, count in states.items():
            kept = [held] if stage in held or len(held) < window else [held - {other} for other in held]
            for rest in kept:
                found = count + (stage not in held)
                key = rest | {stage}
                after[key] = min(found, after.get(key, found))
        states = after
    return min(states.values())


@given(needs=st.lists(st.integers(0, 3), min_size=1, max_size=12), window=st.integers(1, 3))
def test_no_other_choice_gathers_fewer_times(needs, window):
    swaps = _swaps(list(enumerate(needs)), window)
    assert sum(len(gathered) for _, _, gathered in swaps) == fewest(needs, window)
    held, coming = set(), list(swaps)
    for number, stage in enumerate(needs):
        while coming and coming[0][0] <= number:
            _, freed, gathered = coming.pop(0)
            held = (held - set(freed)) | set(gathered)
            assert len(held) <= window
        assert stage in held


def test_gathers_take_time_beside_computes_and_memory_until_they_are_freed():
    costs = Costs(F=1, B=2, UNSHARD=(3.0, 1.0), REDUCE_GRAD=0.5, parameters=(100.0, 10.0))
    plan = lower(one_f_one_b(1, 2), shard="step")
    simulation = simulate(plan, Costs(F=1, B=2, UNSHARD=3, REDUCE_GRAD=0.5, parameters=100))
    assert simulation.makespan == 3 + 6 + 0.5
    assert simulation.gathered(0) == ((0.0, 100.0), (4.0, 200.0), (9.0, 100.0), (9.5, 0.0))
    two = simulate(lower(one_f_one_b(2, 2), shard="step"), costs)
    assert two.gathered_peaks() == (200.0, 20.0)
    assert simulate(lower(one_f_one_b(2, 2), shard="step"), Costs(F=1, B=2)).makespan == (
        simulate(lower(one_f_one_b(2, 2)), Costs(F=1, B=2)).makespan
    )
    small = simulate(lower(interleaved_1f1b(2, 4, num_chunks=3), shard="microbatch", prefetch=0), Costs(parameters=1))
    assert small.gathered_peaks() == (2.0, 2.0), "one stage gathered, and its gradients"


def test_a_prefetched_gather_costs_no_time():
    costs = Costs(UNSHARD=0.5)
    computes = interleaved_1f1b(2, 4, num_chunks=3)
    ahead, late = (simulate(lower(computes, shard="step", prefetch=p), costs).makespan for p in (2, 0))
    assert ahead == simulate(lower(computes), costs).makespan + 0.5, "all but the first gather run beside computes"
    assert late > ahead + 3


def test_costs_are_cut_with_the_model():
    cut = Costs(UNSHARD=2.0, REDUCE_GRAD=4.0, parameters=8.0).cut_into(4, slices=2)
    assert (cut.UNSHARD, cut.REDUCE_GRAD, cut.parameters) == (1.0, 2.0, 4.0)


def test_a_lowered_schedule_of_torch_is_read():
    """As `_PipelineScheduleRuntime` writes it: messages without peers, actions of sharding by the same names."""
    text = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )
    plan = from_csv(text)
    assert [str(action) for action in plan.actions(1)][1] == "1RECV_F0<0"
    assert verify(plan, window=1).num_messages == 2
    with pytest.raises(PlanError, match="0RECV_F0<-1"):
        from_csv("0RECV_F0,0F0\n")
