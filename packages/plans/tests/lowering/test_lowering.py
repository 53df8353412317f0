"""From computes to communications: right for every generator and every graph, in every mode of verify."""

import gc
import itertools

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    Costs,
    Group,
    PlanError,
    actions_of,
    forward_only,
    from_text,
    gpipe,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    simulate,
    verify,
    zero_bubble_v,
)
from pipegrid.plans.plan.actions import ActionKind, forward
from pipegrid.plans.verify import dataflow_of
from plan_kit.plans import compute_plans, random_module_plan

MODES = tuple(itertools.product((True, False), ("separate", "shared"), ("in_order", "simultaneous")))


def rows(plan):
    return [line.split(": ")[1] for line in str(plan).splitlines() if line[0].isdigit()]


def computes(plan):
    return [[action for action in plan.actions(p) if action.kind.is_compute] for p in range(plan.num_positions)]


def assert_lowered(plan, lowered):
    for rendezvous, lanes, batches in MODES:
        proof = verify(lowered, rendezvous=rendezvous, lanes=lanes, batches=batches)
        assert proof.communicates == lowered.has_communication
    assert computes(lowered) == [list(steps) for steps in plan.positions]


def test_1f1b_exchanges_both_ways_at_once_where_neighbours_would_block_each_other():
    first, middle, last = rows(lower(one_f_one_b(3, 3)))
    assert first == "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 [0SEND_F2>1 0RECV_B0<1] 0B0 0RECV_B1<1 0B1 0RECV_B2<1 0B2"
    assert middle == (
        "1RECV_F0<0 1F0 [1RECV_F1<0 1SEND_F0>2] 1F1 [1SEND_F1>2 1RECV_B0<2] 1B0 [1RECV_F2<0 1SEND_B0>0] "
        "1F2 [1RECV_B1<2 1SEND_F2>2] 1B1 [1SEND_B1>0 1RECV_B2<2] 1B2 1SEND_B2>0"
    )
    assert last == "2RECV_F0<1 2F0 2B0 [2RECV_F1<1 2SEND_B0>1] 2F1 2B1 [2SEND_B1>1 2RECV_F2<1] 2F2 2B2 2SEND_B2>1"


def test_receives_may_be_posted_early():
    late, early = lower(one_f_one_b(2, 2)), lower(one_f_one_b(2, 2), receives="early")
    # The second activation is on its way while the first backward runs.
    assert rows(late)[1] == "1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] 1F1 1B1 1SEND_B1>0"
    assert rows(early)[1] == "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0"


def waiting(plan, stage):
    """The most messages of frozen ``stage`` that its consumer has posted a receive for, and not used yet."""

    def change(action):
        kind = str(action.kind)
        return (kind == "RECV_F" and action.edge.source == stage) - (kind == "F" and action.stage == stage + 1)

    return max(most for p in range(plan.num_positions) for most in itertools.accumulate(map(change, plan.actions(p))))


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_lower_holds_a_frozen_encoder_back_to_its_queue(ahead):
    graph = ModuleGraph({"images": 1, "language": 3}, {"images": ["language"]})
    base = multi_module_1f1b(graph, 12, forward_only=("images",))
    assert waiting(lower(base), 0) > 4
    plan = lower(base, ahead=ahead)
    verify(plan)
    assert 1 <= waiting(plan, 0) <= ahead
    costs = Costs(F=[0.5, 1, 1, 1])
    assert simulate(plan, costs).makespan == simulate(lower(base), costs).makespan


@pytest.mark.parametrize("receives", ["late", "early"])
def test_every_generators_plan_is_lowered_right(receives):
    for num_positions, num_microbatches in [(1, 2), (2, 1), (2, 5), (3, 4), (4, 3)]:
        for _, plan in compute_plans(num_positions, num_microbatches):
            assert_lowered(plan, lower(plan, receives=receives))


@pytest.mark.nightly
@pytest.mark.parametrize("receives", ["late", "early"])
def test_every_generators_plan_is_lowered_right_at_every_shape(receives):
    for num_positions in range(2, 9):
        for num_microbatches in range(1, 3 * num_positions + 1):
            for _, plan in compute_plans(num_positions, num_microbatches):
                assert_lowered(plan, lower(plan, receives=receives))


