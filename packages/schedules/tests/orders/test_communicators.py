"""The fewest communicators: against every way to share them, and for every generator."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.schedules import Lane, PlanError, from_text, lower, one_f_one_b, seq1f1b_interleaved
from pipegrid.schedules.orders import fewest_communicators, orders_of_plan, prove_order
from pipegrid.schedules.plan.dataflow import dataflow_of
from pipegrid.transport.edge import Direction
from pipegrid.transport.order import ORDER_MODELS

from ..kit.plans import GENERATORS
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


def is_proved(plan, placed, model):
    try:
        prove_order(orders_of_plan(plan, lanes={lane: f"{placed[lane]}" for lane in placed}), model, drains=True)
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
        assert max(found.per_position) == 1
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
