"""Plans whose stages hand on values past others: every schedule runs with them, and no mistake in one passes."""

import random

import pytest
from attrs import evolve

from pipegrid.core.edge import Edge
from pipegrid.core.skips import Uses, skips_among, values_by_edge
from pipegrid.plans import (
    ActionKind,
    Costs,
    PlanError,
    from_csv,
    from_json,
    from_text,
    gpipe,
    lower,
    offload,
    one_f_one_b,
    simulate,
    to_csv,
    to_json,
    to_torch,
    verify,
    with_skips,
    zero_bubble_v,
)
from plan_kit.explorer import STUCK, explore
from plan_kit.mutations import MODES, random_mutant, rules_broken
from plan_kit.plans import GENERATORS, compute_plans

nightly = pytest.mark.nightly


def random_skips(plan, seed):
    """The edges past stages of up to three values, each of which several later stages use."""
    rng, count = random.Random(seed), plan.num_stages
    uses = {}
    for number in range(rng.randint(1, 3) if count > 2 else 0):
        source = rng.randrange(count - 2)
        uses[number] = Uses(source, tuple(rng.sample(range(source + 1, count), rng.randint(1, count - source - 1))))
    return skips_among(values_by_edge(uses, plan.placement))


@pytest.mark.parametrize("positions", [2, 3, 4])
def test_every_schedule_runs_with_skips_and_in_the_same_time(positions):
    for name, plan in compute_plans(positions, 4):
        skipping = with_skips(plan, random_skips(plan, positions))
        verify(skipping)
        assert simulate(skipping).makespan == simulate(plan).makespan, name
        for receives in ("late", "early"):
            lowered = lower(skipping, receives=receives)
            for lanes in ("separate", "shared"):
                proof = verify(lowered, lanes=lanes)
                assert proof.peak_live == verify(lower(plan)).peak_live, name
            simulate(lowered)
            assert from_text(str(lowered)) == from_json(to_json(lowered)) == from_csv(to_csv(lowered)) == lowered


def test_a_position_is_sent_a_value_once():
    plan = zero_bubble_v(4, 4)
    edges = values_by_edge({"x": Uses(1, tuple(range(2, 8)))}, plan.placement)
    lowered = lower(with_skips(plan, skips_among(edges)))
    carrying = [
        action
        for position in range(4)
        for action in lowered.actions(position)
        if action.kind is ActionKind.SEND_F and action.edge in edges and action.microbatch == 0
    ]
    assert sorted(lowered.placement[action.edge.destination][0] for action in carrying) == [0, 2, 3]


def test_peaks_count_what_is_kept():
    plan = with_skips(gpipe(3, 4), [Edge(0, 2)])
    assert verify(lower(plan)).peak_kept == (0, 0, 4)
    # The next one is received while the one before is computed.
    assert verify(lower(with_skips(one_f_one_b(3, 4), [Edge(0, 2)]))).peak_kept == (0, 0, 2)
    assert "4 payloads of skips kept" in str(verify(lower(plan)))
    assert verify(lower(gpipe(3, 4))).peak_kept == ()
    forwards = lower(evolve(plan, positions=_forwards(plan), forward_only=(0, 1, 2)))
    assert verify(forwards).peak_kept == (0, 0, 2)


def _kept_by_brute_force(step, position, kept):
    """The most memory of ``position`` at any time: of all that is alive, each with its first and last moment."""
    plan, costs = step.plan, step.costs
    played = list(zip(step.start[position], step.end[position], plan.actions(position), strict=True))
    computes = {(a.stage, a.kind, a.microbatch, a.slice or 0): (start, end) for start, end, a in played}
    parts = costs.per_slice("slice_lengths", plan.num_slices)
    alive = []
    for stage in plan.stages_at[position]:
        for m in range(plan.num_microbatches):
            for part in range(plan.num_slices):
                first, done = computes[stage, ActionKind.F, m, part]
                last = inputs = done
                if stage not in plan.forward_only:
                    last = computes[stage, "B" if (stage, "B", m, part) in computes else "W", m, part][1]
                    inputs = computes[stage, "B" if (stage, "B", m, part) in computes else "I", m, part][1]
                share, size = step.input_release[stage], step.activation[stage] * parts[part]
                alive += [(first, last, size * (1 - share)), (first, inputs, size * share)]
                for edge in plan.graph.skips:
                    if edge.destination != stage:
                        continue
                    if plan.placement[edge.source] != plan.placement[stage]:
                        wanted = (ActionKind.RECV_F, edge, m, part)
                        keys = [(a.kind, a.edge, a.microbatch, a.slice or 0) for *_, a in played]
                        posts = [at for at, key in enumerate(keys) if key == wanted]
                        before = [end for at in posts for _, end, a in played[:at] if a.kind.is_compute]
                        begin = max(before, default=0.0) if posts else first
                    elif edge.source in plan.forward_only:
                        begin = computes[edge.source, ActionKind.F, m, part][0]
                    else:
                        continue
                    alive.append((begin, inputs, kept[edge] * parts[part]))
    return max(sum(size for begin, end, size in alive if begin <= at < end) for at, _, _ in alive)


