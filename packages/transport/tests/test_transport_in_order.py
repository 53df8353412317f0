"""In a plan's step receives start in the order of calls, whether or not their header has come."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import P2PCommunicator, P2PConfig, P2PPeerError, P2PTimeoutError, open_lanes

from .stages import SHAPE, activation, assert_received, gradient
from .two_ranks import BACK, THERE, config

MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)
STREAMS = pytest.mark.ranks(2, backend="fake_nccl")


def launches(ranks, number):
    """The kinds of the last transfers that this rank launched."""
    return [operation.kind for launch in ranks.fake_device.launches[-number:] for operation in launch.operations]


@MODES
@pytest.mark.parametrize("settings", [{}, {"shapes": "header"}], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_a_receive_whose_header_is_late_starts_before_what_is_posted_after_it(ranks, mode, settings, batched):
    with open_lanes([THERE, BACK], config=config(**settings)) as lanes, lanes.in_order():
        if ranks.rank == 0:
            time.sleep(0.3)
            lanes[THERE].isend(torch.ones(3)).synchronize()
            assert lanes[BACK].irecv().result().tolist() == [2, 2]
        else:
            with lanes.batch() if batched else nullcontext():
                received = lanes[THERE].irecv()
                sent = lanes[BACK].isend(torch.full((2,), 2.0))
            assert received.result().tolist() == [1, 1, 1]
            sent.synchronize()
            assert launches(ranks, 2) == ["recv", "send"]
        ranks.barrier()


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="serial")
@pytest.mark.parametrize("settings", [{}, {"batch_p2p_comm": False}], ids=str)
def test_neighbours_that_both_send_first_by_a_fused_verb_get_by_on_one_stream(ranks, settings):
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.float32, **settings))
    me, before, after = ranks.rank, (ranks.rank - 1) % 3, (ranks.rank + 1) % 3
    calls = [partial(communicator.send_forward, activation(me, 0)), partial(communicator.recv_forward, SHAPE)]
    for agree in reversed(calls) if me else calls:  # on shapes, once round the ring
        agree()
    calls = [partial(communicator.send_backward, gradient(me, 0)), partial(communicator.recv_backward, SHAPE)]
    for agree in reversed(calls) if me else calls:
        agree()
    for n in range(2):
        mine, grad = activation(me, n), gradient(me, n)
        if me < 2:
            assert_received(communicator.send_forward_recv_backward(mine, SHAPE), gradient(after, n))
        if me > 0:
            assert_received(communicator.send_backward_recv_forward(grad, SHAPE), activation(before, n))
        assert_received(communicator.send_forward_recv_forward(mine, True, SHAPE), activation(before, n))
        assert_received(communicator.send_backward_recv_backward(grad, True, SHAPE), gradient(after, n))
        both = communicator.send_forward_backward_recv_forward_backward(mine, grad, True, True, SHAPE)
        assert_received(both[0], activation(before, n))
        assert_received(both[1], gradient(after, n))
    communicator.close()


@MODES
def test_what_a_batch_has_before_such_a_receive_is_started_first(ranks, mode):
    """The header depends on it: rank 0 answers to what it has received."""
    with open_lanes([THERE, BACK], config=config()) as lanes, lanes.in_order():
        if ranks.rank == 0:
            lanes[THERE].isend(lanes[BACK].irecv().result().detach() + 1).synchronize()
        else:
            with lanes.batch():
                lanes[BACK].isend(torch.full((2,), 2.0))
                received = lanes[THERE].irecv()
            assert received.result().tolist() == [3, 3]
            assert launches(ranks, 2) == ["send", "recv"]
        ranks.barrier()


@MODES
@pytest.mark.parametrize("nested", [False, True])
def test_an_exchange_in_which_both_ranks_send_first_comes_in_the_order_of_lanes(ranks, mode, nested):
    mine, theirs = (THERE, BACK) if ranks.rank == 0 else (BACK, THERE)
    with open_lanes([THERE, BACK], config=config()) as lanes, lanes.in_order():
        with lanes.batch() if nested else nullcontext(), lanes.batch(by_lane=True):
            lanes[mine].isend(torch.full((2,), float(ranks.rank)))
            received = lanes[theirs].irecv()
        assert received.result().tolist() == [1 - ranks.rank] * 2
        assert launches(ranks, 2) == (["send", "recv"] if ranks.rank == 0 else ["recv", "send"])
        ranks.barrier()


@STREAMS
def test_outside_a_step_a_receive_without_its_header_holds_nothing_up(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            lanes[THERE].isend(lanes[BACK].irecv().result().detach() + 1).synchronize()
        else:
            received = lanes[THERE].irecv()
            lanes[BACK].isend(torch.full((2,), 2.0))
            assert received.result().tolist() == [3, 3]
        ranks.barrier()


@STREAMS
def test_a_header_that_does_not_come_is_a_timeout_of_the_lane(ranks):
    with open_lanes([THERE, BACK], config=P2PConfig(deadline=1.0)) as lanes:
        if ranks.rank == 1:
            with lanes.in_order(), pytest.raises(P2PTimeoutError, match=r"rank 1 waited 1 s.*0>1"):
                lanes[THERE].irecv()
        ranks.barrier()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="serial")
@pytest.mark.parametrize("batched", [False, True])
def test_two_sends_that_come_first_are_a_deadlock_of_one_stream(ranks, batched):
    """As the tests that are pinned to a stream for each communicator would be: each send waits for a later receive."""
    mine, theirs = (THERE, BACK) if ranks.rank == 0 else (BACK, THERE)
    shapes = dict.fromkeys((THERE, BACK), torch.ones(2))
    with open_lanes([THERE, BACK], config=config(deadline=1.0), agreed=shapes) as lanes:
        with lanes.batch() if batched else nullcontext():
            handles = [lanes[mine].isend(torch.ones(2)), lanes[theirs].irecv()]
        ranks.barrier()
        found = [(entry.launch.operations[0].kind, entry.started) for entry in ranks.fake_device.unfinished()]
        assert found == [("send", True), ("recv", False)]
        errors = []
        for handle in handles:  # the end of the first send may let the other one through
            try:
                handle.synchronize()
            except (P2PTimeoutError, P2PPeerError) as error:
                errors.append(str(error))
        assert errors
        assert re.search("rank [01] waited 1 s for .* message 0", errors[0])
        ranks.barrier()
