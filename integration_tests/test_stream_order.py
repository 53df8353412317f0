"""Each order between streams of packages/transport/README.md is there, and without it virtual streams find a race."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipegrid.autograd import run_backward
from pipegrid.bridges import BridgeCommunicator
from pipegrid.bridges.bridge import receive
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import reduce_gradients
from pipegrid.schedules.runtime.stages.offload import Offload
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import LaneSpec, P2PConfig, open_lanes, streams
from pipegrid.transport.backends import NcclTicket, local, staged
from pipegrid.transport.lane import batch, stream_waits, transfers
from pipegrid.transport.messages import payload

SIZE = 64
DEADLINES = {"deadline": 30.0, "open_deadline": 30.0}
THERE, HERE = LaneSpec(0, 1, "there"), LaneSpec(1, 1, "here")


def messages(ranks, lanes, *, reuse=False):
    """Rank 0 computes what it sends; rank 1 computes with what it receives. ``reuse``: buffers are used again."""
    lane = lanes[THERE]
    for n in range(4):
        if ranks.rank == 0:
            lane.isend(torch.ones(SIZE) * n).wait()
        else:
            handle = lane.irecv()
            handle.wait()
            handle.result().detach() * 2
            if reuse:
                handle.release()
            del handle
            torch.ones(1)  # memory that was freed is looked at


def a_batch(ranks, lanes):
    """Rank 0 computes what it sends under a stream that is not current any more where the batch ends."""
    side = ranks.fake_device.streams.Stream()
    for n in range(2):
        with lanes.batch():
            if ranks.rank == 0:
                with ranks.fake_device.streams.stream(side):
                    handle = lanes[THERE].isend(torch.ones(SIZE) * n)
            else:
                handle = lanes[THERE].irecv()
        handle.wait()


def copies_on_one_rank(ranks, lanes):
    """One stream sends and changes what it sent, another one receives."""
    fake = ranks.fake_device.streams
    sender, receiver = fake.Stream(), fake.Stream()
    for _ in range(3 if ranks.rank else 0):
        with fake.stream(sender):
            tensor = torch.ones(SIZE)
            lanes[HERE].isend(tensor).wait()
            tensor.zero_()
        with fake.stream(receiver):
            lanes[HERE].irecv().result().detach() * 2
            torch.ones(1)


def landings(ranks, bridge):
    """What arrives is another dtype, and is copied into its place on the landing stream."""
    for n in range(3):
        if ranks.rank == 0:
            bridge.send_forward(torch.ones(2, 4, 8) * n)
        else:
            bridge.recv_forward().detach() * 2
            torch.ones(1)


def reductions(ranks, groups):
    """Gradients of two buckets: one is summed in place, one is copied."""
    module = nn.ParameterList(torch.ones(size) for size in (2**18, 3, 3))
    for parameter in module:
        parameter.grad = torch.ones_like(parameter) * ranks.rank
    reduce_gradients(module, groups, loss_lanes=2, bucket_bytes=2**20)


def lanes_of(specs, **settings):
    def make():
        made = open_lanes(
            specs, config=P2PConfig(**DEADLINES, **settings), agreed=dict.fromkeys(specs, torch.ones(SIZE))
        )
        return made, made.close

    return make


def a_bridge():
    grids = (HyperCommGrid([1], ["dp"], rank_offset=rank, world_size=2) for rank in range(2))
    made = BridgeCommunicator(*grids, comm_dtype=torch.bfloat16, config=P2PConfig(**DEADLINES))
    return made, made.destroy


def replicas():
    grid = HyperCommGrid([2], ["dp"])
    grid.create_pgs(["dp"])
    return ProcessGroupCollection.from_grid(grid), grid.destroy


def a_stage():
    device = torch.device("cpu")
    copiers = streams.new_stream(device), streams.new_stream(device)
    return (torch.ones(SIZE, requires_grad=True), copiers), lambda: None


def copies_to_the_host(ranks, stage):
    """What a graph saved goes to the host, and is back for its backward."""
    weight, (out, back) = stage
    for _ in range(2):
        y = (torch.ones(SIZE) * weight).exp()
        starts = [get_gradient_edge(y)]
        offload = Offload(starts, [], (out, back))
        offload.out()
        del y
        offload.free()
        torch.ones(SIZE)  # memory that was freed is looked at
        offload.back()
        offload.wait()
        run_backward(starts, [torch.ones(SIZE)])


UNORDERED, FREED = "no event orders the two", "was freed while"
# What is made, what uses it; and the orders, each with the part of the text of a race, and the ranks that find it.
CASES = {
    "NCCL": (
        lanes_of([THERE]),
        messages,
        [(NcclTicket, "order", UNORDERED, [1]), (stream_waits, "used_here", FREED, [1])],
    ),
    "NCCL, a batch": (lanes_of([THERE]), a_batch, [(batch, "current_stream", UNORDERED, [0])]),
    "NCCL, buffers used again": (
        lanes_of([THERE]),
        partial(messages, reuse=True),
        [(payload, "follow", UNORDERED, [1])],
    ),
    "staged": (
        lanes_of([THERE], staged=True),
        messages,
        [
            (staged, "follow", UNORDERED, [0, 1]),
            (staged, "used_here", FREED, [0]),
            (transfers, "used_here", FREED, [1]),
        ],
    ),
    "one rank": (
        lanes_of([HERE]),
        copies_on_one_rank,
        [(local, "follow", UNORDERED, [1]), (local, "used_here", FREED, [1])],
    ),
    "landing": (a_bridge, landings, [(receive, "follow", UNORDERED, [1]), (receive, "used_here", FREED, [1])]),
    "copies to the host": (a_stage, copies_to_the_host, [(streams, "follow", UNORDERED, [0, 1])]),
    "reductions": (replicas, reductions, [(Waiting, "wait", UNORDERED, [0, 1])]),
}


@pytest.mark.ranks(2, backend="fake_nccl")
@pytest.mark.parametrize("case", CASES)
def test_an_order_between_streams_is_there_and_a_race_without_it(ranks, device, monkeypatch, case):
    make, use, orders = CASES[case]
    for module in (streams, staged):
        monkeypatch.setattr(module, "pinned_like", torch.empty_like)  # there is no pinned memory here
    with device.streams.watch():
        made, end = make()
    for _ in range(2):  # the first time, shapes are agreed
        with device.streams.watch() as syncs:
            use(ranks, made)
        assert syncs == []
        assert device.violations == []
    for where, name, text, concerned in orders:
        ranks.barrier()
        with monkeypatch.context() as planted, device.streams.watch():
            planted.setattr(where, name, lambda *_, **__: None)
            use(ranks, made)
        found = [violation for violation in device.violations if text in violation]
        device.violations.clear()
        assert found or ranks.rank not in concerned, (name, device.violations)
    device.streams.synchronize()
    end()
    assert not [violation for violation in device.violations if "was destroyed" in violation]
    device.violations.clear()