@pytest.mark.parametrize(("count", "seed"), [(60, 0), pytest.param(2000, 1, marks=nightly)], ids=["some", "many"])
def test_peaks_count_what_is_kept_as_brute_force_does(count, seed):
    rng, kept_anything = random.Random(seed), 0
    for _ in range(count):
        plan = GENERATORS[rng.choice(list(GENERATORS))](rng.randint(2, 4), rng.randint(1, 5))
        plan = with_skips(plan, random_skips(plan, rng.random()))
        if rng.random() < 0.2 and not any(plan.pairs):
            plan = evolve(plan, positions=_forwards(plan), forward_only=range(plan.num_stages))
        if rng.random() < 0.8:
            plan = lower(plan, receives=rng.choice(["late", "early"]))
        kept = {edge: rng.choice([0.0, 0.5, 2.0]) for edge in plan.graph.skips}
        costs = Costs(
            F=[rng.uniform(0.5, 1.5) for _ in range(plan.num_stages)],
            activation=[rng.uniform(0.5, 1.5) for _ in range(plan.num_stages)],
            input_release=rng.choice([0.0, 0.3]),
            latency=rng.choice([0.0, 0.2]),
            kept=kept or 1.0,
        )
        step = simulate(plan, costs)
        for position, peak in enumerate(step.peaks()):
            assert peak == pytest.approx(_kept_by_brute_force(step, position, kept))
        bare = simulate(plan, evolve(costs, kept=0.0))
        assert bare.end == step.end
        kept_anything += bare.peaks() != step.peaks()
    assert kept_anything > count / 10


def test_activations_on_the_host_leave_what_is_kept_on_the_device():
    plan = lower(with_skips(one_f_one_b(3, 4), [Edge(0, 2)]))
    assert simulate(plan).peaks() == (3, 2, 1)
    assert simulate(plan, Costs(kept=3.0)).peaks() == (3, 2, 7)
    away = offload(lower(with_skips(gpipe(3, 4), [Edge(0, 2)])), memory_limit=1)
    assert simulate(away).peaks() == (1, 1, 1)
    assert simulate(away, Costs(kept=3.0)).peaks() == (1, 1, 1 + 4 * 3)


def test_a_stage_without_a_backward_leaves_a_copy_to_a_later_one_of_its_position():
    plan = with_skips(zero_bubble_v(2, 3), [Edge(0, 3)])
    frozen = lower(evolve(plan, positions=_forwards(plan), forward_only=range(4)))
    order = [str(action) for action in frozen.actions(0) if action.kind.is_compute]
    assert order == ["0F0", "0F1", "0F2", "3F0", "3F1", "3F2"]
    assert verify(frozen).peak_kept == (3, 0)
    assert simulate(frozen, Costs(kept=2.0)).peaks() == (0.5 + 3 * 2, 0.5)


def _forwards(plan):
    return [[step for step in steps if step.kind is ActionKind.F] for steps in plan.positions]


def test_skips_beside_gathers_and_copies_to_the_host():
    plan = with_skips(zero_bubble_v(3, 4), [Edge(0, 2), Edge(0, 5), Edge(1, 4)])
    verify(lower(plan, shard="microbatch"), window=2)
    plan = offload(plan, memory_limit=2)
    verify(plan, memory_limit=2)


def test_what_a_skip_may_not_be():
    with pytest.raises(PlanError, match="must lead past a stage"):
        with_skips(gpipe(3, 2), [Edge(0, 1)])
    with pytest.raises(PlanError, match="with_skips takes a plan of computes alone"):
        with_skips(lower(gpipe(3, 2)), [Edge(0, 2)])
    with pytest.raises(PlanError, match="edges that skip stages"):
        to_torch(with_skips(gpipe(3, 2), [Edge(0, 2)]))
    with pytest.raises(PlanError, match="line 3: skip 0>1 must lead past a stage"):
        from_text(str(with_skips(gpipe(3, 2), [Edge(0, 2)])).replace("0>2", "0>1"))


@pytest.mark.parametrize(("count", "seed"), [(150, 0), pytest.param(4000, 1, marks=nightly)], ids=["some", "many"])
def test_no_mistake_in_a_plan_with_skips_passes(count, seed):
    """Against the explorer, which tries what can happen; a mutant is accepted where nothing can go wrong alone."""
    rng, refused, accepted = random.Random(seed), 0, 0
    for _ in range(count):
        name, m = rng.choice(list(GENERATORS)), rng.randint(1, 3)
        plan = GENERATORS[name](3, m)
        skips = random_skips(plan, rng.random())
        plan = lower(with_skips(plan, skips), receives=rng.choice(["late", "early"]))
        what, mutant = random_mutant(plan, rng, rng.randint(0, 2))
        for mode in MODES:
            broken, problems = rules_broken(mutant, mode), explore(mutant, *mode, every_order=False)
            assert "unnamed" not in broken
            assert bool(broken) == bool(problems), (what, mode, broken, problems, str(mutant))
            if broken == {"cycle"}:
                assert STUCK in problems
            refused, accepted = refused + bool(broken), accepted + (not broken)
    assert refused > count / 2
    assert accepted > count / 4


def test_a_plan_that_lacks_a_message_of_a_skip_is_refused():
    plan = lower(with_skips(gpipe(3, 1), [Edge(0, 2)]))
    for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        positions = [
            [
                tuple(action for action in (step if isinstance(step, tuple) else (step,)) if not _is(action, kind))
                for step in steps
            ]
            for steps in plan.positions
        ]
        rows = [[step if len(step) > 1 else step[0] for step in steps if step] for steps in positions]
        with pytest.raises(PlanError, match="0>2|2SEND_B|0SEND_F|2RECV_F|0RECV_B"):
            verify(evolve(plan, positions=rows))


def _is(action, kind):
    return action.kind == kind and action.edge == Edge(0, 2)
