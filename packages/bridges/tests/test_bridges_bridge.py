"""BridgeCommunicator on real ranks, bit-equal to slicing one tensor in one process."""

from __future__ import annotations

import gc
import math
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import BridgeCommunicator, Packed
from pipegrid.reshard import Partial, Replicate, Shard, Sizes, plan_reshard
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.topology import HyperCommGrid, replica_samples
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PUsageError
from reshard_kit.grids import grid
from reshard_kit.played import contribution, contributions, part

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)
whole_world = partial(BridgeCommunicator, config=CONFIG)


def round_trip(bridge, plan, *, seed, dtype=torch.float32, samples=None):
    """One microbatch there and back; what this rank got against slices of the whole."""
    rank, back = bridge.rank, plan.adjoint()
    x = contributions(bridge.src, plan.sizes.shape, seed=seed, dtype=dtype)
    g = contributions(bridge.dst, plan.sizes.shape, seed=seed + 1, dtype=dtype)
    sending = receiving = None
    if bridge.is_source:
        mine = part(x[contribution(bridge.src, rank)], plan.source_spans(rank)).requires_grad_()
        own = None if samples is None else samples[bridge.src.lane_of(rank)]
        sending = bridge.isend_forward(mine, samples=own)
    if bridge.is_destination:
        got = bridge.irecv_forward().result()
        assert got.requires_grad
        assert got.dtype is dtype
        assert torch.equal(got, part(sum(x), plan.destination_spans(rank)))
        receiving = bridge.isend_backward(part(g[contribution(bridge.dst, rank)], back.source_spans(rank)))
    if bridge.is_source:
        grad = bridge.irecv_backward().result()
        assert grad.shape == mine.shape
        assert torch.equal(grad, part(sum(g), back.destination_spans(rank)))
    for handle in (sending, receiving):
        if handle is not None:
            handle.wait()
            handle.wait()


# name -> (source grid, destination grid, keywords of the bridge)
CASES = {
    "dp2 to dp1": (grid(dp=2), grid(2, dp=1), {}),
    "dp1 to dp2": (grid(dp=1), grid(1, dp=2), {}),
    "dp3 to dp2": (grid(dp=3), grid(3, dp=2), {}),
    "tp2 to tp3": (grid(tp=2), grid(2, tp=3), {}),
    "cp2 to tp2": (grid(cp=2), grid(2, tp=2), {}),
    "cp2 zigzag to sequence-parallel tp2": (
        grid(cp=2),
        grid(2, tp=2),
        {"src_placements": {"cp": Shard("s", order="zigzag")}, "dest_placements": {"tp": Shard("s")}},
    ),
    "partial gradients of cp": (grid(tp=2), grid(2, tp=1, cp=2), {"dest_placements": {"cp": Partial()}}),
    "partial activations": (grid(tp=2), grid(2, dp=2), {"src_placements": {"tp": Partial()}}),
    "partial cp beside tp copies": (grid(dp=2), grid(2, tp=2, cp=2), {"dest_placements": {"cp": Partial()}}),
    "ep as replicas": (grid(ep=2, dp=2), grid(4, tp=2), {"src_placements": {"ep": Shard("b")}}),
    "ep holds copies": (grid(ep=2), grid(2, dp=2), {"src_placements": {"ep": Replicate()}}),
    "pipelined sides": (grid(tp=2, pp=2), grid(4, tp=1, dp=2, pp=2), {}),
    "equal": (grid(tp=2, dp=2), grid(tp=2, dp=2), {}),
    "equal ranks, other layout": (grid(tp=2, dp=2), grid(dp=4), {}),
    "overlapping": (grid(tp=2, dp=2), grid(2, tp=4), {}),
    "nested": (grid(dp=4), grid(1, tp=2), {}),
    "same ranks, transposed": (grid(tp=2, dp=2), grid(dp=2, tp=2), {}),
}


