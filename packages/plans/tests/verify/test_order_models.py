"""`verify` under order models: what its own rule covers, and what is safe on one backend and not on another."""

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.plans import PlanError, from_text, lower, multi_module_1f1b, one_f_one_b, verify
from pipegrid.plans.orders import orders_of_plan, prove_order
from plan_kit.collectives import APART, BRIDGE, COLOCATED, GRAPH
from plan_kit.plans import GENERATORS

CARRIED = {BRIDGE: "bridge"}
SEVERAL = ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})
MODES = [("separate", "in_order"), ("separate", "simultaneous"), ("shared", "in_order")]

# In the middle both positions send before they receive: no call waits for another where each lane has a stream.
FACING = """
modules model:2
placement 0 1
microbatches 2
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""
# The same with the two messages in a batch, in this order at both ends.
CROSSED = FACING.replace("0SEND_F1>1 0RECV_B0<1", "[0SEND_F1>1 0RECV_B0<1]").replace(
    "1SEND_B0>0 1RECV_F1<0", "[1SEND_B0>0 1RECV_F1<0]"
)


def faults(text, **options):
    """The rules that a plan breaks."""
    try:
        verify(from_text(text), **options)
    except PlanError as error:
        return {fault.rule for fault in error.faults}
    return set()


@pytest.mark.parametrize("order", ORDER_MODELS)
def test_a_plan_that_is_safe_on_one_backend_only(order):
    assert faults(FACING) == {"cycle"}
    assert faults(FACING, order=order) == ({"cycle"} if order == "nccl-serial" else set())
    assert faults(FACING, order=order, rendezvous=False) == set()
    assert faults(FACING, order=order, lanes="shared") == {"order"}


def test_a_batch_whose_messages_start_together_is_safe_where_no_device_runs_one_kernel_at_a_time():
    assert faults(CROSSED) == faults(CROSSED, order="nccl-serial") == {"cycle"}
    assert faults(CROSSED, batches="simultaneous") == set()
    assert "nccl-serial" not in verify(from_text(CROSSED), batches="simultaneous").orders
    assert faults(CROSSED, lanes="shared", order="nccl-serial") == set()


def test_a_receive_before_the_compute_whose_result_its_sender_waits_for_hangs_with_drains_alone():
    early = """