def in_other_order(plan, key):
    """The plan with its batches written in the order of ``key``."""
    return evolve(
        plan,
        positions=[
            [step if len(actions_of(step)) == 1 else tuple(sorted(step, key=key)) for step in steps]
            for steps in plan.positions
        ],
    )


def wrapped_module_plans(m):
    """An encoder before a language model of two chunks per position: its activations go round and round."""
    for positions in (2, 3):
        graph = ModuleGraph({"encoder": 2, "language": 2 * positions}, {"encoder": ["language"]})
        rounds = [*range(positions)] * 2
        yield multi_module_1f1b(graph, m, placement=[positions, positions + 1, *rounds])
        yield multi_module_1f1b(graph, m, placement=[0, 1, *rounds])
        yield multi_module_1f1b(graph, m, placement=[tuple(range(positions)), positions, *rounds])


@pytest.mark.parametrize("counts", [(3, 4, 7), pytest.param(range(2, 9), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("receives", ["late", "early"])
def test_no_generators_plan_deadlocks_if_its_messages_block_in_the_order_of_each_batch(receives, counts):
    stuck = {"by lane": 0, "sends first": 0}
    for p, m in itertools.product((2, 3, 4), counts):
        plans = [plan for _, plan in compute_plans(p, m)] + (list(wrapped_module_plans(m)) if p == 2 else [])
        for plan in plans:
            lowered = lower(plan, receives=receives)
            assert verify(lowered).batches == "in_order"
            if m > 4:
                continue
            for name, key in (("by lane", lane_of(lowered)), ("sends first", lambda action: action.kind.is_receive)):
                other = in_other_order(lowered, key)
                verify(other, batches="simultaneous")
                try:
                    verify(other)
                except PlanError as error:
                    stuck[name] += {fault.rule for fault in error.faults} == {"cycle"}
    assert stuck["by lane"], stuck  # the order is not for show
    assert stuck["sends first"] or receives == "early"


def lane_of(plan):
    """By the names of lanes: source, destination, direction."""

    def key(action):
        ends = [plan.placement[stage][0] for stage in (action.stage, action.peer)]
        return (*(ends if action.kind.is_send else ends[::-1]), action.direction.value)

    return key


def assert_random_graph_is_lowered_right(seed):
    plan, options = random_module_plan(seed)
    assert_lowered(plan, lower(plan, **options))


AT_NIGHT = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 40)]


# Two numbers: a message among four positions beside a collective of two, or among three beside a collective of one, at
# the same places.
@pytest.mark.parametrize("seed", [*range(20), 3831923, 219, *AT_NIGHT])
def test_random_graphs_of_modules_are_lowered_right(seed):
    assert_random_graph_is_lowered_right(seed)


@pytest.mark.nightly
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=0))
def test_many_random_graphs_of_modules_are_lowered_right(seed):
    assert_random_graph_is_lowered_right(seed)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.dictionaries(st.sampled_from("FBIW"), st.floats(0, 10), min_size=4),
    st.sampled_from(["late", "early"]),
)
def test_a_wrong_guess_of_durations_cannot_make_it_wrong(num_positions, num_microbatches, cost, receives):
    for plan in (one_f_one_b(num_positions, num_microbatches), zero_bubble_v(num_positions, num_microbatches)):
        assert_lowered(plan, lower(plan, receives=receives, duration=lambda action: cost[action.kind.value]))


def test_what_stays_on_its_position_is_not_sent():
    plan = lower(zero_bubble_v(2, 1))
    # The turn of the V: stages 1 and 2 are both on position 1.
    assert rows(plan)[1] == "1RECV_F0<0 1F0 2F0 2SEND_F0>3 2RECV_B0<3 2I0 2W0 1I0 1SEND_B0>0 1W0"
    assert not lower(gpipe(1, 3)).has_communication
    # a and b on the very same positions, which c makes two.
    graph = ModuleGraph({"a": 1, "b": 1, "c": 2}, {"a": ["b"]})
    colocated = lower(multi_module_1f1b(graph, 2, placement=[(0, 1), (0, 1), 0, 1]))
    assert {action.edge for position in (0, 1) for action in colocated.actions(position)} == {None, Edge(2, 3)}


def test_forwards_alone_send_no_gradients():
    plan = lower(forward_only(3, 4))
    kinds = {action.kind for position in range(3) for action in plan.actions(position)}
    assert kinds == {ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F}