def end(of):
    return of.rank_offset + math.prod(of.shape)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ranks(max(end(src), end(dst)), fake_nccl="streams" if both else None))
        for name, (src, dst, _) in CASES.items()
        for both in [end(src) > dst.rank_offset]  # ranks on both sides all send first
    ],
)
def test_activations_and_gradients_arrive_bit_for_bit(name):
    src, dst, keywords = CASES[name]
    rank = torch.distributed.get_rank()
    for strategy in ("direct", "leader", "auto"):
        bridge = BridgeCommunicator(
            src, dst, strategy=strategy, leader_below=600, config=CONFIG, label=strategy, **keywords
        )
        plan = plan_reshard(bridge.src, bridge.dst, Sizes((12, 4, 6), axes=bridge.axes))
        for microbatch in range(3):
            if bridge.is_source or bridge.is_destination:
                round_trip(bridge, plan, seed=10 * microbatch)
            elif rank < end(src):
                assert bridge.send_forward_recv_backward(torch.zeros(1)) is None
            else:
                assert bridge.send_backward_recv_forward(torch.zeros(1)) is None
        bridge.destroy()
        bridge.destroy()


@pytest.mark.parametrize("strategy", ["direct", "leader", "auto"])
@pytest.mark.ranks(5)
def test_sizes_may_change_and_lanes_may_be_uneven_or_empty(strategy):
    bridge = whole_world(grid(dp=3), grid(3, tp=2), shapes="variable", strategy=strategy, leader_below=100)
    for lanes, s in (((2, 1, 3), 4), ((0, 5, 1), 2), ((0, 0, 0), 3), ((1, 1, 1), 6)):
        plan = plan_reshard(bridge.src, bridge.dst, Sizes((sum(lanes), s, 4), axes=bridge.axes, src_lanes=lanes))
        round_trip(bridge, plan, seed=sum(lanes) + s)
    bridge.destroy()


@pytest.mark.parametrize("shapes", ["fixed", "variable"])
@pytest.mark.ranks(3)
def test_a_leader_that_is_the_source_itself_passes_the_sizes_on(shapes):
    bridge = whole_world(grid(dp=1), grid(tp=3), shapes=shapes, strategy="leader")
    plan = plan_reshard(bridge.src, bridge.dst, Sizes((2, 4, 6), axes=bridge.axes))
    for microbatch in range(2):
        round_trip(bridge, plan, seed=microbatch)
    bridge.destroy()


@pytest.mark.ranks(4)
def test_packed_samples_are_cut_between_samples_and_inside_by_cp():
    bridge = whole_world(grid(dp=2), grid(2, cp=2), shapes="variable", tensor_ndim=2)
    out = whole_world(grid(dp=1), grid(1, dp=3), shapes="variable", tensor_ndim=2, label="out")
    for lanes in (((4, 2), (6,)), ((), (2, 8, 4)), ((3, 5), (7, 1))):
        flat = [rows for lane in lanes for rows in lane]
        sizes = Sizes((sum(flat), 5), axes=bridge.axes, src_lanes=[len(lane) for lane in lanes], samples=flat)
        round_trip(bridge, plan_reshard(bridge.src, bridge.dst, sizes), seed=sum(flat), samples=lanes)
        sizes = Sizes((sum(flat), 5), axes=bridge.axes, samples=flat)
        round_trip(out, plan_reshard(out.src, out.dst, sizes), seed=sum(flat), samples=[flat])
    bridge.destroy()
    out.destroy()


@pytest.mark.ranks(4)
def test_declared_lanes_share_in_proportion():
    bridge = whole_world(grid(dp=2), grid(2, dp=2), src_lanes=(3, 1), dest_lanes=(2, 2))
    plan = plan_reshard(bridge.src, bridge.dst, Sizes((8, 2, 3), axes=bridge.axes, src_lanes=(6, 2), dst_lanes=(4, 4)))
    round_trip(bridge, plan, seed=1)
    bridge.destroy()


