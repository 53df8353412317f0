"""Pairs of a forward and a backward that run together: proved, lowered, timed; with every mistake judged alike."""

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans import (
    Costs,
    PlanError,
    dualpipe_v,
    find_schedule,
    from_csv,
    from_text,
    interleaved_1f1b,
    lower,
    offload,
    one_f_one_b,
    orders_from_csv,
    orders_from_json,
    orders_of_plan,
    prove_order,
    simulate,
    to_csv,
    to_torch,
    verify,
    zero_bubble_v,
)
from pipegrid.plans.plan import actions_of, step_text
from plan_kit.explorer import STUCK, explore
from plan_kit.mutations import MODES, random_mutant, rules_broken, single_mutations
from plan_kit.player import play

nightly = pytest.mark.nightly
PAIRED = {
    "interleaved_1f1b": lambda p, m: interleaved_1f1b(p, m, overlap=True),
    "1f1b": lambda p, m: interleaved_1f1b(p, m, num_chunks=1, overlap=True),
    "dualpipe_v": lambda p, m: dualpipe_v(p, m, overlap=True),
    "zero_bubble_v": lambda p, m: zero_bubble_v(p, m, overlap=True),
}


def opened(plan):
    """The plan with each pair as its two computes, one after the other."""
    return evolve(
        plan, positions=[[action for step in steps for action in actions_of(step)] for steps in plan.positions]
    )


def assert_agree(plan, mode, what):
    broken, problems = rules_broken(plan, mode), explore(plan, *mode)
    assert bool(broken) == bool(problems), (what, mode, broken, problems, str(plan))
    if broken == {"cycle"}:
        assert STUCK in problems, (what, mode, str(plan))
    return broken


