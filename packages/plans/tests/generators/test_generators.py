"""Every generator: what its docstring promises, for a range of shapes."""

import inspect
import itertools

import pytest

from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.plans import (
    SCHEDULES,
    PlanError,
    chain,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    multi_module_1f1b,
    one_f_one_b,
    schedule_for,
    u_shape,
    v_half,
    v_min,
    verify,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.plans.simulate import Costs, simulate
from plan_kit.plans import compute_plans

SHAPES = [(p, m) for p in range(1, 9) for m in range(1, 3 * p + 1)]
# By day with every remainder of p by 2 and by 3, on which bubbles and peaks depend.
each_shape = pytest.mark.parametrize(
    "shapes",
    [[(p, m) for p, m in SHAPES if p <= 5], pytest.param(SHAPES, marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
SOME_SHAPES = [(p, m) for p in (1, 2, 3, 4, 7) for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 3 * p}) if m]


def times(plan):
    """Makespan and idle time within each position's span, at F = I = W = 1 for a whole position."""
    share = 1 / plan.num_chunks
    dates = simulate(plan, Costs(F=share, I=share, W=share))
    makespan = max(end[-1] for end in dates.end if end)
    idle = [
        end[-1] - start[0] - sum(e - s for s, e in zip(start, end, strict=True))
        for start, end in zip(dates.start, dates.end, strict=True)
        if end
    ]
    return makespan, idle


def peak(plan):
    return max(verify(plan).peak_live)


@pytest.mark.parametrize(
    ("plan", "makespan", "bubble", "live"),
    [
        (gpipe(4, 8), 33, 27.3, 8),
        (one_f_one_b(4, 8), 33, 27.3, 4),
        (interleaved_1f1b(4, 8), 28.5, 15.8, 5.5),
        (looped_bfs(4, 8), 28.5, 15.8, 8),
        (zero_bubble_v(4, 8), 25.5, 5.9, 4),
        (dualpipe_v(4, 8), 25.5, 5.9, 4.5),
    ],
    ids=["gpipe", "1f1b", "interleaved", "bfs", "zbv", "dualpipe"],
)
def test_the_reference_values_at_4_positions_and_8_microbatches(plan, makespan, bubble, live):
    assert times(plan)[0] == makespan
    assert round(100 * (1 - 24 / makespan), 1) == bubble
    assert peak(plan) == live


def test_every_plan_verifies_whatever_the_shape():
    for num_positions, num_microbatches in SOME_SHAPES:
        for name, plan in compute_plans(num_positions, num_microbatches):
            proof = verify(plan)
            assert not proof.communicates, name
            assert len(plan.positions) == num_positions


@pytest.mark.nightly
def test_every_plan_verifies_at_every_shape():
    for num_positions, num_microbatches in SHAPES:
        for _, plan in compute_plans(num_positions, num_microbatches):
            verify(plan)


@pytest.mark.parametrize("generator", [known.function for known in SCHEDULES.values() if not known.sliced])
@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0), (-1, 1), (2.0, 2), (2, True)])
def test_sizes_are_integers_from_1(generator, p, m):
    with pytest.raises(PlanError, match="it must be an integer of at least 1"):
        generator(p, m)


def picture(plan):
    """One line per position, one column for a forward of the smallest stage; second chunks in small letters."""
    most = plan.num_chunks
    slots = tuple(most / beside for beside in plan.stages_beside)
    dates = simulate(plan, Costs(F=slots, I=slots, W=slots))
    lines = []
    for position, steps in enumerate(plan.positions):
        row = [". "] * int(max(end[-1] for end in dates.end))
        for action, start, end in zip(steps, dates.start[position], dates.end[position], strict=True):
            token = f"{action.kind.value}{action.microbatch}"
            row[int(start)] = token if action.stage < plan.num_positions else token.lower()
            row[int(start) + 1 : int(end)] = ["--"] * (int(end) - int(start) - 1)
        lines.append(f"{position}: {' '.join(row)}".rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("generator", "p", "m"),
    [
        (gpipe, 3, 4),
        (one_f_one_b, 3, 4),
        (interleaved_1f1b, 2, 4),
        (interleaved_zero_bubble, 3, 3),
        (looped_bfs, 2, 3),
        (zero_bubble_h1, 3, 5),
        (zero_bubble_h2, 3, 6),
        (zero_bubble_v, 3, 5),
        (dualpipe_v, 2, 4),
        (u_shape, 2, 4),
    ],
)
def test_the_picture_in_the_docstring_is_the_schedule(generator, p, m):
    assert picture(generator(p, m)) in inspect.cleandoc(generator.__doc__).replace("    ", "")