@pytest.mark.ranks(6)
def test_lanes_have_the_samples_that_lane_samples_says():
    src, dst = grid(dp=2), grid(2, dp=4)
    rank, mine = torch.distributed.get_rank(), {}
    bridge = whole_world(src, dst)
    if bridge.is_source:  # of 10 samples lane 1 has 3 to 6, and so from both source replicas
        with pytest.raises(BridgeError, match=r"a batch of 10.*\(3, 3, 2, 2\).*src_lanes=\(5, 5\) and dest_lanes"):
            bridge.send_forward(torch.zeros(5, 1, 1))
    bridge.destroy()
    bridge = whole_world(grid(dp=2), grid(2, dp=3), label="unequal")
    if bridge.is_source:  # 2 samples and 1: each rank takes the other's to be like its own
        bridge.send_forward(torch.zeros(2 - rank, 1, 1))
    if rank == 3:  # the one that hears of both
        with pytest.raises(BridgeError, match=r"a batch of 3.*\(1, 1, 1\).*src_lanes=\(2, 1\) and dest_lanes"):
            bridge.recv_forward()
    elif bridge.is_destination:
        bridge.recv_forward()
    bridge.destroy()
    for batch, lanes in ((10, {"src_lanes": (5, 5), "dest_lanes": (3, 3, 2, 2)}), (5, {"src_lanes": (3, 2)}), (8, {})):
        bridge = whole_world(src, dst, label=str(batch), **lanes)
        x = torch.arange(batch).float().view(-1, 1, 1)
        if bridge.is_source:
            bridge.send_forward(x[list(replica_samples(batch, HyperCommGrid([2], ["dp"], world_size=6)))])
        if bridge.is_destination:
            mine = replica_samples(batch, HyperCommGrid([4], ["dp"], 2, world_size=6))
            assert torch.equal(bridge.recv_forward(), x[list(mine)]), (rank, batch)
        bridge.destroy()


@pytest.mark.ranks(2, fake_nccl="streams")  # both send first: each is on both sides
def test_a_declared_shape_is_checked_on_the_sender():
    bridge = whole_world(grid(cp=2), grid(dp=2), shape=(None, 16, 4), shapes="variable", label="whole")
    bridge.isend_forward(torch.zeros(2, 8, 4))
    bridge.recv_forward()
    with pytest.raises(ShapeError, match=r"shape \(2, 9, 4\), which is 18 on axis 1 over .*declares \(None, 16, 4\)"):
        bridge.isend_forward(torch.zeros(2, 9, 4))
    with pytest.raises(ShapeError, match=r"32 on axis 1"):
        bridge.isend_forward(torch.zeros(2, 16, 4))
    bridge.destroy()
    bridge = whole_world(grid(dp=2), grid(dp=2), shape=(4, 16, 4), label="batch")
    with pytest.raises(ShapeError, match=r"shape \(3, 16, 4\), which is 6 on axis 0"):
        bridge.isend_forward(torch.zeros(3, 16, 4))
    bridge.destroy()
    with pytest.raises(ShapeError, match=r"declares shape \(16, 4\), but tensor_ndim=3"):
        whole_world(grid(dp=2), grid(dp=2), shape=(16, 4), label="axes")


@pytest.mark.ranks(3)
def test_fixed_shapes_can_be_renewed():
    bridge = whole_world(grid(dp=2), grid(2, dp=1))
    for batch, dtype in ((2, torch.float32), (3, torch.float64)):
        for _ in range(2):
            plan = plan_reshard(bridge.src, bridge.dst, Sizes((2 * batch, 4, 2), axes=bridge.axes))
            round_trip(bridge, plan, seed=batch, dtype=dtype)
        bridge.renew_shapes()
    bridge.destroy()


@pytest.mark.ranks(3)
def test_the_wire_may_be_narrower_than_the_tensor():
    bridge = whole_world(grid(dp=1), grid(1, tp=2), comm_dtype=torch.bfloat16)
    sent = torch.full((2, 2, 2), 1.0 + 2.0**-12, dtype=torch.float32)
    if bridge.is_source:
        bridge.send_forward(sent)
        assert bridge.recv_backward().dtype is torch.float32
    else:
        got = bridge.recv_forward()
        assert got.dtype is torch.float32
        assert torch.equal(got, torch.ones(2, 2, 2))
        bridge.send_backward(torch.ones(2, 2, 2))
    bridge.destroy()


@pytest.mark.ranks(2)
def test_the_combined_verbs_meet_without_buffers():
    """Both sides send and receive at once: each must post its receive before it waits for its send."""
    bridge = BridgeCommunicator(
        grid(dp=1), grid(1, dp=1), config=P2PConfig(deadline=20.0, open_deadline=20.0, strict=True)
    )
    big = torch.ones(64, 64, 64)
    if bridge.is_source:
        bridge.send_forward(big)
        for step in range(1, 4):
            grad = bridge.send_forward_recv_backward(big * (step + 1))
            assert torch.equal(grad, big * step)
        assert torch.equal(bridge.recv_backward(), big * 4)
    else:
        got = bridge.recv_forward()
        for step in range(1, 4):
            assert torch.equal(got, big * step)
            got = bridge.send_backward_recv_forward(big * step)
        bridge.send_backward(big * 4)
    bridge.destroy()


