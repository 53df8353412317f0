"""Bridges over groups whose kernels run on a device, by NCCL's rules on a CPU."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from pipegrid.bridges import (
    BridgeCommunicator,
    ColocatedBridgeCommunicator,
    MultiModulePipelineCommunicator,
    VTPCommunicator,
    VTPTopology,
)
from pipegrid.core.edge import Direction, Edge
from pipegrid.transport import CollectiveFailedError
from pipegrid.transport.config import P2PConfig
from reshard_kit.grids import grid

CONFIG = P2PConfig(deadline=10.0, open_deadline=20.0)
three_ranks = pytest.mark.ranks(3, backend="fake_nccl", deadline=60)


def threads(ranks):
    """The threads that have launched."""
    return {launch.thread for launch in ranks.fake_device.launches}


@three_ranks
def test_one_thread_launches_messages_and_completions_of_a_bridge(ranks):
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=CONFIG)
    for seed in range(3):
        whole = torch.arange(8.0).view(2, 2, 2) + seed
        if ranks.rank == 0:
            sending = bridge.isend_forward(whole)
            assert torch.equal(bridge.irecv_backward().result(), -whole)
        else:
            receive = bridge.irecv_forward()
            time.sleep(0.1)  # messages arrive, and their completion is left to the thread that asks
            assert torch.equal(receive.result(), whole)
            sending = bridge.isend_backward(-whole)
        sending.wait()
    assert threads(ranks) == {threading.get_ident()}
    bridge.destroy()


@three_ranks
def test_one_thread_launches_messages_and_completions_of_stages(ranks):
    comm = VTPCommunicator(VTPTopology([1, 2]), CONFIG)
    whole = torch.arange(6.0)
    if ranks.rank == 0:
        comm.isend(whole, edge=Edge(0, 1), direction=Direction.FORWARD).wait()
    else:
        receive = comm.irecv(edge=Edge(0, 1), direction=Direction.FORWARD)
        time.sleep(0.1)
        assert torch.equal(receive.result(), whole)
    assert threads(ranks) == {threading.get_ident()}
    ranks.barrier()
    comm.close()


@three_ranks
def test_close_loses_nothing_that_was_sent(ranks):
    bridge = BridgeCommunicator(grid(dp=1), grid(1, dp=2), config=CONFIG)
    whole = torch.arange(32.0).view(8, 2, 2)
    if ranks.rank == 0:
        bridge.isend_forward(whole).wait()
    else:
        assert torch.equal(bridge.recv_forward(), whole.chunk(2)[ranks.rank - 1])
    bridge.destroy()
    ranks.barrier()


@three_ranks
@pytest.mark.parametrize("late", [False, True])
def test_an_abort_ends_messages_and_completions_together(ranks, late):
    """A free waits for kernels of groups that are not aborted yet: one after the other would hang.

    A wait that comes after the abort finds a stream that went on without the data, and says so.
    """
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=CONFIG)
    if ranks.rank == 0:
        bridge.isend_forward(torch.zeros(2, 2, 2))
    if ranks.rank == 1:
        receive = bridge.irecv_forward()
        receive.wait_filled()  # starts its completion, for which rank 2 never comes
        bridge.irecv_forward()
        began = time.monotonic()
        threading.Timer(0.2, bridge.abort, ["rank 2 raised ValueError"]).start()
        if late:
            time.sleep(1.0)
        with pytest.raises(CollectiveFailedError, match=r"ranks \[2\] "):
            receive.wait()
        assert time.monotonic() - began < 8.0
        ranks.store.set("ended", "yes")
    ranks.store.wait(["ended"])
    ranks.barrier()
    bridge.destroy()


@three_ranks
@pytest.mark.parametrize("of", ["bridge", "stages", "modules"])
def test_an_end_after_a_completion_that_never_came_does_not_wait_for_it(ranks, of):
    """Groups that are destroyed wait for what is under way in them."""
    config = P2PConfig(deadline=1.0, open_deadline=20.0)
    if of == "stages":
        made = VTPCommunicator(VTPTopology([1, 2]), config)
        end, edge = made.close, {"edge": Edge(0, 1), "direction": Direction.FORWARD}
        send, receive = partial(made.isend, **edge), partial(made.irecv, **edge)
    elif of == "modules":
        made = MultiModulePipelineCommunicator({"a": grid(dp=1), "b": grid(1, tp=2)}, {"a": ["b"], "b": []}, config)
        end, edge = made.destroy, {"edge": Edge(0, 1), "direction": Direction.FORWARD}
        send, receive = partial(made.isend, **edge), partial(made.irecv, **edge)
    else:
        made = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=config)
        end, send, receive = made.destroy, made.isend_forward, made.irecv_forward
    if ranks.rank == 0:
        send(torch.zeros(2, 2, 2))
    elif ranks.rank == 1:
        with pytest.raises(CollectiveFailedError, match=r"the copies on ranks \[2\] .* not within 1 s"):
            receive().wait()
        ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    began = time.monotonic()
    end()
    assert time.monotonic() - began < 8.0


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="serial")
@pytest.mark.parametrize("of", ["bridge", "modules", "stages"])
def test_neighbours_that_both_send_first_by_a_combined_verb_get_by_on_one_stream(ranks, of):
    first, last, shape = ranks.rank == 0, ranks.rank == 1, (1, 1, 2)
    x = [torch.full(shape, float(n)) for n in range(4)]
    if of == "bridge":
        made = BridgeCommunicator(grid(dp=1), grid(1, dp=1), config=CONFIG)
        one, two, end = (lambda tensor: tensor), (), made.destroy
    elif of == "modules":
        made = MultiModulePipelineCommunicator({"a": grid(dp=1), "b": grid(1, dp=1)}, {"a": ["b"], "b": []}, CONFIG)
        one, two, end = (lambda tensor: {"a": tensor}), (), made.destroy
    else:
        made = VTPCommunicator(VTPTopology([1, 1]), CONFIG)
        one, two, end = (lambda tensor: tensor), (shape,), made.close
    if first:
        made.send_forward(one(x[0]))
        got = [made.send_forward_recv_backward(one(x[n]), *two) for n in (1, 2, 3)]
        got.append(made.recv_backward(*two))
    if last:
        got = [made.recv_forward(*two)]
        for n in range(3):
            got.append(made.send_backward_recv_forward(one(-x[n]), *two))
        made.send_backward(one(-x[3]))
    sign = -1 if first else 1
    received = [next(iter(each.values())) if of == "modules" else each for each in got]
    assert [each.flatten()[0].item() for each in received] == [sign * n for n in range(4)]
    end()


@three_ranks
def test_torchs_own_timeout_of_completions_lies_far_beyond_the_deadline(ranks):
    bridge = BridgeCommunicator(grid(dp=1), grid(1, tp=2), config=CONFIG)
    colocated = ColocatedBridgeCommunicator(grid(dp=3), grid(tp=3), deadline=10.0)
    groups = [colocated.gather_pg, *([bridge.group("complete/F", (1, 2))] if ranks.rank else [])]
    assert all(group.timeout > 24 * 3600 for group in groups)
    colocated.destroy()
    bridge.destroy()


@pytest.mark.ranks(4, backend="fake_nccl", deadline=60)
def test_a_colocated_plan_is_a_collective_of_all_ranks(ranks):
    """Ranks outside of the destination's first stage have no messages, and take part all the same."""
    bridge = ColocatedBridgeCommunicator(grid(dp=4), grid(tp=1, pp=2, dp=2))
    got = bridge.communicate(torch.full((1, 2, 3), float(ranks.rank)))
    assert got[:, 0, 0].tolist() == ([ranks.rank, ranks.rank + 1] if ranks.rank % 2 == 0 else [])
    assert [launch.kind for launch in ranks.fake_device.launches].count("alltoall_base") == 1
    ranks.barrier()
    bridge.destroy()
