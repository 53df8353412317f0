"""What a bridge does not send, and what it says: the wrong side, tensors and lanes that do not fit, a deadline."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from pipegrid.bridges import BridgeCommunicator
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.transport import P2PLaneDeadError
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.opening import open_lanes
from pipegrid.transport.errors import P2PTimeoutError
from reshard_kit.grids import grid

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)
whole_world = partial(BridgeCommunicator, config=CONFIG)


@pytest.mark.ranks(2)
def test_lanes_that_are_missing_are_refused_when_they_are_attached():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), open=False)
    there = open_lanes(bridge.lane_specs[:1], config=bridge.lane_config)
    with pytest.raises(BridgeError, match=r"lanes \['1>0\[src>dest/B\]'\] of rank [01] are not among those given"):
        bridge.attach(there)
    there.close()
    bridge.destroy()


@pytest.mark.ranks(3)
def test_the_wrong_side_is_told_who_it_is():
    bridge = whole_world(grid(dp=1), grid(1, dp=1)) if torch.distributed.get_rank() < 2 else None
    if bridge is None:
        outside = whole_world(grid(dp=1), grid(1, dp=1))
        with pytest.raises(BridgeError, match="rank 2 is on neither"):
            outside.send_forward(torch.ones(1, 1, 1))
        return
    if bridge.is_source:
        with pytest.raises(BridgeError, match=r"recv_forward is for the destination side \('dest'.*rank 0 is on"):
            bridge.recv_forward()
        with pytest.raises(ValueError, match="send_backward is for the destination side"):
            bridge.send_backward(torch.ones(1, 1, 1))
    else:
        with pytest.raises(BridgeError, match="send_forward is for the source side"):
            bridge.send_forward(torch.ones(1, 1, 1))
        with pytest.raises(BridgeError, match="recv_backward is for the source side"):
            bridge.recv_backward()
    bridge.destroy()
    with pytest.raises(P2PLaneDeadError, match="make a new one"):
        bridge.recv_forward()


@pytest.mark.ranks(2)
def test_what_cannot_be_sent_is_refused_before_anything_is():
    bridge = whole_world(grid(dp=1), grid(1, dp=1))
    if bridge.is_source:
        with pytest.raises(BridgeError, match="recv_backward on rank 0"):
            bridge.recv_backward()
        with pytest.raises(ShapeError, match="carries one tensor, got NoneType; .* send a tensor without rows"):
            bridge.send_forward(None)
        with pytest.raises(ShapeError, match=r"carries one tensor, got dict; declare several by edges=.*payload="):
            bridge.send_forward({"tokens": torch.ones(2, 2, 2), "mask": torch.ones(2, 2, 2)})
        with pytest.raises(ShapeError, match=r"tensor_ndim=3 axes, got shape \(2, 2\)"):
            bridge.send_forward(torch.ones(2, 2))
        bridge.send_forward(torch.ones(2, 2, 2))
        with pytest.raises(ShapeError, match="was agreed with the first message"):
            bridge.send_forward(torch.ones(1, 2, 2))
        with pytest.raises(
            ShapeError, match=r"shape \(2, 2, 2\) of float16, but shape \(2, 2, 2\) of float32 was agreed"
        ):
            bridge.send_forward(torch.ones(2, 2, 2, dtype=torch.float16))
    else:
        with pytest.raises(BridgeError, match="send_backward on rank 1"):
            bridge.send_backward(torch.ones(2, 2, 2))
        bridge.recv_forward()
        with pytest.raises(ShapeError, match=r"gradient is .* \(1, 2, 2\) of .*, its activation was .* \(2, 2, 2\)"):
            bridge.send_backward(torch.ones(1, 2, 2))
        with pytest.raises(ShapeError, match=r"gradient is .* of torch\.float64"):
            bridge.send_backward(torch.ones(2, 2, 2, dtype=torch.float64))
    bridge.destroy()


@pytest.mark.ranks(2)
def test_a_shape_that_is_known_is_compared_with_the_one_that_is_asked_for():
    bridge = whole_world(grid(dp=1), grid(1, dp=1))
    activation, error = torch.ones(2, 2, 2), r"expects shape \(2, 2, 3\), but \(2, 2, 2\) of torch.float32 comes"
    if bridge.is_source:
        for _ in range(2):
            bridge.send_forward(activation)
        with pytest.raises(ShapeError, match=error):
            bridge.irecv_backward((2, 2, 3)).result()
    else:
        bridge.recv_forward()
        with pytest.raises(ShapeError, match=error):
            bridge.irecv_forward((2, 2, 3)).result()
        bridge.send_backward(activation)
    bridge.destroy()


@pytest.mark.ranks(3)
def test_lanes_that_do_not_fit_together_are_named():
    bridge = whole_world(grid(dp=2), grid(2, dp=1))
    rank = torch.distributed.get_rank()
    if bridge.is_source:
        bridge.isend_forward(torch.ones(1, 2 + rank, 2))
    else:
        with pytest.raises(
            ShapeError,
            match=r"replica 0 .* \(batch, 2, 2\), not packed, and replica 1 .* \(batch, 3, 2\), not packed; replicas",
        ):
            bridge.recv_forward()
    torch.distributed.barrier()
    bridge.destroy()


@pytest.mark.ranks(3)
def test_lanes_of_different_dtypes_are_named():
    bridge = whole_world(grid(dp=2), grid(2, dp=1))
    if bridge.is_source:
        dtype = (torch.float32, torch.float64)[torch.distributed.get_rank()]
        bridge.isend_forward(torch.ones(1, 2, 2, dtype=dtype))
    else:
        with pytest.raises(ShapeError, match=r"send different dtypes: \['float32', 'float64'\]"):
            bridge.recv_forward()
    torch.distributed.barrier()
    bridge.destroy()


@pytest.mark.ranks(2)
def test_whole_numbers_are_not_rounded_to_the_wire():
    bridge = whole_world(grid(dp=1), grid(1, dp=1), comm_dtype=torch.bfloat16, backward=False)
    if bridge.is_source:
        with pytest.raises(ShapeError, match=r"travels as torch\.bfloat16, which rounds torch\.int64 values"):
            bridge.send_forward(torch.full((1, 1, 1), 2**20 + 1))
    bridge.destroy()


@pytest.mark.ranks(1)
def test_settings_that_contradict_each_other():
    for wrong in ("bfloat16", torch.int32):
        with pytest.raises(BridgeError, match=r"comm_dtype is .*; it must be a floating-point torch\.dtype"):
            whole_world(grid(dp=1), grid(1), comm_dtype=wrong)
    with pytest.raises(BridgeError, match=r"src_lanes \(3, 1\) and dest_lanes \(2, 3\) must hold the same batch"):
        whole_world(grid(dp=2), grid(2, dp=2), src_lanes=(3, 1), dest_lanes=(2, 3))
    with pytest.raises(BridgeError, match="each destination replica some of it"):
        whole_world(grid(dp=2), grid(2, dp=2), dest_lanes=(2, 0))
    with pytest.raises(BridgeError, match="shapes is 'sometimes'"):
        whole_world(grid(dp=1), grid(1), shapes="sometimes")


@pytest.mark.ranks(2)
def test_a_receive_that_nobody_answers_ends_at_the_deadline():
    bridge = BridgeCommunicator(grid(dp=1), grid(1, dp=1), config=P2PConfig(deadline=1.0, open_deadline=20.0))
    if bridge.is_destination:
        with pytest.raises(P2PTimeoutError, match="rank 1 waited"):
            bridge.recv_forward()
    torch.distributed.barrier()
    bridge.destroy()
    assert not [thread for thread in threading.enumerate() if thread.name == "pipegrid-progress"]