@pytest.mark.ranks(3)
def test_after_the_first_microbatch_only_payload_travels():
    for strategy, most in (("direct", 2), ("leader", 1), ("auto", 1)):
        bridge = whole_world(grid(dp=1), grid(1, tp=2), strategy=strategy, label=strategy)
        plan = plan_reshard(bridge.src, bridge.dst, Sizes((2, 2, 2), axes=bridge.axes))
        round_trip(bridge, plan, seed=0)
        before = [(lane.stats.headers, lane.stats.messages) for lane in bridge.lanes.values()]
        round_trip(bridge, plan, seed=1)
        after = [(lane.stats.headers, lane.stats.messages) for lane in bridge.lanes.values()]
        assert [headers for headers, _ in after] == [headers for headers, _ in before]
        sent = sum(messages for _, messages in after) - sum(messages for _, messages in before)
        assert sent <= 2 * most  # there and back
        assert sent == 2 * most or not bridge.is_source
        bridge.destroy()


@pytest.mark.ranks(3)
def test_receives_posted_ahead_land_in_order_whoever_is_asked_first():
    for strategy in ("direct", "auto", "leader"):
        bridge = whole_world(grid(dp=1), grid(1, tp=2), strategy=strategy, label=strategy)
        tensors = [torch.full((2, 3, 4), float(k)) for k in range(3)]
        if bridge.is_source:
            for handle in [bridge.isend_forward(t) for t in tensors]:
                handle.wait()
        else:
            handles = [bridge.irecv_forward() for _ in tensors]
            assert torch.equal(handles[2].result(), tensors[2])
            assert handles[0].is_completed() or torch.equal(handles[0].result(), tensors[0])
            assert torch.equal(handles[1].result(), tensors[1])
            assert handles[1].result() is handles[1].result()
            assert handles[1].is_completed()
        bridge.destroy()


@pytest.mark.ranks(2)
def test_with_auto_a_second_receive_is_posted_as_soon_as_the_first_has_landed():
    """Which lanes it uses is known from then on; its own wait may be a compute later."""
    bridge = whole_world(grid(dp=1), grid(1, dp=1), strategy="auto")
    if bridge.is_source:
        for value in range(2):
            bridge.send_forward(torch.full((1, 2, 2), float(value)))
    else:
        lane = bridge.lane(0, 1, "F")
        first, second = bridge.irecv_forward(), bridge.irecv_forward()
        assert lane.received == 1
        first.wait()
        assert lane.received == 2
        assert [one.result()[0, 0, 0].item() for one in (first, second)] == [0.0, 1.0]
    bridge.destroy()


def is_gone(held, bridge):
    """At once; on a device group, where a thread sees that a receive is done, soon."""
    end = time.monotonic() + (5.0 if bridge.lanes.on_device else 0.0)
    while held() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return held() is None


@pytest.mark.ranks(3)
def test_a_tensor_that_was_received_is_freed_when_the_caller_drops_it():
    bridge = whole_world(grid(dp=1), grid(1, tp=2))
    gc.collect()
    gc.disable()  # on a GPU, memory would grow until the next collection
    try:
        for value in range(3):
            if bridge.is_source:
                bridge.send_forward(torch.full((1, 2, 2), float(value)))
            else:
                tensor = bridge.recv_forward()
                held = weakref.ref(tensor)
                assert tensor.sum().item() == 4.0 * value
                del tensor
                assert is_gone(held, bridge)
    finally:
        gc.enable()
    bridge.destroy()


@pytest.mark.ranks(2, fake_nccl="streams")  # receives in another order than sends
def test_bridges_between_the_same_ranks_do_not_block_each_other():
    first = whole_world(grid(dp=1), grid(1, dp=1), label="first")
    second = whole_world(grid(dp=1), grid(1, dp=1), label="second")
    if first.is_source:
        handle = first.isend_forward(torch.zeros(1, 1, 1))
        second.send_forward(torch.ones(1, 1, 1))
        handle.wait()
    else:
        assert second.recv_forward().item() == 1.0
        assert first.recv_forward().item() == 0.0
    first.destroy()
    second.destroy()