def test_a_module_with_two_destinations_sends_to_both_and_gets_both_gradients():
    graph = ModuleGraph({"enc": 1, "mid": 1, "llm": 1}, {"enc": ["mid", "llm"], "mid": ["llm"]})
    plan = lower(multi_module_1f1b(graph, 1))
    assert rows(plan) == [
        "0F0 [0SEND_F0>1 0SEND_F0>2] [0RECV_B0<2 0RECV_B0<1] 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0",
        "[2RECV_F0<0 2RECV_F0<1] 2F0 2B0 [2SEND_B0>1 2SEND_B0>0]",
    ]


def test_a_colocated_encoder_sends_from_each_of_its_positions_to_the_other():
    graph = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
    plan = lower(multi_module_1f1b(graph, 1, placement=[(0, 1), 0, 1]))
    # The language model starts on position 0: only position 1 has to send what it encoded.
    assert rows(plan) == [
        "0F0 1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 0B0",
        "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2B0 2SEND_B0>1 0RECV_B0<1 0B0",
    ]


def test_an_edge_may_use_a_collective():
    graph = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})
    plan = lower(multi_module_1f1b(graph, 1, placement=[(0, 1), 0, 1]), collectives={Edge(0, 1): "bridge"})
    assert rows(plan) == [
        "0F0 0COLLECTIVE0>1@bridge 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1COLLECTIVE0>0@bridge 0B0",
        "0F0 0COLLECTIVE0>1@bridge 2RECV_F0<1 2F0 2B0 2SEND_B0>1 1COLLECTIVE0>0@bridge 0B0",
    ]
    assert plan.groups == (Group("bridge", [0, 1], edges=[Edge(0, 1)]),)
    assert plan.collective_edges == {Edge(0, 1): "bridge"}
    assert [str(lane) for lane in dataflow_of(plan).lanes] == ["F0>1", "B1>0"]  # for the language model's own edge


def test_modules_on_the_same_position_may_share_their_data_in_different_ways():
    graph = ModuleGraph({"enc": 1, "llm": 1}, {"enc": ["llm"]})
    plan = lower(multi_module_1f1b(graph, 1, placement=[0, 0]), collectives={Edge(0, 1): "colocated"})
    assert rows(plan) == ["0F0 0COLLECTIVE0>1@colocated 1F0 1B0 1COLLECTIVE0>0@colocated 0B0"]
    assert_lowered(multi_module_1f1b(graph, 1, placement=[0, 0]), plan)


def test_members_that_hold_neither_stage_take_part_in_a_collective():
    plan = evolve(one_f_one_b(3, 2), groups=[Group("all", [0, 1, 2], edges=[Edge(0, 1)])])
    assert rows(lower(plan))[2].startswith("0COLLECTIVE0>1@all 0COLLECTIVE1>1@all 2RECV_F0<1")
    assert_lowered(plan, lower(plan))


def test_tied_parameters_are_reduced_after_the_last_backward_of_all():
    plan = lower(interleaved_1f1b(2, 2), tied={"embedding": [0, 3]})
    assert [steps[-1] for steps in map(str.split, rows(plan))] == ["0REDUCE@embedding", "3REDUCE@embedding"]
    assert plan.groups == (Group("embedding", [0, 1], tied=[0, 3]),)


def test_batches_match_one_to_one_between_positions():
    for _, plan in compute_plans(3, 5):
        lowered = lower(plan)
        for one, other in itertools.combinations(range(3), 2):
            between = [
                [
                    sorted((str(a.edge), a.direction.value, a.microbatch) for a in batch)
                    for step in lowered.positions[here]
                    if (
                        batch := [
                            action
                            for action in actions_of(step)
                            if action.kind.is_message and lowered.placement[action.peer] == (there,)
                        ]
                    )
                ]
                for here, there in ((one, other), (other, one))
            ]
            assert between[0] == between[1]