@each_shape
def test_1f1b_and_gpipe_have_one_bubble_at_every_shape(shapes):
    for p, m in shapes:
        assert times(one_f_one_b(p, m))[0] == times(gpipe(p, m))[0] == 3 * (m + p - 1)
        assert verify(one_f_one_b(p, m)).peak_live == tuple(min(m, p - i) for i in range(p))


def test_warmup_is_the_distance_to_the_last_stage():
    for position, steps in enumerate(one_f_one_b(5, 9).positions):
        kinds = [action.kind for action in steps]
        assert kinds.index(ActionKind.B) == 5 - position


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving_divides_the_bubble(chunks):
    for p in range(1, 7):
        for m in (p, 2 * p, 3 * p):
            plan = interleaved_1f1b(p, m, num_chunks=chunks)
            assert times(plan)[0] == pytest.approx(3 * m + 3 * (p - 1) / chunks)
            assert peak(plan) * chunks == pytest.approx(min(m * chunks, 2 * (p - 1) + (chunks - 1) * p + 1))
            plan = looped_bfs(p, m, num_chunks=chunks)
            assert times(plan)[0] == pytest.approx(3 * m + 3 * (p - 1) / chunks)
            assert peak(plan) == m
            assert times(forward_only(p, m, num_chunks=chunks))[0] == pytest.approx(m + (p - 1) / chunks)


@pytest.mark.parametrize("options", [{"delayed": False}, {}, {"warmup_per_hop": 2}], ids=str)
def test_split_interleaving_takes_any_group_size_uneven_rounds_and_extra_warmup(options):
    for p, m, chunks, extra in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 3), (0, 2)):
        for group_size in (1, p, p + 1):
            for missing in {0, p - 1}:
                shape = {"num_chunks": chunks, "group_size": group_size, "num_stages": p * chunks - missing}
                plan = interleaved_zero_bubble(p, m, **shape, extra_warmup=extra, **options)
                whole = interleaved_1f1b(p, m, **shape, extra_warmup=extra)
                verify(plan)
                if not missing and (group_size == p or "delayed" in options):
                    assert peak(plan) <= peak(whole) + 1e-9
                for position in range(p):
                    assert [a for a in plan.actions(position) if a.kind is ActionKind.F] == [
                        a for a in whole.actions(position) if a.kind is ActionKind.F
                    ]


def test_a_hop_of_split_interleaving_has_one_forward_or_two():
    with pytest.raises(PlanError, match="warmup_per_hop is 3; it must be 1 or 2"):
        interleaved_zero_bubble(2, 4, warmup_per_hop=3)


def test_split_interleaving_of_one_chunk_is_zb_h1_and_of_any_number_has_the_memory_of_1f1b():
    for p, m in SOME_SHAPES:
        assert interleaved_zero_bubble(p, m, num_chunks=1) == zero_bubble_h1(p, m)
        for chunks in (2, 3):
            if m % p == 0:
                assert peak(interleaved_zero_bubble(p, m, num_chunks=chunks)) == pytest.approx(min(m, p))


def test_a_weight_half_that_is_not_delayed_follows_its_input_half():
    for actions in map(interleaved_zero_bubble(3, 6, delayed=False).actions, range(3)):
        for action, after in itertools.pairwise(actions):
            if action.kind is ActionKind.I:
                assert (after.kind, after.stage, after.microbatch) == (ActionKind.W, action.stage, action.microbatch)


def test_interleaving_takes_any_group_size_uneven_rounds_and_stages_that_do_not_fill_the_last():
    for p, m, chunks in itertools.product((1, 2, 3, 5), (1, 2, 4, 7), (1, 2, 3)):
        for group_size in (1, p - 1, p, p + 1, 2 * p + 1):
            for missing in {0, p - 1}:
                if group_size:
                    stages = p * chunks - missing
                    plan = interleaved_1f1b(p, m, num_chunks=chunks, group_size=group_size, num_stages=stages)
                    assert plan.num_stages == stages
                    verify(plan)
    with pytest.raises(PlanError, match=r"num_stages is 4; 3 chunks on 2 positions are 5\.\.6"):
        interleaved_1f1b(2, 4, num_chunks=3, num_stages=4)
    with pytest.raises(PlanError, match="group_size is 0"):
        interleaved_1f1b(2, 4, group_size=0)