@pytest.mark.ranks(2)
def test_an_edge_without_backward_carries_no_gradient():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), backward=False)
    if bridge.is_source:
        with pytest.raises(BridgeError, match="requires grad; detach it"):
            bridge.send_forward(torch.ones(1, 1, 1, requires_grad=True))
        with pytest.raises(BridgeError, match="no recv_backward"):
            bridge.recv_backward()
        bridge.send_forward(torch.ones(1, 1, 1))
    else:
        assert not bridge.recv_forward().requires_grad
        with pytest.raises(BridgeError, match="no send_backward"):
            bridge.send_backward(torch.ones(1, 1, 1))
    bridge.destroy()


@pytest.mark.ranks(2)
def test_forward_only_steps_leave_no_gradient_to_wait_for():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), shapes="variable")
    for rows, train in ((2, False), (3, True), (1, False), (5, True)):
        with torch.set_grad_enabled(train):
            if bridge.is_source:
                bridge.send_forward(torch.ones(rows, 1, 1))
                if train:
                    assert bridge.recv_backward().shape == (rows, 1, 1)
            else:
                got = bridge.recv_forward()
                if train:
                    bridge.send_backward(got.detach())
    bridge.destroy()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_refused_leaves_its_activation_waiting():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), shapes="variable")
    if bridge.is_source:
        for rows in (2, 3):
            bridge.send_forward(torch.ones(rows, 1, 1))
        assert [bridge.recv_backward().shape[0] for _ in range(2)] == [2, 3]
    else:
        first, second = bridge.recv_forward(), bridge.recv_forward()
        with pytest.raises(ShapeError, match="the gradient is .*, its activation was of shape"):
            bridge.send_backward(second.detach())
        for got in (first, second):
            bridge.send_backward(got.detach())
    bridge.destroy()


@pytest.mark.ranks(2)
def test_where_shapes_are_fixed_a_later_gradient_has_that_of_its_activation():
    bridge = whole_world(grid(dp=1), grid(1, dp=1))
    for number in range(3):
        if bridge.is_source:
            bridge.send_forward(torch.ones(2, 1, 1))
            assert bridge.recv_backward().shape == (2, 1, 1)
        else:
            got = bridge.recv_forward()
            if number:
                with pytest.raises(ShapeError, match="the gradient is .*, its activation was of shape"):
                    bridge.send_backward(torch.ones(3, 1, 1))
            bridge.send_backward(got.detach())
    bridge.destroy()


@pytest.mark.ranks(2)
def test_an_activation_that_a_lane_refuses_waits_for_no_gradient():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), shapes="variable")
    if bridge.is_source:
        with pytest.raises(P2PUsageError):
            bridge.send_forward(torch.ones(5, 1, 1, device="meta"))
        bridge.send_forward(torch.ones(2, 1, 1))
        assert bridge.recv_backward().shape == (2, 1, 1)
    else:
        bridge.send_backward(bridge.recv_forward().detach())
    bridge.destroy()


@pytest.mark.ranks(3)
def test_what_an_edge_without_backward_refuses_to_exchange_is_not_taken_for_sent():
    # "auto" leaves lanes out from the second message on: a first one that was never sent must not count.
    bridge = whole_world(grid(dp=1), grid(1, tp=2), backward=False, strategy="auto")
    if bridge.is_source:
        with pytest.raises(BridgeError, match="no send_forward_recv_backward"):
            bridge.send_forward_recv_backward(torch.ones(1, 1, 1))
        bridge.send_forward(torch.full((1, 1, 1), 7.0))
    else:
        assert bridge.recv_forward().item() == 7.0
    bridge.destroy()


@pytest.mark.ranks(2)
def test_a_bridge_keeps_no_activation_that_nobody_else_keeps():
    bridge = whole_world(grid(dp=1), grid(1, dp=1))
    if bridge.is_source:
        for _ in range(2):
            bridge.send_forward(torch.ones(4, 4, 4))
    else:
        for _ in range(2):  # the first one as well, whose shape was agreed
            received = weakref.ref(bridge.recv_forward())
            gc.collect()
            assert is_gone(received, bridge)
    bridge.destroy()