def test_transfers_of_one_date_keep_the_order_in_which_the_simulation_finds_them():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"a": ["b", "c"]})
    text = str(lower(multi_module_1f1b(graph, 1, placement=[(0, 2), 2, 1])))
    assert text.splitlines()[-3:] == [
        "0: 0F0 0SEND_F0>2 0SEND_F0>1 0RECV_B0<2 0RECV_B0<1 0B0",
        "1: 2RECV_F0<0 2F0 2B0 2SEND_B0>0",
        "2: 0F0 0SEND_F0>2 1RECV_F0<0 1F0 1B0 0RECV_B0<2 1SEND_B0>0 0B0",
    ]


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (lower(one_f_one_b(2, 2)), {}, "the plan communicates or offloads already"),
        (one_f_one_b(2, 2), {"receives": "never"}, "receives is 'never'; it must be 'late' or 'early'"),
        (one_f_one_b(2, 2), {"collectives": {Edge(0, 2): "g"}}, "collectives names edge 0>2; the graph has 0>1"),
        (one_f_one_b(2, 2), {"collectives": ["g"]}, "collectives is ['g'] (list); it must be a dict from an Edge"),
        (one_f_one_b(2, 2), {"tied": {"t": [2]}}, "tied 't' names stage 2; the plan has stages 0..1"),
        (
            forward_only(2, 2),
            {"tied": {"t": [0]}},
            "group 't' ties stage 0; trained are none",
        ),
        (
            one_f_one_b(3, 2),
            {"collectives": {Edge(0, 1): "g", Edge(1, 2): "g"}},
            "group 'g' has positions [0, 1]; its stages lie on [0, 1, 2]",
        ),
    ],
)
def test_what_cannot_be_lowered_is_refused(plan, options, message):
    with pytest.raises(PlanError) as error:
        lower(plan, **options)
    assert message in str(error.value)


def test_wrong_computes_are_refused_with_all_faults():
    plan = one_f_one_b(2, 2)
    with pytest.raises(PlanError) as error:
        lower(evolve(plan, positions=[plan.positions[0][:-1], (*plan.positions[1], forward(1, 0))]))
    assert [fault.rule for fault in error.value.faults] == ["missing", "duplicate"]


def test_computes_that_wait_for_each_other_are_refused():
    crossed = from_text("0: 0F0 3F0 3B0 0B0\n1: 2F0 1F0 1B0 2B0")
    with pytest.raises(PlanError, match="2F0 needs 1F0 before it, which comes at step 1"):
        lower(crossed)
    crossed = from_text("0: 2F0 0F0 2B0 0B0\n1: 1F0 1B0")
    with pytest.raises(PlanError) as error:
        lower(crossed)
    assert "position 0, step 0: 2F0 waits for position 1, step 0: 1F0" in str(error.value)
    assert "position 1, step 0: 1F0 waits for position 0, step 1: 0F0" in str(error.value)


def test_stages_on_several_positions_are_computed_in_one_order_on_all_of_them():
    # The ranks of a stage may communicate inside it: 0 would wait for 1 in stage 0, and 1 for 0 in stage 2.
    table = from_text(
        "modules a:1 b:1 c:1 d:1 e:1\nedges a>b c>d\nplacement 0,1 0,1 0,1 0,1 1\nforward_only 0 1 2 3 4\n"
        "0: 0F0 1F0 2F0 3F0\n1: 2F0 3F0 0F0 1F0 4F0"
    )
    for collectives in ({}, {Edge(0, 1): "ab", Edge(2, 3): "cd"}):
        with pytest.raises(PlanError) as error:
            lower(table, collectives=collectives)
        assert "position 0, step 0: 0F0 waits for position 1, step 2: 0F0" in str(error.value)
        assert "position 1, step 0: 2F0 waits for position 0, step 2: 2F0" in str(error.value)
    in_order = from_text(str(table).replace("2F0 3F0 0F0 1F0", "0F0 1F0 2F0 3F0"))
    assert not lower(in_order).has_communication
    assert lower(in_order, collectives={Edge(0, 1): "ab"}).has_communication


def test_the_groups_that_a_plan_already_names_are_used():
    plan = one_f_one_b(2, 1)
    named = evolve(plan, groups=[Group("bridge", [0, 1], edges=[Edge(0, 1)], tied=[0, 1])])
    assert rows(lower(named)) == [
        "0F0 0COLLECTIVE0>1@bridge 1COLLECTIVE0>0@bridge 0B0 0REDUCE@bridge",
        "0COLLECTIVE0>1@bridge 1F0 1B0 1COLLECTIVE0>0@bridge 1REDUCE@bridge",
    ]


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_left_as_it_was_found(collecting):
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        lower(one_f_one_b(2, 3))
        assert gc.isenabled() is collecting
        with pytest.raises(PlanError, match="missing"):
            lower(evolve(one_f_one_b(2, 3), num_microbatches=4))
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()
