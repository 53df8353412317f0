"""The collectives of a bridge on real ranks: completions of copies and sums of partial sums, and what ends them."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from pipegrid.bridges.bridge import Axes, BridgeCommunicator
from pipegrid.bridges.errors import CompletionError, ShapeError
from pipegrid.bridges.reshard import Partial
from pipegrid.transport.config import P2PConfig

from .grids import grid

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
            with pytest.raises(CompletionError, match=late):
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
        with pytest.raises(CompletionError, match=r"ranks \[2\] .* ended here: rank 2 raised ValueError"):
            receive.wait()
        ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    bridge.destroy()


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
        with pytest.raises(CompletionError, match=late):
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
