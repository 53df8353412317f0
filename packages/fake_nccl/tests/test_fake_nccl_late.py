"""The late device: nothing is computed before the host waits, and what waits, races or is freed too early shows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.fake_nccl import FakeDevice, Mark

pytestmark = pytest.mark.thorough


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def test_values_are_not_there_until_the_host_waits(device):
    with device.late() as late:
        x = torch.ones(3)
        y = (x + 1) * 2
        assert late.syncs == []
        with device.streams.paused():  # what the host has
            assert y.isnan().all()
        assert y.tolist() == [4.0, 4.0, 4.0]
        assert [sync.what for sync in late.syncs] == ["tolist"]
    assert y.equal(torch.full((3,), 4.0))
    assert device.violations == []


@pytest.mark.parametrize(
    ("what", "read"),
    [
        ("_local_scalar_dense", lambda x: x.sum().item()),
        ("_local_scalar_dense", lambda x: bool((x > 0).all())),
        ("_local_scalar_dense", lambda x: float(x.max())),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu()),
        ("numpy", lambda x: x.numpy()),
        ("equal", lambda x: torch.equal(x, x)),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
        ("masked_select", lambda x: x.masked_select(x > 0)),
        ("_unique2", lambda x: x.unique()),
    ],
)
def test_each_read_by_the_host_is_recorded_with_its_callers(device, what, read):
    expected = read(torch.arange(4.0))
    with device.late() as late:
        found = read(torch.arange(4.0))
        (sync,) = late.syncs
    assert sync.what == what
    assert "test_fake_nccl_late.py:" in sync.where
    assert sync.stack[0].startswith(sync.where)
    assert any("in test_each_read_by_the_host" in line for line in sync.stack)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x.clamp(max=x.mean()),
        lambda x: torch.stack([x.isnan().any(), (x > 1).all()]),
        lambda x: (x.shape, x.numel(), x.is_contiguous(), x.dtype, x.view(2, 2).t().stride()),
        lambda x: torch._foreach_norm([x, x], 2),
    ],
)
def test_what_a_gpu_computes_by_itself_is_no_wait(device, harmless):
    with device.late() as late:
        harmless(torch.arange(4.0))
    assert late.syncs == []
    assert device.violations == []


def test_forwards_backwards_and_updates_are_those_of_a_cpu(device):
    def train(model, data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), torch.tensor([1, 0, 2])).backward()
            optimizer.step()

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))

    data = torch.tensor([3, 6, 0])
    expected, model = made(), made()
    train(expected, data)
    with device.late() as late:
        train(model, data)
        assert late.syncs == []
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert device.violations == []


def test_streams_go_on_by_themselves_and_events_order_them(device):
    streams = device.streams
    side = streams.Stream()
    with device.late() as late:
        x = torch.ones(4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            y = x * 3
            y.record_stream(streams.current_stream())
        event = side.record_event()
        assert not event.query()
        streams.current_stream().wait_event(event)
        event.synchronize()
        assert event.query()
        assert [sync.what for sync in late.syncs] == ["Event.synchronize"]
        z = y + 1
    assert z.tolist() == [4.0] * 4
    assert device.violations == []


def test_a_poll_is_no_wait_and_polling_is_one_and_ends(device):
    with device.late(patience=60) as late:
        torch.ones(1)
        assert not device.streams.current_stream().query()
        assert late.syncs == []
        while not device.streams.current_stream().query():
            pass
        assert [sync.what for sync in late.syncs] == ["polling"]


def test_a_use_after_free_finds_no_values(device):
    streams = device.streams
    side = streams.Stream()
    with device.late():
        x = torch.ones(4)
        y = torch.zeros(4)
        streams.current_stream().record_event().synchronize()
        gate = torch.zeros(1)  # something that the side stream has to wait for
        event = streams.current_stream().record_event()
        with streams.stream(side):
            side.wait_event(event)
            y.copy_(x)
        del x
        torch.zeros(1)
        streams.current_stream().record_event().synchronize()
    assert gate.tolist() == [0.0]
    assert any("memory of the default stream was freed while copy_ on stream" in text for text in device.violations)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_freed_when_the_host_drops_it_and_recorded_memory_when_the_other_stream_is_done(device, recorded):
    streams = device.streams
    side = streams.Stream()
    with device.late() as late:
        before = late.live_bytes
        x = torch.zeros(1000)
        assert late.live_bytes - before == 4000
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            y = x.sum()
            if recorded:
                x.record_stream(side)
        if not recorded:
            streams.current_stream().wait_stream(side)
        del x
        torch.zeros(0)
        assert late.live_bytes - before == (4004 if recorded else 4)
        side.synchronize()
        torch.zeros(0)
        assert late.live_bytes - before == 4
    assert y.tolist() == 0.0
    assert late.peak_bytes == 4004
    assert device.violations == []


@pytest.mark.ranks(2, backend="fake_nccl")
def test_entries_take_their_turn_in_the_streams(ranks):
    device, side = ranks.fake_device, ranks.fake_device.streams.Stream()
    rank, other = ranks.rank, 1 - ranks.rank
    with device.late() as late:
        device.mark("compute")
        x = torch.full((4,), float(rank)) + 1
        received = torch.empty(4)
        event = device.streams.current_stream().record_event()
        if rank == 0:
            dist.isend(x, other).wait()
        else:
            side.wait_event(event)
            with device.streams.stream(side):
                work = dist.irecv(received, other)
            work.wait()
        device.mark("after")
        total = received + x
        assert late.syncs == []
    if rank == 1:
        assert total.tolist() == [3.0] * 4
    (launch,) = device.launches
    order = [(moment.what, moment.of.text if isinstance(moment.of, Mark) else "entry") for moment in device.timeline]
    host = [("marked", "compute"), ("launched", "entry"), ("marked", "after")]
    assert [one for one in order if one[0] in ("launched", "marked")] == host
    there = [one for one in order if one[0] in ("started", "awaited", "ended", "reached")]
    assert there.index(("started", "entry")) < there.index(("ended", "entry")) < there.index(("reached", "after"))
    assert launch.operations[0].kind == ("recv" if rank else "send")


@pytest.mark.ranks(2, backend="fake_nccl")
@pytest.mark.parametrize("waits", [True, False])
def test_a_receive_that_is_read_without_a_wait_is_not_there(ranks, waits):
    device, side = ranks.fake_device, ranks.fake_device.streams.Stream()
    with device.late():
        if ranks.rank == 0:
            dist.isend(torch.ones(4), 1)
        else:
            with device.streams.stream(side):
                x = torch.empty(4)
                work = dist.irecv(x, 0)
            if waits:
                work.wait()
            total = x.sum()
            x.record_stream(device.streams.current_stream())
            device.streams.synchronize()
    if ranks.rank == 1:
        assert bool(device.violations) is not waits
        if waits:
            assert total.item() == 4.0
        device.violations.clear()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_collective_runs_late_and_holds_nobody(ranks):
    with ranks.fake_device.late() as late:
        x = torch.full((3,), ranks.rank + 1.0)
        dist.all_reduce(x)
        y = x * 2
        assert late.syncs == []
    assert y.tolist() == [6.0] * 3