@pytest.mark.parametrize("receives", ["late", "early"])
@pytest.mark.parametrize("name", PAIRED)
def test_every_size_of_a_schedule_with_pairs_is_proved(name, receives):
    for p in range(1, 5):
        for m in range(1, 10):
            plan = PAIRED[name](p, m)
            low = lower(plan, receives=receives)
            assert verify(low).orders == verify(lower(opened(plan))).orders
            assert sum(map(len, low.pairs)) == sum(map(len, plan.pairs))
            assert verify(low).peak_live == verify(opened(plan)).peak_live
            prove_order(orders_of_plan(low), "nccl-legacy")
            if p > 1 and m >= 2 * p:
                assert all(plan.pairs), "every position has some"


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize(("p", "m", "every"), [(2, 2, 15), (2, 4, 60), pytest.param(2, 4, 1, marks=nightly)])
def test_every_single_mistake_is_judged_alike(name, p, m, every):
    refused = 0
    for number, (what, mutant) in enumerate(single_mutations(lower(PAIRED[name](p, m)), pairs=True)):
        if number % every == 0:
            refused += bool(assert_agree(mutant, MODES[number // every % len(MODES)], what))
    assert refused


@pytest.mark.parametrize(
    ("count", "seed", "right"), [(250, 2, 5), pytest.param(30_000, 3, 500, marks=nightly)], ids=["some", "many"]
)
def test_random_mistakes_are_judged_alike(count, seed, right):
    """More than ``right`` of the plans can still run; mistakes join computes as well."""
    rng = random.Random(seed)
    accepted = joined = 0
    makers = [*PAIRED.values(), one_f_one_b]
    for _ in range(count):
        plan = lower(rng.choice(makers)(rng.randint(1, 3), rng.randint(1, 4)))
        what, mutant = random_mutant(plan, rng, rng.choice((1, 1, 2, 2, 3)), pairs=True)
        fine = not assert_agree(mutant, rng.choice(MODES), what)
        accepted += fine
        joined += fine and sum(map(len, mutant.pairs)) > sum(map(len, plan.pairs))
    assert accepted > right
    assert joined, "a pair that a mistake has made, and that can run"


def test_a_pair_needs_the_inputs_of_both_before_and_gives_both_after():
    with pytest.raises(PlanError, match=r"0B1 needs 0F1 before it, which comes at step 1"):
        verify(from_text("0: 0F0 (0F1;0B1) 0B0"))
    verify(from_text("0: 0F0 (0F1;0B0) 0B1\n1: 1F0 1B0 1F1 1B1"))
    with pytest.raises(PlanError, match=r"cycle(.|\n)*step 1: \(0F1;0B0\) waits for position 1, step 2: 1B0\n"):
        verify(from_text("0: 0F0 (0F1;0B0) 0B1\n1: 1F0 1F1 1B0 1B1"))
    verify(from_text("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1"))
    late = from_text(
        "0: 0F0 0SEND_F0>1 (0F1;0B0) 0RECV_B0<1 0SEND_F1>1 0RECV_B1<1 0B1\n1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 "
        "1RECV_F1<0 1F1 1B1 1SEND_B1>0"
    )
    with pytest.raises(PlanError, match="0B0 needs 0RECV_B0<1 before it"):
        verify(late)


def test_a_pair_takes_the_sum_less_what_it_hides():
    plan = from_text("0: 0F0 (0F1;0B0) 0B1")
    assert simulate(plan, Costs(F=3, I=2, W=2)).end == ((3.0, 10.0, 10.0, 14.0),)
    assert simulate(plan, Costs(F=3, I=2, W=2, overhead=1)).makespan == 18
    hidden = simulate(plan, Costs(F=3, I=2, W=2, hidden=1.5))
    assert hidden.start == ((0.0, 3.0, 3.0, 8.5),)
    assert hidden.busy == (12.5,)
    assert hidden.peaks() == (2.0,)
    assert simulate(plan, Costs(F=3, I=2, W=2, hidden=100)).makespan == 3 + 4 + 4, (
        "no pair is shorter than its longer half"
    )
    two = from_text("0: 0F0 1F0 (0F1;1B0) 0B0 1F1 1B1 0B1")
    assert simulate(two, Costs(F=1, I=1, W=1, hidden=[0.2, 0.6])).makespan == pytest.approx(12 - 0.4)


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_that_hide_nothing_take_what_they_take_one_after_the_other_or_longer(name):
    for p, m in ((2, 5), (3, 8), (4, 9)):
        plan = PAIRED[name](p, m)
        apart = simulate(opened(plan)).makespan
        assert simulate(plan).makespan >= apart
        assert simulate(lower(plan)).makespan == pytest.approx(simulate(plan).makespan)


NUMBERS = st.integers(1, 12).map(lambda tenths: tenths / 4)


@given(st.sampled_from(sorted(PAIRED)), st.integers(1, 4), st.integers(1, 7), st.data())
def test_times_are_those_of_a_slow_player(name, p, m, data):
    """Each step starts as soon as its position is free and all that its computes need is there."""
    plan = PAIRED[name](p, m)
    costs = {kind: [data.draw(NUMBERS) for _ in range(plan.num_stages)] for kind in ("F", "I", "W", "hidden")}
    travel = data.draw(NUMBERS)
    last = plan.num_stages - 1

    def needs(step):
        for action in actions_of(step):
            stage, microbatch, kind = action.stage, action.microbatch, str(action.kind)
            here = plan.placement[stage]
            if kind == "F" and stage > 0:
                yield ("F", stage - 1, microbatch), travel * (plan.placement[stage - 1] != here)
            if kind in "BI":
                yield ("F", stage, microbatch), 0
                if stage < last:
                    yield ("I", stage + 1, microbatch), travel * (plan.placement[stage + 1] != here)
            if kind == "W":
                yield ("I", stage, microbatch), 0

    def length(step):
        halves = {"F": "F", "I": "I", "W": "W", "B": "IW"}
        times = [sum(costs[half][a.stage] for half in halves[str(a.kind)]) for a in actions_of(step)]
        saved = sum(costs["hidden"][action.stage] for action in actions_of(step)) / 2 if len(times) > 1 else 0
        return sum(times) - min(saved, *times)

    def gives(step):
        return [
            ("F" if str(a.kind) == "F" else "I", a.stage, a.microbatch) for a in actions_of(step) if str(a.kind) != "W"
        ]

    times = play(plan.positions, needs=needs, length=length, gives=gives)
    simulation = simulate(plan, Costs(**costs, latency=travel))
    for position, steps in enumerate(plan.positions):
        spans = [span for step, span in zip(steps, times[position], strict=True) for _ in actions_of(step)]
        found = zip(simulation.start[position], simulation.end[position], strict=True)
        assert [pytest.approx(span) for span in spans] == [tuple(span) for span in found]


def test_the_bubble_of_dualpipe_is_the_papers():
    for p, m in ((2, 6), (4, 8), (6, 20)):
        for hidden in (0.0, 0.25, 0.5):
            costs = Costs(F=1.0, I=1.0, W=1.0, hidden=hidden)
            pair = 3.0 - hidden
            simulation = simulate(dualpipe_v(p, m, overlap=True), costs)
            idle = simulation.makespan - min(simulation.busy)
            assert idle <= (p - 1) * (pair + 2 - 3) + 1e-9, (p, m, hidden)


def test_a_schedule_has_pairs_by_its_name():
    for name in ("interleaved_1f1b", "dualpipe_v", "zero_bubble_v"):
        assert find_schedule(name).plan(2, 6, overlap=True) == PAIRED[name](2, 6)
        assert not any(find_schedule(name).plan(2, 6).pairs)
    with pytest.raises(PlanError, match="gpipe has no pairs of a forward and a backward; these do: interleaved_1f1b"):
        find_schedule("gpipe").plan(2, 6, overlap=True)


def test_torch_is_given_its_own_word():
    plan = dualpipe_v(2, 4, overlap=True)
    assert "(0F3;3B1)OVERLAP_F_B" in to_csv(plan)
    assert "(0F3;3B1)OVERLAP_F_B" in to_torch(lower(plan))
    assert from_csv(to_torch(plan)) == plan


def test_stages_of_a_pair_are_gathered_at_once():
    plan = lower(dualpipe_v(2, 4, overlap=True), shard="step")
    proof = verify(plan, window=2)
    assert proof.peak_gathered == (2, 2)
    assert any(plan.pairs)
    with pytest.raises(PlanError, match="a pair computes two stages, and 1 may be gathered at once"):
        lower(dualpipe_v(2, 4, overlap=True), shard="step", prefetch=0)


def test_a_pair_holds_both_of_its_microbatches_beside_copies():
    plan = interleaved_1f1b(3, 8, overlap=True)
    limit = 2.5
    moved = offload(lower(plan), limit)
    assert verify(moved, memory_limit=limit).peak_live <= (limit,) * 3
    assert sum(map(len, moved.pairs)) == sum(map(len, plan.pairs))
    texts = [step_text(step) for steps in moved.positions for step in steps]
    assert any(text.startswith("(") for text in texts)
    assert any("RELOAD" in text for text in texts)


def test_torch_2_15_waits_for_the_activation_that_the_backward_of_a_pair_shows_to_have_come():
    plan = lower(dualpipe_v(2, 4, overlap=True))
    rows = [row.split(",") for row in to_torch(plan, waits=True).splitlines()]
    assert from_csv(to_torch(plan, waits=True)) == from_csv(to_torch(plan))
    for row in rows:
        for at, cell in enumerate(row):
            if cell.startswith("("):
                stage, microbatch = cell.split(";")[1].split(")")[0].split("B")
                if f"{stage}SEND_F{microbatch}" in row:
                    assert row[at + 1] == f"{stage}WAIT_SEND_F{microbatch}"


def test_orders_of_torchs_table_have_the_pair_as_one_launch_that_reads_for_both():
    table = to_torch(lower(interleaved_1f1b(2, 3, overlap=True)))
    orders = orders_from_csv(table)
    prove_order(orders, "nccl-legacy")
    pairs = {one.text: one.needs for rank in orders.ranks for one in rank if one.text.startswith("(")}
    assert pairs["(2F2;2B1)"] == {"forward 1>2 2", "backward 2>3 1"}
    assert pairs["(3F1;3B0)"] == {"forward 2>3 1"}
    with pytest.raises(PlanError, match=r"ranks\[0\]\[0\]: .* is no batch"):
        orders_from_json('{"ranks": [["(0B0;0F1)"]]}')
