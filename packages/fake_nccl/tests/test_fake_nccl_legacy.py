"""The fake NCCL by the rules of nccl-legacy: it connects at first use, and lone messages have lines of their own."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeGroup, LegacyGroup
from pipegrid.fake_nccl.torch_compat import BOUND_KIND

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
LEGACY = pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="legacy")
SHORT = timedelta(seconds=0.5)


def modes(*names, ranks):
    """A parameter for each mode, on as many ranks."""
    return pytest.mark.parametrize(
        "mode",
        [pytest.param(name, marks=pytest.mark.ranks(ranks, backend="fake_nccl", fake_nccl=name)) for name in names],
    )


def batch(group, *operations):
    """One batch of (verb, tensor, peer)."""
    group._start_coalescing(CPU)
    for verb, tensor, peer in operations:
        getattr(group, verb)([tensor], peer, 0)
    return group._end_coalescing(CPU)


def bind(ranks):
    """Bind the default group to a device, as ``init_process_group(device_id=)`` does."""
    dist.group.WORLD.eager_connect_single_device(torch.device(BOUND_KIND, ranks.rank))


@LEGACY
def test_lone_messages_are_on_a_communicator_of_the_pair_and_batches_on_the_groups(ranks):
    group, other = dist.new_group([0, 1]), 1 - ranks.rank
    assert type(group) is LegacyGroup
    x, y = torch.full((2,), float(ranks.rank)), torch.zeros(2)
    for verb, tensor in (("send", x), ("recv", y)) if ranks.rank == 0 else (("recv", y), ("send", x)):
        getattr(group, verb)([tensor], other, 0).wait()
    assert y.tolist() == [other] * 2
    batch(group, ("send", x, other), ("recv", y, other)).wait()
    names = [launch.group for launch in ranks.fake_device.launches]
    assert names == [*[f"{group.group_name}/0-1"] * 2, group.group_name]


@LEGACY
def test_with_a_bound_device_everything_is_on_the_groups_communicator(ranks):
    """The default group, and new ones beside it."""
    bind(ranks)
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        (group.send if ranks.rank == 0 else group.recv)([torch.zeros(2)], 1 - ranks.rank, 0).wait()
    assert [launch.group for launch in ranks.fake_device.launches] == [group.group_name for group in groups]


@modes("streams", "legacy", ranks=2)
def test_a_batch_and_a_lone_message_that_face_each_other(ranks, mode):
    """Wrong on one line, where both ranks send first; right where a lone message has a line of its own."""
    group, x, y = dist.new_group([0, 1], timeout=timedelta(minutes=5)), torch.ones(1), torch.ones(1)
    group._connect()
    if mode == "legacy":  # else each waits for the other in its first use
        group._pair(1 - ranks.rank)
    if ranks.rank == 0:
        works = [batch(group, ("send", x, 1)), group.recv([y], 1, 0)]
    else:
        works = [group.send([x], 0, 0), batch(group, ("recv", y, 0))]
    end = time.monotonic() + (20.0 if mode == "legacy" else 0.5)
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.002)
    assert [work.is_completed() for work in works] == [mode == "legacy"] * 2
    ranks.barrier()
    group.abort()
    ranks.barrier()


@LEGACY
def test_the_first_batch_holds_the_host_until_every_member_has_come_to_one(ranks):
    group, x = dist.new_group([0, 1]), torch.zeros(1)
    if ranks.rank == 0:
        batch(group, ("send", x, 1))
        assert ranks.store.check(["coming"])
    else:
        time.sleep(0.4)  # in which a batch that holds nobody is over
        ranks.store.set("coming", "1")
        batch(group, ("recv", x, 0)).wait()


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="legacy")
@pytest.mark.parametrize("bound", [False, True])
def test_a_first_batch_of_some_members_waits_for_all_of_them(ranks, bound):
    """Wrong: messages of two ranks as the first use of a group of three; right where a device is bound."""
    if bound:
        bind(ranks)
    group = dist.new_group([0, 1, 2], timeout=SHORT)
    if ranks.rank < 2 and bound:
        batch(group, ("recv" if ranks.rank else "send", torch.zeros(1), 1 - ranks.rank)).wait()
    elif ranks.rank < 2:
        with pytest.raises(dist.DistBackendError, match=r"ranks \[2\] did not come to connect within 0.5 s"):
            batch(group, ("recv" if ranks.rank else "send", torch.zeros(1), 1 - ranks.rank))
    ranks.barrier()


@LEGACY
def test_a_group_that_was_never_used_ends_without_the_other_members(ranks):
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        group.shutdown()
    ranks.barrier()


@LEGACY
def test_no_member_of_a_communicator_is_connected_before_all_are(ranks, monkeypatch):
    """Wrong: a rank that connects first and aborts at once, which fails the connecting of its peer."""
    gloo = dist.ProcessGroupGloo

    def slow(*args):
        made = gloo(*args)
        time.sleep(0.3)  # as long as the last steps of connecting take here
        assert not ranks.store.check(["connected"])
        return made

    if ranks.rank == 1:
        monkeypatch.setattr(dist, "ProcessGroupGloo", slow)
    group = dist.new_group([0, 1])
    group._pair(1 - ranks.rank)
    ranks.store.set("connected", "1")
    ranks.barrier()


@LEGACY
@pytest.mark.parametrize("together", [True, False])
def test_an_abort_ends_the_lone_messages_of_its_group_too(ranks, together, monkeypatch):
    """Wrong: communicators of one group aborted one by one, each waiting for the others' kernels."""
    group = dist.new_group([0, 1])
    pair = group._pair(1 - ranks.rank)
    if ranks.rank == 0:
        if not together:
            monkeypatch.setattr(LegacyGroup, "_aborted_together", FakeGroup._aborted_together)
        lone = group.recv([torch.zeros(1)], 1, 0)
        aborting = threading.Thread(target=group.abort, daemon=True)
        aborting.start()
        aborting.join(20.0 if together else 0.3)
        assert aborting.is_alive() != together
        pair.abort()
        aborting.join(20.0)
        assert not aborting.is_alive()
        assert lone.is_completed()
    ranks.barrier()


