"""The fake NCCL: the rules of NCCL that a schedule depends on, each of them broken once."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeGroup

from .waiting import ended, running, until

BOTH = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.ranks(2, backend="fake_nccl", fake_nccl=mode))
        for mode in ("streams", "serial")
    ],
)
SERIAL = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="serial")
STREAMS = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="streams")


@BOTH
def test_a_transfer_arrives_and_what_follows_a_wait_sees_it(ranks, mode):
    assert type(dist.group.WORLD) is FakeGroup
    assert ranks.device.type == "cpu"
    if ranks.rank == 0:
        dist.isend(torch.arange(6.0).reshape(3, 2), 1).wait()
        dist.isend(torch.zeros(0, 3), 1).wait()
    else:
        x = torch.zeros(3, 2)
        dist.irecv(x, 0).wait()
        assert x.tolist() == [[0, 1], [2, 3], [4, 5]]
        dist.irecv(torch.zeros(0, 3), 0).wait()


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="serial")
def test_a_batch_with_several_peers_beside_a_group_that_is_never_used(ranks):
    unused, others = dist.new_group([0, 1, 2]), [rank for rank in range(3) if rank != ranks.rank]
    dist.group.WORLD._start_coalescing(torch.device("cpu"))
    received = {peer: torch.zeros(2) for peer in others}
    for peer in others:
        dist.group.WORLD.send([torch.full((2,), float(ranks.rank))], peer, 0)
    for peer, tensor in received.items():
        dist.group.WORLD.recv([tensor], peer, 0)
    dist.group.WORLD._end_coalescing(torch.device("cpu")).wait()
    assert {peer: tensor.tolist() for peer, tensor in received.items()} == {peer: [peer] * 2 for peer in others}
    if ranks.rank == 0:
        unused.abort()
    ranks.barrier()


@STREAMS
def test_a_tensor_with_strides_is_refused(ranks):
    for verb, text in ((dist.group.WORLD.send, "send"), (dist.group.WORLD.recv, "receive")):
        with pytest.raises(ValueError, match=f"a tensor to {text} is not contiguous; NCCL moves plain memory"):
            verb([torch.zeros(2, 3).T], 1 - ranks.rank, 0)
    assert ranks.fake_device.launches == []


@BOTH
def test_collectives_and_objects_come_in_stream_order(ranks, mode):
    x = torch.tensor([1.0 + ranks.rank])
    dist.all_reduce(x)
    gathered = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(gathered, x + ranks.rank)
    whole = torch.zeros(2)
    # Renamed in torch 2.13.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, x)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": ranks.rank})
    dist.broadcast(x, 1)
    dist.barrier()
    assert [each.item() for each in gathered] == [3, 4]
    assert whole.tolist() == [3, 3]
    assert objects == [{"rank": 0}, {"rank": 1}]
    kinds = [launch.kind for launch in ranks.fake_device.launches]
    assert kinds[:3] == ["allreduce", "allgather", "_allgather_base"]
    assert kinds[-2:] == ["broadcast", "barrier"]


@STREAMS
def test_a_send_ends_with_its_receive_and_a_receive_is_nan_until_its_data_is_there(ranks):
    if ranks.rank == 0:
        work = dist.isend(torch.ones(4), 1)
        time.sleep(0.2)
        assert not work.is_completed()
        ranks.barrier()
        assert until(work.is_completed)
        assert work.is_success()
        assert work.get_future_result().wait() == 0
        dist.send(torch.ones(4, dtype=torch.int32), 1)
    else:
        ranks.barrier()
        x, n = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
        first, second = dist.irecv(x, 0), dist.irecv(n, 0)
        assert x.isnan().all() or first.is_completed()
        assert n.tolist() == [0x7F7F7F7F] * 4 or second.is_completed()
        first.wait()
        second.wait()
        assert x.tolist() == [1] * 4
        assert n.tolist() == [1] * 4


@STREAMS
def test_a_wait_returns_at_once_where_it_may_not_hold_the_host(ranks):
    ranks.fake_device.waits_hold = False
    x = torch.zeros(2)
    if ranks.rank == 1:
        work = dist.irecv(x, 0)
        work.wait()
        assert x.isnan().all()
        assert not work.is_completed()
        ranks.barrier()
        assert until(work.is_completed)
        assert x.tolist() == [1, 1]
    else:
        ranks.barrier()
        sent = dist.isend(torch.ones(2), 1)
        assert until(sent.is_completed)


def exchange(group, peer, *, batched):
    """A send and a receive, the send first."""
    mine, theirs = torch.full((3,), float(dist.get_rank())), torch.zeros(3)
    if batched:
        group._start_coalescing(torch.device("cpu"))
    works = [group.send([mine], peer, 0), group.recv([theirs], peer, 0)]
    if batched:
        works = [group._end_coalescing(torch.device("cpu"))]
    return works, theirs


@BOTH
def test_a_batch_is_simultaneous(ranks, mode):
    works, theirs = exchange(dist.group.WORLD, 1 - ranks.rank, batched=True)
    works[0].wait()
    assert theirs.tolist() == [1 - ranks.rank] * 3
    (launch,) = ranks.fake_device.launches
    assert [(op.kind, op.peer, op.nbytes) for op in launch.operations] == [
        ("send", 1 - ranks.rank, 12),
        ("recv", 1 - ranks.rank, 12),
    ]
    assert launch.thread == threading.get_ident()


@STREAMS
def test_one_group_is_first_in_first_out_so_two_sends_that_come_first_wait_for_each_other(ranks):
    works, _ = exchange(dist.group.WORLD, 1 - ranks.rank, batched=False)
    time.sleep(0.3)
    assert not any(work.is_completed() for work in works)
    ranks.barrier()
    dist.group.WORLD.abort()
    assert all(work.is_completed() and not work.is_success() for work in works)


def crossed(ranks):
    """Two groups whose transfers each rank launches in the other order."""
    there, back = dist.new_group([0, 1]), dist.new_group([0, 1])
    x = torch.ones(2)
    if ranks.rank == 0:
        works = [there.send([x], 1, 0), back.recv([torch.zeros(2)], 1, 0)]
    else:
        works = [back.send([x], 0, 0), there.recv([torch.zeros(2)], 0, 0)]
    return (there, back), works


@STREAMS
def test_groups_run_beside_each_other(ranks):
    _, works = crossed(ranks)
    assert until(lambda: all(work.is_success() for work in works))


@SERIAL
def test_in_serial_mode_a_launch_order_that_differs_between_ranks_gets_stuck(ranks):
    groups, works = crossed(ranks)
    time.sleep(0.3)
    assert not any(work.is_completed() for work in works)
    ranks.barrier()
    together([group.abort for group in groups])
    assert all(work.is_completed() for work in works)
    # The first abort may let the entry behind its own through before the other one begins.
    assert not all(work.is_success() for work in works)


def together(functions):
    threads = [running(function) for function in functions]
    assert all(ended(thread, 10.0) for thread in threads)


@STREAMS
def test_aborts_one_by_one_hang_and_concurrent_ones_do_not(ranks):
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    if ranks.rank == 0:
        works = [group.recv([torch.zeros(2)], 1, 0) for group in groups]
        first = running(groups[0].abort)
        first.join(0.5)
        assert first.is_alive()
        together([group.abort for group in groups[1:]])
        first.join(10)
        assert not first.is_alive()
        assert all("was aborted" in str(work.exception()) for work in works)
        assert [work.get_future_result().wait() for work in works] == [2, 2, 2]
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            groups[0].send([torch.zeros(2)], 1, 0)
    ranks.barrier()


@STREAMS
def test_an_entry_whose_peer_is_gone_runs_on_and_is_completed_with_an_error_where_peers_are_reported(ranks):
    ranks.fake_device.reports_peer_errors = ranks.rank == 1
    group = dist.new_group([0, 1])
    ranks.barrier()
    if ranks.rank == 1:
        work = group.recv([torch.zeros(2)], 0, 0)
        assert until(work.is_completed)
        assert not work.is_success()
        assert isinstance(work.exception(), RuntimeError)
        work.wait()
        with pytest.raises(RuntimeError) as raised:
            work.wait(timedelta(seconds=60))
        assert raised.value is work.exception()
        ranks.fake_device.reports_peer_errors = False
        second = group.recv([torch.zeros(2)], 0, 0)
        ranks.barrier()
        time.sleep(0.2)
        assert not second.is_completed()
        group.abort()
    else:
        stuck = group.recv([torch.zeros(2)], 1, 0)
        assert until(lambda: ranks.fake_device.unfinished()[0].started)
        group.abort()
        assert stuck.is_completed()
        ranks.barrier()


@STREAMS
def test_a_destroy_waits_for_the_other_member_or_for_an_abort(ranks):
    met, left = dist.new_group([0, 1]), dist.new_group([0, 1])
    late = 0.3
    if ranks.rank == 0:
        time.sleep(late)
        met.shutdown()
    else:
        began = time.monotonic()
        met.shutdown()
        assert time.monotonic() - began > late / 2
        destroying = threading.Thread(target=left.shutdown, daemon=True)
        destroying.start()
        destroying.join(late)
        assert destroying.is_alive()
        left.abort()
        destroying.join(10)
        assert not destroying.is_alive()
        left.shutdown()  # after an abort it meets no one
    ranks.barrier()
