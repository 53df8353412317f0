"""Every named schedule against the formulas of its paper, and against brute force where they do not hold yet.

F = I = W = 1 and B = 2 for a whole position (a chunk takes its share), communication is free.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans.generators import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    u_shape,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from plan_kit.player import makespan, peak, play, play_plan


@frozen
class Form:
    """A generator, with what its source says for P positions, M microbatches and V chunks."""

    make: object
    v: int
    bubble: object  # makespan less the work of a position
    holds: object  # for which M the bubble does
    peak: object  # of all positions, for every M
    spanless: object = None  # for which M no position waits inside its own span
    work: int = 3  # per microbatch


FORMS = {
    "gpipe": Form(gpipe, 1, lambda p: 3 * (p - 1), lambda p, m: True, lambda p, m: m),
    "1f1b": Form(one_f_one_b, 1, lambda p: 3 * (p - 1), lambda p, m: True, lambda p, m: min(m, p)),
    "looped_bfs v2": Form(
        lambda p, m: looped_bfs(p, m, num_chunks=2),
        2,
        lambda p: 3 * (p - 1) / 2,
        lambda p, m: m >= p,
        lambda p, m: m,
    ),
    "looped_bfs v3": Form(
        lambda p, m: looped_bfs(p, m, num_chunks=3),
        3,
        lambda p: 3 * (p - 1) / 3,
        lambda p, m: m >= p,
        lambda p, m: m,
    ),
    "interleaved v1": Form(
        lambda p, m: interleaved_1f1b(p, m, num_chunks=1),
        1,
        lambda p: 3 * (p - 1),
        lambda p, m: m % p == 0,
        lambda p, m: min(m, 2 * p - 1) if m % p == 0 else None,
    ),
    "interleaved v2": Form(
        lambda p, m: interleaved_1f1b(p, m, num_chunks=2),
        2,
        lambda p: 3 * (p - 1) / 2,
        lambda p, m: m % p == 0,
        lambda p, m: min(2 * m, 2 * (p - 1) + p + 1) / 2 if m % p == 0 else None,
    ),
    "interleaved v3": Form(
        lambda p, m: interleaved_1f1b(p, m, num_chunks=3),
        3,
        lambda p: 3 * (p - 1) / 3,
        lambda p, m: m % p == 0,
        lambda p, m: min(3 * m, 2 * (p - 1) + 2 * p + 1) / 3 if m % p == 0 else None,
    ),
    "interleaved_zero_bubble v1": Form(
        lambda p, m: interleaved_zero_bubble(p, m, num_chunks=1),
        1,
        lambda p: p - 1,
        lambda p, m: m % p == 0,
        lambda p, m: min(m, p) if m % p == 0 else None,
    ),
    "interleaved_zero_bubble v2": Form(
        interleaved_zero_bubble,
        2,
        lambda p: (p - 1) / 2,
        lambda p, m: m % p == 0,
        lambda p, m: min(m, p) if m % p == 0 else None,
    ),
    "interleaved_zero_bubble v2 for slow links": Form(
        lambda p, m: interleaved_zero_bubble(p, m, warmup_per_hop=2),
        2,
        lambda p: (p - 1) / 2,
        lambda p, m: m % p == 0,
        lambda p, m: min(2 * m, 2 * (p - 1) + p + 1) / 2 if m % p == 0 else None,
    ),
    "interleaved_zero_bubble v2 at once": Form(
        lambda p, m: interleaved_zero_bubble(p, m, delayed=False),
        2,
        lambda p: 2 * (p - 1) / 2,
        lambda p, m: m % p == 0,
        lambda p, m: min(2 * m, 2 * (p - 1) + p + 1) / 2 if m % p == 0 else None,
    ),
    "zero_bubble_h1": Form(zero_bubble_h1, 1, lambda p: p - 1, lambda p, m: m >= p, lambda p, m: min(m, p)),
    "zero_bubble_h2": Form(
        zero_bubble_h2,
        1,
        lambda p: p - 1,
        lambda p, m: m >= 2 * p - 1,
        lambda p, m: min(m, 2 * p - 1),
        lambda p, m: m >= 2 * p - 1,
    ),
    "zero_bubble_v": Form(
        zero_bubble_v,
        2,
        lambda p: (p - 1) / 2,
        lambda p, m: m >= 2 * p - 1,
        lambda p, m: min(m, p),
        lambda p, m: m >= 2 * p - 1,
    ),
    "v_half": Form(
        v_half,
        2,
        lambda p: 0.5 if p == 2 else (3 * p - 7) / 2 if p % 2 == 0 else (3 * p - 4) / 2,
        lambda p, m: m >= p,
        lambda p, m: min(m, (p + 2) // 2),
    ),
    "v_min": Form(
        v_min,
        2,
        lambda p: 0.5 if p == 2 else 2 * p - (7, 5, 9)[p % 3] / 2,
        lambda p, m: m >= p,
        lambda p, m: min(m, (p + 4) // 3),
    ),
    # Serialized: the paper's formula credits the overlap of F and B, here a pair takes F + B.
    "dualpipe_v": Form(dualpipe_v, 2, lambda p: (p - 1) / 2, lambda p, m: m >= 2 * p, lambda p, m: min(m, p + 0.5)),
    "u_shape": Form(u_shape, 2, lambda p: 3 * p - 4, lambda p, m: m >= 2, lambda p, m: min(m, p)),
    "u_shape forward": Form(
        lambda p, m: u_shape(p, m, forward_only=True),
        2,
        lambda p: p - 1,
        lambda p, m: True,
        lambda p, m: 1,
        work=1,
    ),
    "forward_only": Form(
        lambda p, m: forward_only(p, m), 1, lambda p: p - 1, lambda p, m: True, lambda p, m: 1, work=1
    ),
}


# By day with every remainder of P by 2 and by 3, on which formulas depend.
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [2, 3, 4, 5, *(pytest.param(p, marks=pytest.mark.nightly) for p in range(6, 9))])
def test_formulas_hold_for_the_microbatches_they_are_stated_for(name, p):
    form = FORMS[name]
    held = 0
    for m in range(1, 3 * p + 1):
        simulation = simulate(form.make(p, m))
        work = form.work * m
        assert simulation.busy == pytest.approx([work] * p)
        if form.holds(p, m):
            held += 1
            assert simulation.makespan == pytest.approx(work + form.bubble(p)), m
            assert simulation.bubble() == pytest.approx(form.bubble(p) / (work + form.bubble(p))), m
        if form.peak(p, m) is not None:
            assert simulation.peak() == pytest.approx(form.peak(p, m)), m
        if form.spanless is not None and form.spanless(p, m):
            assert simulation.bubble(of="span") == pytest.approx(0, abs=1e-12), m
    assert held >= 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [2, 3, *(pytest.param(p, marks=pytest.mark.nightly) for p in range(4, 9))])
def test_every_makespan_and_peak_equals_brute_force(name, p):
    form, unit = FORMS[name], {"F": 1, "I": 1, "W": 1, "B": 2}
    for m in range(1, 3 * p + 1):
        plan = form.make(p, m)
        times = play_plan(plan, lambda action, plan=plan: Fraction(unit[action.kind], plan.stages_beside[action.stage]))
        simulation = simulate(plan)
        assert simulation.makespan == pytest.approx(float(makespan(times)))
        for until in ("W", "I") if form.work == 3 else ():
            peaks = [peak(plan, times, position, until=until) / len(plan.stages_at[position]) for position in range(p)]
            assert simulation.peaks(until=until) == pytest.approx(peaks)


REFERENCE = {
    "gpipe": (33, 27.3, 8),
    "1f1b": (33, 27.3, 4),
    "interleaved v2": (28.5, 15.8, 5.5),
    "looped_bfs v2": (28.5, 15.8, 8),
    "zero_bubble_v": (25.5, 5.9, 4),
    "dualpipe_v": (25.5, 5.9, 4.5),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values_at_4_positions_and_8_microbatches(name):
    simulation = simulate(FORMS[name].make(4, 8))
    makespan, bubble, peak = REFERENCE[name]
    assert simulation.makespan == pytest.approx(makespan)
    assert round(100 * simulation.bubble(), 1) == bubble
    assert simulation.peak() == pytest.approx(peak)
    assert simulation.peak(until="I") == pytest.approx(peak)


times = st.floats(0.1, 10)


@given(p=st.integers(1, 6), m=st.integers(1, 12), f=times, b=times)
def test_1f1b_and_gpipe_lose_a_forward_and_a_backward_per_hop_at_any_costs(p, m, f, b):
    for make in (gpipe, one_f_one_b):
        simulation = simulate(make(p, m), Costs(F=f, B=b))
        assert simulation.makespan == pytest.approx((m + p - 1) * (f + b))


@given(p=st.integers(1, 5), rounds=st.integers(1, 3), v=st.integers(1, 3), f=times, b=times)
def test_interleaving_divides_the_bubble_by_the_chunks_at_any_costs(p, rounds, v, f, b):
    for make in (interleaved_1f1b, looped_bfs):
        simulation = simulate(make(p, rounds * p, num_chunks=v), Costs(F=f / v, B=b / v))
        assert simulation.makespan == pytest.approx(rounds * p * (f + b) + (p - 1) * (f + b) / v)


@given(
    p=st.integers(1, 5),
    rounds=st.integers(1, 3),
    v=st.integers(1, 3),
    f=times,
    i=times,
    w=st.floats(0.05, 1),
    delayed=st.booleans(),
)
def test_split_interleaving_gives_back_a_weight_half_per_hop_and_two_if_delayed(p, rounds, v, f, i, w, delayed):
    """(P-1)(F+I)/V, and (P-1)(F+I-W)/V where W is delayed, wherever a W fits into the wait (W at most F and I)."""
    weight = w * min(f, i)
    plan = interleaved_zero_bubble(p, rounds * p, num_chunks=v, delayed=delayed)
    simulation = simulate(plan, Costs(F=f / v, I=i / v, W=weight / v))
    bubble = (p - 1) * (f + i - (weight if delayed else 0)) / v
    assert simulation.makespan == pytest.approx(rounds * p * (f + i + weight) + bubble)


@given(p=st.integers(2, 6), more=st.integers(0, 6), f=times, i=times, w=st.floats(0.05, 1))
def test_zb_h1_gives_back_two_weight_halves_per_hop(p, more, f, i, w):
    """(P-1)(F+B-2W), B the full backward, wherever a W fits into the wait (W at most F and I)."""
    weight = w * min(f, i)
    simulation = simulate(zero_bubble_h1(p, p + more), Costs(F=f, I=i, W=weight))
    b = i + weight
    assert simulation.makespan == pytest.approx((p + more) * (f + b) + (p - 1) * (f + b - 2 * weight))


def play_in_pairs(plan, duration, pair):
    """Makespan and busy time per position where an F and the B right after it run together, in ``pair``.

    A pair starts when both halves can, and both end with it. The simulator gives no such credit, since
    whether two actions overlap is for a runtime to arrange; here the paper's formula is held to the plan.
    """
    steps = []
    for position in range(plan.num_positions):
        own = []
        for action in plan.actions(position):
            last = own[-1] if own else ()
            if (
                str(action.kind) == "B"
                and len(last) == 1
                and str(last[0].kind) == "F"
                and last[0].stage != action.stage
            ):
                own[-1] = (*last, action)
            else:
                own.append((action,))
        steps.append(own)

    def needed_by(action):
        kind, stage, m = str(action.kind), action.stage, action.microbatch
        if kind == "W":
            return [("I", stage, m)]
        if kind == "F":
            return [("F", stage - 1, m)] if stage else []
        return [("F", stage, m), *([("I", stage + 1, m)] if stage + 1 < plan.num_stages else [])]

    times = play(
        steps,
        needs=lambda step: [(need, 0) for action in step for need in needed_by(action)],
        length=lambda step: pair if len(step) == 2 else duration[str(step[0].kind)],
        gives=lambda step: [("I" if str(a.kind) == "B" else str(a.kind), a.stage, a.microbatch) for a in step],
    )
    return makespan(times), [sum(end - start for start, end in own) for own in times]


@pytest.mark.parametrize("p", range(2, 9))
def test_dualpipe_v_with_overlap_loses_its_papers_bubble(p):
    """(n/2-1)(F&B+B-3W) for n = 2P stages on P positions, B full: the wait of the position that waits most."""
    for m in (2 * p, 2 * p + 1, 3 * p + 2):
        for f, i, w, pair in ((1, 1, 1, 3), (1, 1, 1, 2), (2, 2, 2, 5), (2, 3, 1, 5), (3, 3, 2, 7)):
            duration = {"F": f, "I": i, "W": w, "B": i + w}
            length, busy = play_in_pairs(dualpipe_v(p, m), duration, pair)
            assert length - min(busy) == (p - 1) * (pair + (i + w) - 3 * w)