@modes("legacy", "nccl2", ranks=3)
def test_a_new_group_of_some_ranks_alone_beside_a_bound_default_group_hangs(ranks, mode):
    """Wrong: `use_local_synchronization` where the others owe the split. Right unbound, and with ``lazy_init``."""
    world, lazy = dist.group.WORLD, SimpleNamespace(lazy_init=True)
    if mode == "legacy":
        bind(ranks)
    bound = world.bound_device_id
    assert bound == torch.device(BOUND_KIND, ranks.rank)
    ranks.barrier()
    if ranks.rank < 2:
        with pytest.raises(dist.DistBackendError, match=r"group 0: ranks .*2\] did not come .* 0.5 s, to split this g"):
            dist.new_group([0, 1], timeout=SHORT, use_local_synchronization=True)
        dist.new_group([0, 1], use_local_synchronization=True, pg_options=lazy)
        world.bound_device_id = None
        dist.new_group([0, 1], use_local_synchronization=True)
    ranks.barrier()


@modes("legacy", "nccl2", "lazy", ranks=3)
def test_all_ranks_make_a_new_group_beside_a_bound_default_group(ranks, mode):
    if mode == "legacy":
        bind(ranks)
    x = torch.ones(1)
    for members in ([0, 1], [1, 2]):
        group = dist.new_group(members)
        if ranks.rank in members:
            dist.all_reduce(x, group=group)
    assert x.item() == {0: 2.0, 1: 3.0, 2: 3.0}[ranks.rank]


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="nccl2")
@pytest.mark.parametrize("lazy", [False, True])
def test_a_group_of_nccl2_connects_when_it_is_made_unless_it_is_lazy(ranks, lazy):
    """Wrong: a rank that makes its groups later than its peer needs them made."""
    options = SimpleNamespace(lazy_init=lazy)
    if ranks.rank == 0:
        group = dist.new_group([0, 1], pg_options=options)
        assert ranks.store.check(["coming"]) != lazy
        ranks.store.set("made", "1")
        batch(group, ("send", torch.zeros(1), 1)).wait()
        assert ranks.store.check(["coming"])
    else:
        if lazy:  # a group that waits for its peer is never made
            ranks.store.wait(["made"], timedelta(seconds=20))
        time.sleep(0.4)  # in which a call that waits for nobody is over
        ranks.store.set("coming", "1")
        x = torch.zeros(1)
        batch(dist.new_group([0, 1], pg_options=options), ("recv", x, 0)).wait()
        while ranks.fake_device.unfinished():  # which holds no memory of a batch
            time.sleep(0.002)
        del x