modules model:2
placement 0 1
microbatches 2
0: 0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0
"""
    assert faults(early, order="nccl2") == {"cycle"}
    assert faults(early, order="nccl2", drains=False) == set()
    proof = verify(from_text(early), order="nccl2", drains=False)
    assert (proof.orders, proof.drains) == (("nccl2",), False)
    assert str(proof).endswith(
        "separate lanes, under nccl2; at most 2 microbatches live on a position, 2 communicators per rank"
    )


def test_computes_alone_are_proved_under_no_model():
    assert verify(one_f_one_b(2, 2)).orders == verify(one_f_one_b(2, 2), order="nccl2").orders == ()
    assert not verify(one_f_one_b(2, 2)).drains


def test_a_model_of_ones_own():
    one_line_each_way = OrderModel(name="mine", batched="pair", lone="pair")
    assert verify(from_text(FACING), order=one_line_each_way).orders == ("mine",)
    with pytest.raises(PlanError, match=r"'nccl3' \(did you mean 'nccl2'\?\); it must be an OrderModel, or one of"):
        verify(from_text(FACING), order="nccl3")
    with pytest.raises(PlanError, match="batches is 'simultaneous' beside order"):
        verify(from_text(FACING), order="nccl2", batches="simultaneous")


@pytest.mark.parametrize("order", ORDER_MODELS)
def test_positions_of_one_stage_meet_at_its_computes(order):
    assert faults(APART, order=order) == {"cycle"}
    verify(lower(COLOCATED, collectives={BRIDGE: "bridge"}), order=order)


def test_the_start_of_a_compute_of_several_positions_is_on_a_line():
    with pytest.raises(
        PlanError, match="start of 0F1 waits for rank 0, launch 5: start of 0F1, which is behind rank 0"
    ):
        prove_order(orders_of_plan(from_text(APART), lanes="separate"), ORDER_MODELS["nccl-serial"])


KINDS = [*sorted(GENERATORS), "colocated", "several"]


@st.composite
def mutated_plans(draw, kinds=KINDS):
    """A lowered plan whose steps were moved.

    Of any generator, of modules that share ranks and have a collective, or of stages on several positions.
    """
    name = draw(st.sampled_from(kinds))
    if name == "colocated":
        plan = lower(multi_module_1f1b(GRAPH, draw(st.integers(1, 4)), placement=[(0, 1), 0, 1]), collectives=CARRIED)
    elif name == "several":
        placement = draw(
            st.sampled_from([[(0, 1), (1, 2)], [(0, 2), (1, 2)], [(0, 1), (0, 2)], [0, (0, 1)], [(0, 1), 1]])
        )
        plan = lower(multi_module_1f1b(SEVERAL, draw(st.integers(1, 4)), placement=placement))
    else:
        plan = lower(GENERATORS[name](draw(st.integers(2, 3)), draw(st.integers(1, 4))))
    return moved(plan, random.Random(draw(st.integers(0, 2**32))), draw(st.integers(0, 3)))


def moved(plan, chance, times):
    positions = [list(steps) for steps in plan.positions]
    for _ in range(times):
        steps = positions[chance.randrange(len(positions))]
        if len(steps) < 2:
            continue
        number = chance.randrange(len(steps) - 1)
        one, other = steps[number], steps[number + 1]
        batches = [step if isinstance(step, tuple) else (step,) for step in (one, other)]
        way = chance.randrange(3)
        if way == 0:
            steps[number : number + 2] = [other, one]
        elif way == 1 and all(action.kind.is_message for batch in batches for action in batch):
            steps[number : number + 2] = [batches[0] + batches[1]]
        elif way == 2 and isinstance(one, tuple):
            steps[number : number + 1] = list(one[::-1])
    return evolve(plan, positions=positions)


@pytest.mark.parametrize(("lanes", "batches"), MODES)
@given(mutated_plans())
def test_what_the_rule_proves_ends_under_each_model_that_it_names(lanes, batches, plan):
    try:
        proof = verify(plan, lanes=lanes, batches=batches)
    except PlanError:
        return
    for name in proof.orders:
        prove_order(orders_of_plan(plan, lanes=lanes), ORDER_MODELS[name], drains=proof.drains)


@given(mutated_plans(["several"]))
def test_messages_of_several_routes_end_under_each_model_that_is_named(plan):
    test_what_the_rule_proves_ends_under_each_model_that_it_names.hypothesis.inner_test("separate", "in_order", plan)


@given(mutated_plans())
def test_what_is_proved_with_buffers_ends_on_gloo(plan):
    try:
        proof = verify(plan, rendezvous=False)
    except PlanError:
        return
    assert proof.orders == ("gloo",)
    prove_order(orders_of_plan(plan, lanes="separate"), ORDER_MODELS["gloo"])


@pytest.mark.parametrize(("placement", "serial"), [([(0, 1), (1, 2)], False), ([(0, 2), (1, 2)], True)])
def test_a_message_of_several_routes_is_proved_for_a_serial_device_where_it_ends(placement, serial):
    """In the first, position 1 sends to 2 before it receives from 0, and 2 receives from 0 first."""
    plan = lower(multi_module_1f1b(SEVERAL, 2, placement=placement))
    orders = verify(plan).orders
    assert orders == tuple(name for name in ORDER_MODELS if serial or name != "nccl-serial")
    for order in orders:
        verify(plan, order=order)
    if not serial:
        with pytest.raises(PlanError, match="deadlock under nccl-serial"):
            verify(plan, order="nccl-serial")
