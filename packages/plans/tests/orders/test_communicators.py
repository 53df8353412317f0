"""The fewest communicators: against every way to share them, and for every generator."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Direction
from pipegrid.core.lanes import LaneSharing
from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import Lane, PlanError, from_text, lower, one_f_one_b, seq1f1b_interleaved, verify
from pipegrid.plans.orders import fewest_communicators, prove_order
from pipegrid.plans.orders.communicators import _place, orders_on
from pipegrid.plans.plan.dataflow import dataflow_of
from plan_kit.plans import GENERATORS

from ..verify.test_order_models import FACING, mutated_plans

EVERY = GENERATORS | {"seq1f1b_interleaved": lambda p, m: seq1f1b_interleaved(p, m, num_slices=2)}
MODELS = [ORDER_MODELS[name] for name in ("nccl2", "nccl-serial", "nccl-connecting")]


def placings(lanes: list) -> Iterator[dict]:
    """Every way to put lanes on communicators."""
    if not lanes:
        yield {}
        return
    *others, last = lanes
    for placed in placings(others):
        for number in range(max(placed.values(), default=-1) + 2):
            yield placed | {last: number}


def most_at_a_position(placed):
    at = {}
    for lane, number in placed.items():
        for position in (lane.source, lane.destination):
            at.setdefault(position, set()).add(number)
    return max(map(len, at.values()), default=0)


# A ring of two positions: position 0 makes stages 0 and 2, and position 1 receives the gradient of stage 2 last.
CROSSING = """
modules model:3
placement 0 1 0
microbatches 2
0: 0F0 0SEND_F0>1 2RECV_F0<1 2F0 2B0 2SEND_B0>1 0F1 0SEND_F1>1 2RECV_F1<1 2F1 2B1 2SEND_B1>1 {}
1: 1RECV_F0<0 1F0 1SEND_F0>2 1RECV_F1<0 1RECV_B0<2 1F1 1SEND_F1>2 1B0 1SEND_B0>0 1RECV_B1<2 1B1 1SEND_B1>0
""".format("0RECV_B0<1 0B0 0RECV_B1<1 0B1")


def is_proved(plan, placed, model):
    try:
        prove_order(orders_on(plan, placed, model), model, drains=True)
    except PlanError:
        return False
    return True


@given(mutated_plans(), st.sampled_from(MODELS))
def test_no_way_to_share_has_fewer(plan, model):
    lanes = sorted(dataflow_of(plan).lanes)
    if len(lanes) > 5:
        return
    try:
        found = fewest_communicators(plan, model)
    except PlanError as error:
        if error.faults[0].rule == "cycle":
            assert not any(is_proved(plan, placed, model) for placed in placings(lanes))
        return
    assert found.is_fewest
    assert is_proved(plan, found.numbers, model)
    fewest = min(most_at_a_position(placed) for placed in placings(lanes) if is_proved(plan, placed, model))
    assert max(found.per_position, default=0) == most_at_a_position(found.numbers) == fewest


@pytest.mark.parametrize("name", EVERY)
def test_one_is_enough_for_each_lowered_plan(name):
    for positions, microbatches in ((2, 4), (3, 3), (4, 8)):
        found = fewest_communicators(lower(EVERY[name](positions, microbatches)))
        assert [model.name for model in found.models] == list(ORDER_MODELS)
        assert found.is_fewest
        if (name, positions) == ("u_shape", 4):  # a batch that waits for a shape would hold what its sender waits for
            assert found.per_position == (1, 2, 2, 1)
        else:
            assert found.members == (tuple(range(positions)),)


def test_a_position_alone_needs_none():
    found = fewest_communicators(lower(one_f_one_b(1, 2)))
    assert (found.per_position, found.is_fewest) == ((0,), True)


def test_messages_that_face_each_other_need_one_each():
    found = fewest_communicators(from_text(FACING), ORDER_MODELS["nccl2"])
    assert found.numbers == {Lane(0, 1, Direction.FORWARD): 0, Lane(1, 0, Direction.BACKWARD): 1}
    assert str(found).splitlines() == [
        "2 per rank, the fewest under nccl2, also with waits for the whole device; with one for each lane 2",
        "  0: positions 0, 1: F0>1",
        "  1: positions 0, 1: B1>0",
    ]
    with pytest.raises(PlanError, match="deadlock under nccl-serial"):
        fewest_communicators(from_text(FACING), ORDER_MODELS["nccl-serial"])


def test_a_proof_takes_the_communicators_and_rejects_wrong_ones():
    plan = from_text(FACING)
    found = fewest_communicators(plan, "nccl2")
    proof = verify(plan, lanes=found, order="nccl2")
    assert (proof.lanes, proof.communicators) == (LaneSharing(found.communicators), (2, 2))
    wrong = LaneSharing([[lane for one in found.communicators for lane in one]])
    with pytest.raises(PlanError, match=r"deadlock under nccl2(.|\n)*ranks 0 and 1 wait for each other"):
        verify(plan, lanes=wrong, order="nccl2")
    with pytest.raises(PlanError, match="lane B1>0 is on none of the communicators"):
        verify(plan, lanes=LaneSharing([found.communicators[0]]), order="nccl2")
    with pytest.raises(PlanError, match="batches is 'simultaneous' beside order"):
        verify(plan, lanes=found, batches="simultaneous")


def test_messages_that_cross_on_one_communicator_are_on_two():
    """Positions 0 and 1 have two lanes the same way; the gradient is sent first and received last."""
    plan = from_text(CROSSING)
    lanes = Lane(0, 1, Direction.FORWARD), Lane(0, 1, Direction.BACKWARD)
    found = fewest_communicators(plan, "nccl2")
    assert found.numbers[lanes[0]] != found.numbers[lanes[1]]
    with pytest.raises(PlanError, match="receives them the other way round"):
        verify(plan, lanes=LaneSharing([found.numbers]), order="nccl2")


# Position 1 sends as stage 0 and receives as stage 1 in one batch: two messages of one edge, direction and microbatch.
BOTH_STAGES = """
modules a:1 b:1
edges a>b
placement 0,1 1,2
microbatches 1
0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0
1: 0F0 [0SEND_F0>1 1RECV_F0<0] 1F0 1B0 [1SEND_B0>0 0RECV_B0<1] 0B0
2: 1RECV_F0<0 1F0 1B0 1SEND_B0>0
"""


def test_a_header_is_waited_for_by_the_receive_of_a_batch_alone():
    plan = from_text(BOTH_STAGES)
    lanes = sorted(dataflow_of(plan).lanes)
    proof = verify(plan, lanes=LaneSharing([lanes]))
    assert proof.orders == tuple(ORDER_MODELS)
    assert all(is_proved(plan, dict.fromkeys(lanes, 0), model) for model in ORDER_MODELS.values())


@given(mutated_plans(), st.randoms(use_true_random=False))
def test_the_two_models_that_a_proof_plays_cover_all(plan, chance):
    lanes = sorted(dataflow_of(plan).lanes)
    placed = {lane: chance.randrange(len(lanes)) for lane in lanes}
    sharing = LaneSharing([[lane for lane in lanes if placed[lane] == number] for number in range(len(lanes))])
    try:
        proof = verify(plan, lanes=sharing)
    except PlanError:
        return
    assert proof.orders == tuple(ORDER_MODELS)
    assert all(is_proved(plan, placed, model) for model in ORDER_MODELS.values())


@given(st.data(), st.integers(1, 3))
def test_lanes_are_placed_wherever_there_is_a_placing(data, most):
    ends = st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(lambda pair: pair[0] != pair[1])
    lanes = data.draw(st.lists(st.builds(lambda pair: Lane(*pair, Direction.FORWARD), ends), unique=True, max_size=5))
    pairs = [(one, other) for one in lanes for other in lanes if one < other]
    several = st.sets(st.sampled_from(pairs), min_size=1, max_size=2).map(frozenset) if pairs else st.nothing()
    clauses = data.draw(st.sets(several, max_size=8)) if pairs else set()

    def is_right(placed):
        apart = all(any(placed[one] != placed[other] for one, other in clause) for clause in clauses)
        return apart and most_at_a_position(placed) <= most

    placed, is_whole = _place(lanes, clauses, most)
    assert is_whole
    assert is_right(placed) if placed is not None else not any(map(is_right, placings(lanes)))