def test_interleaving_runs_the_group_before_the_next_chunk():
    forwards = [a for a in interleaved_1f1b(2, 5, group_size=3).positions[0] if a.kind is ActionKind.F]
    # Stages 0 and 2 are chunks 0 and 1 of position 0: the table of 2 positions, groups of 3, 5 microbatches.
    assert [(a.stage // 2, a.microbatch) for a in forwards] == [
        *[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (0, 4), (1, 3), (1, 4)]
    ]


@each_shape
def test_zb_h1_keeps_the_memory_and_a_third_of_the_bubble(shapes):
    for p, m in shapes:
        plan = zero_bubble_h1(p, m)
        assert peak(plan) == min(p, m)
        if m >= p:
            assert times(plan)[0] == 3 * m + (p - 1)


@each_shape
def test_zb_h2_has_no_bubble_within_a_span(shapes):
    for p, m in shapes:
        plan = zero_bubble_h2(p, m)
        assert peak(plan) == min(2 * p - 1, m)
        if m >= 2 * p - 1:
            assert times(plan) == (3 * m + p - 1, [0] * p)


@each_shape
def test_zb_v_has_no_bubble_within_a_span_at_the_memory_of_1f1b(shapes):
    for p, m in shapes:
        plan = zero_bubble_v(p, m)
        assert peak(plan) <= p
        if m >= 2 * p - 1:
            makespan, idle = times(plan)
            assert (makespan, max(idle), peak(plan)) == (3 * m + (p - 1) / 2, 0, p)


@each_shape
def test_dualpipe_v_serialized(shapes):
    for p, m in shapes:
        plan = dualpipe_v(p, m)
        assert peak(plan) <= p + 0.5
        if m >= 2 * p:
            assert times(plan)[0] == 3 * m + (p - 1) / 2


@each_shape
def test_v_half_and_v_min_hold_their_memory_and_their_bubble(shapes):
    for p, m in shapes:
        half, least = v_half(p, m), v_min(p, m)
        assert peak(half) <= (p + 2) // 2
        assert peak(least) <= (p + 4) // 3
        if m >= p:
            assert peak(half) == min(m, (p + 2) // 2)
            assert peak(least) == min(m, (p + 4) // 3)
            # What the authors' own programs reach at c live microbatches, in passes of a chunk.
            for plan, c in ((half, (p + 2) // 2), (least, (p + 4) // 3)):
                bubble = max(6 * p - 1 - 6 * c, (p - 1) + 2 * (p - c)) if p > 2 else p - 1
                assert times(plan)[0] == 3 * m + bubble / 2


@pytest.mark.parametrize(
    ("schedule", "p", "m", "chunk_passes"),
    [(v_half, 4, 8, 53), (v_half, 8, 24, 161), (v_min, 6, 18, 125)],
)
def test_v_schedules_are_as_short_as_the_papers_programs(schedule, p, m, chunk_passes):
    assert 2 * times(schedule(p, m))[0] == chunk_passes


@pytest.mark.nightly
def test_v_half_and_v_min_keep_their_memory_for_many_positions():
    for p in range(9, 40):
        assert peak(v_half(p, 2 * p)) == (p + 2) // 2
        assert peak(v_min(p, 2 * p)) == (p + 4) // 3


def test_multi_module_1f1b_of_a_chain_is_1f1b():
    for p, m in SOME_SHAPES:
        assert multi_module_1f1b(chain(p), m) == one_f_one_b(p, m)


def test_a_shallow_branch_warms_up_by_its_distance_to_the_sink():
    # The audio encoder is one stage, beside two of the image encoder: both are as far from the loss.
    graph = ModuleGraph({"image": 2, "audio": 1, "llm": 2}, {"image": ["llm"], "audio": ["llm"]})
    plan = multi_module_1f1b(graph, 8)
    first_backward = [[action.kind for action in steps].index(ActionKind.B) - 1 for steps in plan.positions]
    assert first_backward == list(graph.distance_to_sink) == [3, 2, 2, 1, 0]
    # No stall: as long as the longest path alone.
    assert times(plan)[0] == times(one_f_one_b(max(graph.distance_to_sink) + 1, 8))[0]


def test_colocated_modules_are_done_by_date_on_one_position():
    graph = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
    plan = multi_module_1f1b(graph, 2, placement=[(0, 1), 0, 1])
    assert [" ".join(map(str, steps)) for steps in plan.positions] == [
        "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
        "0F0 0F1 2F0 2B0 2F1 0B0 2B1 0B1",
    ]
    with pytest.raises(PlanError, match="the placement covers 2 stages and the graph has 3"):
        multi_module_1f1b(graph, 2, placement=[0, 1])
    with pytest.raises(ModuleGraphError, match="there is no module 'text'; the graph has .*'enc', 'llm'"):
        multi_module_1f1b(graph, 2, forward_only=["text"])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble_h1", "seq1f1b"])
def test_a_position_without_a_stage_has_no_steps(name):
    plan = schedule_for(chain(2), name, 3, placement=[1, 3])
    assert [len(steps) > 0 for steps in plan.positions] == [False, True, False, True]
    assert schedule_for(chain(2), name, 3, placement=[0, 1]).positions == plan.positions[1::2]
