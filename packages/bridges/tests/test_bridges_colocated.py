"""ColocatedBridgeCommunicator on real ranks, against slices of one tensor in one process."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges.colocated import (
    BridgeDirection,
    ColocatedBridgeCommunicator,
    SliceInfo,
    _all_gather_along_batch_dim,
)
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.transport import CollectiveFailedError, P2PLaneDeadError
from reshard_kit.grids import coords_of, grid, share


def holds(of, rank):
    """Whether the rank is on the first stage of the grid."""
    return coords_of(of, rank).get("pp", 0) == 0


CASES = {
    "fan-in tp2 dp4 to tp4 dp2": (grid(tp=2, dp=4), grid(tp=4, dp=2)),
    "fan-out tp4 dp2 to tp2 dp4": (grid(tp=4, dp=2), grid(tp=2, dp=4)),
    "fan-in tp1 dp4 to tp4 dp1": (grid(dp=4), grid(tp=4)),
    "fan-out tp4 to dp4": (grid(tp=4), grid(dp=4)),
    "equal": (grid(tp=2, dp=2), grid(tp=2, dp=2)),
    "dp3 to dp2": (grid(tp=2, dp=3), grid(tp=3, dp=2)),
    "dp2 to dp3": (grid(tp=3, dp=2), grid(tp=2, dp=3)),
    "cp on the source": (grid(cp=2, dp=2), grid(tp=2, dp=2)),
    "cp on the destination": (grid(tp=2, dp=2), grid(cp=2, dp=2)),
    "pipelined destination": (grid(tp=1, dp=4), grid(tp=1, pp=2, dp=2)),
    "pipelined destination of the same dp": (grid(tp=2, dp=2), grid(pp=2, dp=2)),
    "transposed ranks": (grid(tp=2, dp=2), grid(dp=2, tp=2)),
    "fan-in of transposed ranks": (grid(tp=2, dp=4), grid(dp=2, tp=4)),
}


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.ranks(math.prod(src.shape))) for name, (src, _) in CASES.items()]
)
def test_forward_and_backward_are_slices_of_the_whole(case):
    src, dst = CASES[case]
    rank = dist.get_rank()
    for mapping, shape, axis, seq in (
        ({"b": 0, "s": 1, "h": 2}, (12, 4, 2), 0, 1),
        ({"s": 0, "b": 1, "h": 2}, (4, 12, 2), 1, 0),
        ({"b": 0, "h": 1}, (24, 3), 0, 1),
    ):
        if len(shape) == 2 and "cp" in (*src.dim_names, *dst.dim_names):
            continue
        bridge = ColocatedBridgeCommunicator(src, dst, dim_mapping=mapping, check_replicated="cp" not in src.dim_names)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        mine = share(x, src, rank, batch=axis, sequence=seq).clone().requires_grad_()
        for _ in range(2):
            mine.grad = None
            y = bridge.communicate(mine)
            if holds(dst, rank):
                assert torch.equal(y, share(x, dst, rank, batch=axis, sequence=seq))
                y.backward(share(g, dst, rank, batch=axis, sequence=seq))
            else:
                assert y.numel() == 0
                y.sum().backward()
            assert torch.equal(mine.grad, share(g, src, rank, batch=axis, sequence=seq))
        bridge.destroy()
        bridge.destroy()
        with pytest.raises(P2PLaneDeadError, match="was destroyed"):
            bridge.communicate(mine)


@pytest.mark.ranks(8)
def test_gather_groups_stand_in_slot_order():
    fan_in = ColocatedBridgeCommunicator(grid(tp=2, dp=4), grid(tp=4, dp=2))
    assert fan_in.gather_group_ranks == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert fan_in.direction is BridgeDirection.FAN_IN
    assert fan_in.direction == "fan_in"
    assert (fan_in.scale, fan_in.is_fan_in(), fan_in.is_fan_out()) == (2, True, False)
    rank = dist.get_rank()
    assert rank in dist.get_process_group_ranks(fan_in.gather_pg)
    assert fan_in.get_slice_info(8) == SliceInfo(start=4 * (rank // 2 % 2), size=4)
    fan_out = ColocatedBridgeCommunicator(grid(tp=4, dp=2), grid(tp=2, dp=4))
    assert fan_out.gather_group_ranks == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert fan_out.get_slice_info(6) == SliceInfo(start=3 * (rank // 2 % 2), size=3)
    equal = ColocatedBridgeCommunicator(grid(tp=4, dp=2), grid(tp=4, dp=2))
    assert (equal.direction, equal.scale, equal.gather_pg, equal.gather_group_ranks) == ("equal", 1, None, [])
    assert equal.get_slice_info(5) == SliceInfo(start=0, size=5)
    x = torch.randn(2, 2)
    assert equal.communicate(x) is x
    for bridge in (fan_in, fan_out, equal):
        bridge.destroy()
        assert bridge.gather_pg is None


def test_gather_groups_keep_the_order_of_lanes_even_where_ranks_descend():
    descending = {7 - rank: (rank // 2, rank % 2) for rank in range(8)}
    assert ColocatedBridgeCommunicator._build_gather_groups(2, 2, 2, descending) == [[7, 5], [6, 4], [3, 1], [2, 0]]


@pytest.mark.ranks(4)
def test_batches_that_do_not_divide():
    fan_out = ColocatedBridgeCommunicator(grid(tp=2, dp=2), grid(dp=4))
    with pytest.raises(BridgeError, match="batch of 3 is not divisible by scale 2"):
        fan_out.get_slice_info(3)
    with pytest.raises(ValueError, match="not divisible by scale 2"):
        fan_out.communicate(torch.ones(3, 1, 1))
    fan_in = ColocatedBridgeCommunicator(grid(dp=4), grid(tp=2, dp=2))
    x = torch.ones(3, 1, 1, requires_grad=True)
    assert fan_in.communicate(x).add_(1).shape == (6, 1, 1)  # no view, so that a module may work in place
    with pytest.raises(ShapeError, match="carries one tensor with batch axis 1, got"):
        ColocatedBridgeCommunicator(grid(dp=4), grid(dp=4), dim_mapping={"b": 1}).communicate(torch.ones(3))
    fan_in.destroy()
    fan_out.destroy()


@pytest.mark.ranks(2)
def test_samples_that_equal_slices_would_cut_in_two_are_refused(ranks):
    bridge = ColocatedBridgeCommunicator(grid(tp=2), grid(dp=2), dim_mapping={"b": 0, "h": 1})
    rows = torch.arange(6.0).view(6, 1)
    for samples, cut in (((1, 5), True), ((2, 2, 2), True), ((1, 2, 2, 1), False), ((3, 3), False), ((), False)):
        rows._mimo_bridge_split_sizes = samples
        if cut:
            with pytest.raises(
                ShapeError, match="equal slices, which cut inside of samples; pad the samples, or use a"
            ):
                bridge.communicate(rows)
        else:
            assert torch.equal(bridge.communicate(rows), rows[3 * ranks.rank :][:3])
    bridge.destroy()


@pytest.mark.ranks(6)
def test_a_ratio_that_is_no_integer_has_no_slices_but_works():
    bridge = ColocatedBridgeCommunicator(grid(tp=2, dp=3), grid(tp=3, dp=2))
    assert (bridge.scale, bridge.direction) == (None, BridgeDirection.FAN_IN)
    with pytest.raises(BridgeError, match=r"dp 3.*dp 2.*communicate\(\) works all the same"):
        bridge.get_slice_info(6)
    bridge.destroy()


@pytest.mark.ranks(4)
def test_copies_that_differ_are_found_when_asked_for():
    src, dst = grid(tp=2, dp=2), grid(tp=4)
    rank = dist.get_rank()
    checked = ColocatedBridgeCommunicator(src, dst, "enc", check_replicated=True, check_every=2)
    good = torch.full((2, 2, 2), float(rank // 2))
    assert checked.communicate(good).shape == (4, 2, 2)
    bad = good + (1e-7 if rank == 3 else 0.0)
    assert checked.communicate(bad).shape == (4, 2, 2)  # not looked at this time
    with pytest.raises(BridgeError, match=r"copies of source replica 1 of 'enc' \(ranks \[2, 3\]\)"):
        checked.communicate(bad)  # on every rank, or the others would wait
    checked.destroy()


@pytest.mark.ranks(2)
def test_lanes_of_different_sizes_are_found_when_asked_for():
    checked = ColocatedBridgeCommunicator(grid(dp=2), grid(tp=2), check_replicated=True)
    with pytest.raises(BridgeError, match="hold between 2 and 3 rows"):
        checked.communicate(torch.ones(2 + dist.get_rank(), 1, 1))
    checked.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pair", [(grid(dp=2), grid(tp=2)), (grid(tp=2), grid(dp=2)), (grid(cp=2), grid(tp=2))])
def test_tensors_that_differ_between_ranks_are_named_on_all_of_them(pair):
    """Over gloo another size would end the process, and the same size in another shape arrives as something else."""
    rank, bridge = dist.get_rank(), ColocatedBridgeCommunicator(*pair, deadline=20.0)
    shapes = [(2, 2, 4), (2, 4, 2)], [(2, 4, 2), (4, 2, 2)], [(2, 2, 4), (4, 4)], [(2, 2, 4), (4, 2, 4)]
    for ours, theirs in [*shapes, *[both[::-1] for both in shapes]]:
        given, other = (ours, theirs) if rank == 0 else (theirs, ours)
        with pytest.raises(ShapeError, match="ranks? .*: shape .*; ranks? .*: shape") as failure:
            bridge.communicate(torch.ones(given))
        assert str(given) in str(failure.value)
        assert str(other) in str(failure.value)
    with pytest.raises(ShapeError, match=r"of torch\.bfloat16.* of torch\.float32|float32.*bfloat16"):
        bridge.communicate(torch.ones(2, 2, 2, dtype=(torch.float32, torch.bfloat16)[rank]))
    for rows in (2, 4):  # a shape that all ranks have is free to change
        bridge.communicate(torch.ones(rows, 2, 2, requires_grad=True)).sum().backward()
    bridge.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pair", [(grid(dp=2), grid(tp=2)), (grid(tp=2), grid(dp=2)), (grid(cp=2), grid(tp=2))])
def test_gradients_need_the_communicator_and_have_no_gradients_of_their_own(pair):
    bridge = ColocatedBridgeCommunicator(*pair)
    x = torch.ones(2, 2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((bridge.communicate(x) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    y = bridge.communicate(x)
    bridge.destroy()
    with pytest.raises(P2PLaneDeadError, match="destroy it after the last backward"):
        y.sum().backward()


@pytest.mark.ranks(4, deadline=60)
@pytest.mark.fault("kill", rank=3, at="the second look")
def test_a_comparison_of_copies_ends_when_a_rank_dies_in_it(ranks):
    checked = ColocatedBridgeCommunicator(
        grid(tp=2, dp=2), grid(tp=4), check_replicated=True, check_every=1, deadline=5.0
    )
    lane = torch.full((2, 2, 2), float(ranks.rank // 2))
    assert checked.communicate(lane).shape == (4, 2, 2)
    ranks.reach("the second look")
    began = time.monotonic()
    with pytest.raises(
        CollectiveFailedError, match=r"the ranks \[.*3\] did not exchange .*(a rank died|not within 5 s)"
    ):
        checked.communicate(lane)  # rank 2 waits for its copy, ranks 0 and 1 for the verdict
    assert time.monotonic() - began < 12.0


@pytest.mark.ranks(2, deadline=40)
def test_a_comparison_of_copies_has_a_deadline(ranks):
    checked = ColocatedBridgeCommunicator(grid(tp=2), grid(tp=2), check_replicated=True, deadline=1.0)
    if ranks.rank == 0:
        with pytest.raises(
            CollectiveFailedError, match=r"^rank 0, colocated/src>dest: the ranks \[1\] .* not within 1 s"
        ):
            checked.communicate(torch.ones(2, 1, 1))
    ranks.barrier()


@pytest.mark.ranks(2)
def test_gathering_along_any_axis():
    rank = dist.get_rank()
    for axis in range(3):
        got = _all_gather_along_batch_dim(torch.full((2, 2, 2), float(rank)), dist.group.WORLD, axis)
        assert torch.equal(got, torch.cat([torch.zeros(2, 2, 2), torch.ones(2, 2, 2)], dim=axis))


@pytest.mark.ranks(2)
def test_layouts_that_are_refused():
    with pytest.raises(BridgeError, match=r"dims {'ep': 2}.* a BridgeCommunicator takes others"):
        ColocatedBridgeCommunicator(grid(ep=2), grid(dp=2))
    with pytest.raises(BridgeError, match=r"on ranks 0\.\.1, the destination on 0\.\.0"):
        ColocatedBridgeCommunicator(grid(dp=2), grid(dp=1))
    with pytest.raises(BridgeError, match=r"dims {'pp': 2}"):
        ColocatedBridgeCommunicator(grid(pp=2), grid(tp=2))
    with pytest.raises(BridgeError, match="no batch axis"):
        ColocatedBridgeCommunicator(grid(dp=2), grid(dp=2), dim_mapping={"h": 1})


BY_SLICES_OR_BY_PLAN = pytest.mark.parametrize("source", [grid(dp=2), grid(cp=2)], ids=["slices", "plan"])


@BY_SLICES_OR_BY_PLAN
@pytest.mark.ranks(2, deadline=40)
def test_an_exchange_has_a_deadline(ranks, source):
    bridge = ColocatedBridgeCommunicator(source, grid(tp=2), deadline=1.0)
    if ranks.rank == 0:
        start = time.monotonic()
        late = r"^rank 0, colocated/src>dest: the ranks \[1\] .* not within 1 s"
        try:
            with pytest.raises(CollectiveFailedError, match=late):
                bridge.communicate(torch.zeros(2, 4, 3))
            assert time.monotonic() - start < 20.0  # of the group's own 30 minutes
        finally:
            ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()


@BY_SLICES_OR_BY_PLAN
@pytest.mark.ranks(2, deadline=40)
def test_an_abort_ends_an_exchange_with_its_reason(ranks, source):
    bridge = ColocatedBridgeCommunicator(source, grid(tp=2), deadline=10.0)
    if ranks.rank == 0:
        threading.Timer(0.3, bridge.abort, ["rank 1 raised ValueError"]).start()
        try:
            with pytest.raises(CollectiveFailedError, match=r"ranks \[1\] .* ended here: rank 1 raised ValueError"):
                bridge.communicate(torch.zeros(2, 4, 3))
        finally:
            ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()
