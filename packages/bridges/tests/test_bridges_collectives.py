"""The collectives of a bridge on real ranks: completions of copies and sums of partial sums, and what ends them."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from pipegrid.bridges import Axes, BridgeCommunicator, MultiModulePipelineCommunicator
from pipegrid.reshard import Partial
from pipegrid.reshard.errors import ShapeError
from pipegrid.transport import CollectiveFailedError
from pipegrid.transport.config import P2PConfig
from reshard_kit.grids import grid

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)


@pytest.mark.ranks(3, deadline=40)
def test_a_completion_ends_at_the_deadline_and_names_the_ranks(ranks):
    """The deadline is that of the messages and their completion together: a message that came late leaves the rest."""
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=P2PConfig(deadline=2.0, open_deadline=20.0))
    if ranks.rank == 0:
        ranks.store.wait(["waiting"])
        time.sleep(1.0)
        bridge.isend_forward(torch.zeros(2, 2, 2))
    elif ranks.rank == 1:
        receive = bridge.irecv_forward()
        ranks.store.set("waiting", "yes")
        late = r"^rank 1, bridge src>dest: the copies on ranks \[2\] .* not within 1 s"
        try:
            with pytest.raises(CollectiveFailedError, match=late):
                receive.wait()
        finally:
            ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()


@pytest.mark.ranks(3, deadline=40)
def test_an_abort_ends_a_completion_with_its_reason(ranks):
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=CONFIG)
    if ranks.rank == 0:
        bridge.isend_forward(torch.zeros(2, 2, 2))
    elif ranks.rank == 1:
        receive = bridge.irecv_forward()
        threading.Timer(0.3, bridge.abort, ["rank 2 raised ValueError"]).start()
        with pytest.raises(CollectiveFailedError, match=r"ranks \[2\] .* ended here: rank 2 raised ValueError"):
            receive.wait()
        ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()


@pytest.mark.ranks(2)
def test_a_completion_that_fails_on_a_device_behind_its_wait_fails_the_check(ranks):
    grids = {"src": grid(dp=1), "dest": grid(1)}
    bridge = BridgeCommunicator(*grids.values(), config=CONFIG)
    multi = MultiModulePipelineCommunicator(grids, {"src": ["dest"]}, CONFIG)
    for communicator, exchange in ((bridge, bridge.exchange), (multi, multi.edge_exchanges[0])):
        communicator.check()
        exchange.traffic.waits.lost = [0, 1], RuntimeError("connection lost")
        with pytest.raises(CollectiveFailedError, match="connection lost"):
            communicator.check()
        communicator.destroy()


@pytest.mark.ranks(3, deadline=40)
def test_an_abort_ends_a_sum_with_its_reason(ranks):
    bridge = BridgeCommunicator(grid(cp=2), grid(2), src_placements={"cp": Partial()}, config=CONFIG)
    if ranks.rank == 2:  # the first message compares shapes; the sum of the second is not joined
        bridge.recv_forward()
    else:
        bridge.send_forward(torch.zeros(2, 2, 2))
    if ranks.rank == 0:
        threading.Timer(0.3, bridge.abort, ["rank 1 raised ValueError"]).start()
        late = r"partial sums of ranks \[1\] .* not added up: .* ended here: rank 1 raised ValueError"
        with pytest.raises(CollectiveFailedError, match=late):
            bridge.isend_forward(torch.zeros(2, 2, 2))
        ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()


@pytest.mark.parametrize("shapes", ["fixed", "variable"])
@pytest.mark.parametrize("payload", [None, {"x": Axes("s", "b", "h")}], ids=["tensor", "payload"])
@pytest.mark.ranks(3)
def test_partial_sums_of_unlike_tensors_are_an_error_before_they_meet(ranks, payload, shapes):
    bridge = BridgeCommunicator(
        grid(cp=2), grid(2), src_placements={"cp": Partial()}, shapes=shapes, payload=payload, config=CONFIG
    )
    wrapped = (lambda tensor: tensor) if payload is None else (lambda tensor: {"x": tensor})
    if ranks.rank < 2:
        own, other = ranks.rank, 1 - ranks.rank
        dtype = (torch.float32, torch.float64)[own]
        for tensor in (torch.zeros(2, 2 + own, 2), torch.zeros(2, 2, 2, dtype=dtype)):
            shape = re.escape(str(tuple(tensor.shape)))
            with pytest.raises(ShapeError, match=rf"rank {own} sends .*{shape}.*, and ranks \[{other}\] send another"):
                bridge.isend_forward(wrapped(tensor))
        for _ in range(2):
            bridge.send_forward(wrapped(torch.ones(2, 2, 2)))
    else:
        for _ in range(2):
            received = bridge.recv_forward()
            assert torch.equal(received if payload is None else received["x"], torch.full((2, 2, 2), 2.0))
    bridge.destroy()


DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


def of_any_bytes(shape, dtype):
    """A tensor of random bytes."""
    size = torch.empty(shape, dtype=dtype).nbytes
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return data.view(dtype).view(shape)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.ranks(5)
def test_copies_complete_in_any_dtype(ranks, copies):
    """From two source replicas to two or three copies: boxes of unequal sizes, bit for bit."""
    bridge = BridgeCommunicator(
        grid(dp=2),
        grid(2, tp=copies),
        payload={"x": Axes("b", "h", gradient=False)},
        backward=False,
        shapes="variable",
        config=CONFIG,
    )
    for dtype in DTYPES:
        whole = of_any_bytes((6, 3), dtype)
        if ranks.rank < 2:
            bridge.isend_forward({"x": whole[3 * ranks.rank :][:3].to(ranks.device)}).wait()
        elif ranks.rank < 2 + copies:
            received = bridge.irecv_forward().result()["x"]
            assert received.dtype is dtype
            assert torch.equal(as_bytes(received.cpu()), as_bytes(whole)), dtype
    bridge.destroy()


@pytest.mark.ranks(3)
def test_partial_sums_of_a_dtype_that_is_not_added_up_are_an_error_by_name(ranks):
    bridge = BridgeCommunicator(grid(cp=2), grid(2), src_placements={"cp": Partial()}, config=CONFIG)
    if ranks.rank < 2:
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
            with pytest.raises(ShapeError, match=f"src>dest: partial sums of {dtype} are not added up by backends"):
                bridge.isend_forward(torch.zeros(2, 2, 2).to(dtype))
        bridge.send_forward(torch.ones(2, 2, 2))
    else:
        assert torch.equal(bridge.recv_forward().cpu(), torch.full((2, 2, 2), 2.0))
    bridge.destroy()


@pytest.mark.ranks(3, backend="gloo")  # whose completions start by themselves; else the plan's thread starts them
def test_copies_complete_though_one_is_slow_to_ask(ranks):
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=CONFIG)
    whole = torch.arange(8.0).view(2, 2, 2)
    if ranks.rank == 0:
        bridge.send_forward(whole)
    else:
        receive = bridge.irecv_forward()
        if ranks.rank == 1:
            ranks.store.wait(["rank 2 has it"])
        assert torch.equal(receive.result(), whole)
        ranks.store.set("rank 2 has it", "yes")
    bridge.destroy()