@pytest.mark.ranks(3, fake_nccl="streams")  # a barrier comes between a send and its receive
def test_a_copy_that_has_yet_to_be_told_of_the_sizes_can_be_asked_without_waiting():
    bridge = whole_world(grid(dp=1), grid(1, tp=2), strategy="leader")
    sending = bridge.isend_forward(torch.full((2, 1, 1), 3.0)) if bridge.is_source else None
    receive = bridge.irecv_forward() if bridge.is_destination else None
    if receive is not None:
        assert not receive.is_completed()  # neither copy may start to tell, or to listen, in a question
    dist.barrier()
    if receive is not None:
        assert receive.result().tolist() == [[[3.0]], [[3.0]]]
        assert receive.is_completed()
    if sending is not None:
        sending.wait()
    bridge.destroy()


@pytest.mark.ranks(2)
def test_packed_samples_of_a_fixed_shape_are_sent_again_and_again():
    bridge = BridgeCommunicator(grid(dp=1), grid(1, dp=1), tensor_ndim=2, config=CONFIG)
    rows = torch.arange(12.0).view(4, 3)
    for _ in range(3):
        if bridge.is_source:
            bridge.send_forward(Packed(rows, (1, 3)))
            assert torch.equal(bridge.recv_backward(), 2 * rows)
        else:
            bridge.send_backward(2 * bridge.recv_forward().detach())
    bridge.destroy()


def marked(rows, samples):
    """A tensor that says the rows of its samples as Megatron's multimodal models do."""
    rows._mimo_bridge_split_sizes = samples
    return rows


@pytest.mark.ranks(4)
def test_the_mark_of_megatrons_models_cuts_as_samples_do():
    bridge = whole_world(grid(dp=1), grid(1, dp=3), shapes="variable", tensor_ndim=2)
    lanes, random = HyperCommGrid([3], ["dp"], 1), torch.Generator().manual_seed(5)
    for _ in range(12):
        samples = torch.randint(0, 4, (int(torch.randint(3, 9, (), generator=random)),), generator=random).tolist()
        rows = torch.arange(2.0 * sum(samples)).view(-1, 2)
        if bridge.is_source:
            bridge.send_forward(marked(rows, samples))
            bridge.send_forward(marked(rows.clone().requires_grad_(), samples), samples=[1] * len(rows))  # they count
            assert torch.equal(bridge.recv_backward(), rows + 1)
            bridge.recv_backward()
        else:
            own = replica_samples(len(samples), lanes)
            start, stop = sum(samples[: own.start]), sum(samples[: own.stop])
            assert torch.equal(bridge.recv_forward(), rows[start:stop])
            assert len(bridge.recv_forward()) == len(replica_samples(len(rows), lanes))
            bridge.send_backward(rows[start:stop] + 1)
            bridge.send_backward(None)
    if bridge.is_source:
        with pytest.raises(ShapeError, match=r"packed in samples of \(1, 1\).* is no part, which is \(2, 2\)"):
            bridge.send_forward(marked(torch.zeros(4, 2), [1, 1]))
        with pytest.raises(ShapeError, match=r"the attribute _mimo_bridge_split_sizes\[1\] is -1"):
            bridge.send_forward(marked(torch.zeros(4, 2), [5, -1]))
    bridge.destroy()


@pytest.mark.ranks(3)
def test_a_marked_tensor_after_plain_ones_of_a_fixed_shape_is_one_line():
    bridge = BridgeCommunicator(grid(dp=1), grid(1, dp=2), tensor_ndim=2, config=CONFIG)
    for _ in range(2):  # the second goes the short way
        if bridge.is_source:
            bridge.send_forward(torch.zeros(4, 1))
        else:
            assert len(bridge.recv_forward()) == 2
    if bridge.is_source:
        with pytest.raises(
            ShapeError, match=r"packed in samples of \(1, 3\).*, but shape \(4, 1\) of float32 was agreed"
        ):
            bridge.send_forward(marked(torch.zeros(4, 1), [1, 3]))
    bridge.destroy()
