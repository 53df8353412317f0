"""Virtual streams: races, frees, reads by the host and its lead are seen, whatever order the run happened to take."""

import pytest
import torch
import torch.distributed as dist

from pipegrid.fake_nccl import FakeDevice, Mark, Streams

pytestmark = pytest.mark.thorough


@pytest.fixture
def races():
    return []


@pytest.fixture
def streams(races):
    return Streams(races)


def test_a_write_beside_a_read_on_another_stream_is_a_race_and_an_event_orders_it(streams, races):
    side = streams.Stream()
    with streams.watch():
        x = torch.zeros(4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            y = x + 1
        assert not races
        x.add_(1)
        assert len(races) == 1
        assert races[0].startswith("race: add_ on the default stream writes memory that add on stream 1 reads")
        done = side.record_event()
        streams.current_stream().wait_event(done)
        y.add_(x)
    assert len(races) == 1


def test_a_read_that_waits_for_nothing_is_a_race(streams, races):
    side = streams.Stream()
    with streams.watch():
        x = torch.ones(4)
        with streams.stream(side):
            x.sum()
    assert races == [
        "race: sum on stream 1 reads memory that ones on the default stream writes: no event orders the two"
    ]


def test_bytes_apart_and_reads_together_are_no_race(streams, races):
    side = streams.Stream()
    with streams.watch():
        x = torch.zeros(2, 4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            x[0].add_(1)
        x[1].add_(1)
        streams.current_stream().wait_stream(side)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            x.sum()
        x.sum()
    assert not races


def test_an_event_orders_what_came_before_it_and_nothing_later(streams, races):
    side = streams.Stream()
    with streams.watch():
        x = torch.zeros(4)
        event = streams.Event()
        event.record()
        x.add_(1)
        side.wait_event(event)
        with streams.stream(side):
            x.sum()
    assert len(races) == 1


def test_a_host_wait_orders_every_stream_and_is_recorded_with_its_line(streams, races):
    side = streams.Stream()
    with streams.watch() as syncs:
        x = torch.zeros(4)
        streams.current_stream().record_event().synchronize()
        with streams.stream(side):
            x.sum()
        torch.ones(1).item()
        torch.ones(2).tolist()
        bool(torch.equal(x, x))
    assert not [race for race in races if "equal" not in race and "stream 1" not in race]
    assert [sync.what for sync in syncs] == ["Event.synchronize", "_local_scalar_dense", "tolist", "equal"]
    assert all("test_fake_nccl_streams.py:" in sync.where for sync in syncs)


def test_backward_is_work_and_a_gradient_read_on_another_stream_is_a_race(streams, races):
    side = streams.Stream()
    with streams.watch() as syncs:
        w = torch.ones(3, requires_grad=True)
        (w * 2).sum().backward()
        assert not races
        with streams.stream(side):
            w.grad.mul_(2)
    assert len(races) == 1
    assert syncs == []


@pytest.mark.parametrize("how", ["nothing", "record_stream", "an event back"])
def test_memory_freed_while_another_stream_may_use_it(streams, races, how):
    side = streams.Stream()
    with streams.watch():
        x = torch.zeros(4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            x.sum()
            if how == "record_stream":
                x.record_stream(side)
        if how == "an event back":
            streams.current_stream().wait_stream(side)
        del x
        torch.zeros(1)
    assert len(races) == (1 if how == "nothing" else 0)
    assert all(
        "memory of the default stream was freed while sum on stream 1 may still use it" in race for race in races
    )


def test_the_host_is_ahead_by_the_marks_that_it_does_not_know_to_be_done():
    device = FakeDevice()
    streams = device.streams
    events = []
    for microbatch in range(4):
        if microbatch >= 2:
            events[microbatch - 2].synchronize()
        device.mark(f"F {microbatch}")
        events.append(streams.current_stream().record_event())
    device.close()
    assert device.history == [
        Mark("F 0", ()),
        Mark("F 1", ("F 0",)),
        Mark("F 2", ("F 1",)),
        Mark("F 3", ("F 2",)),
    ]


@pytest.mark.ranks(2, backend="fake_nccl")
@pytest.mark.parametrize("waits", [True, False])
def test_a_receive_that_is_read_without_a_wait_is_a_race(ranks, waits):
    device = ranks.fake_device
    device.waits_hold = True
    with device.streams.watch() as syncs:
        if ranks.rank == 0:
            x = torch.ones(4)
            dist.isend(x, 1)
            x.sum()  # a read beside a read
        else:
            x = torch.empty(4)
            work = dist.irecv(x, 0)
            if waits:
                work.wait()
            x.sum()
    ranks.barrier()
    if ranks.rank == 1 and not waits:
        (race,) = device.violations
        assert race.startswith("race: sum on the default stream reads memory that entry 0 (p2p) on NCCL's stream")
        device.violations.clear()
    assert syncs == []
    assert not device.violations


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_slot_that_is_posted_again_waits_for_the_compute_that_reads_it(ranks):
    device, side = ranks.fake_device, ranks.fake_device.streams.Stream()
    with device.streams.watch():
        slot, read = torch.empty(4), None
        side.wait_stream(device.streams.current_stream())
        for turn in range(3):
            if ranks.rank == 0:
                dist.isend(torch.ones(4), 1).wait()
                continue
            if turn == 2:
                side.wait_event(read)
            with device.streams.stream(side):
                work = dist.irecv(slot, 0)
            work.wait()
            slot.sum()
            read = device.streams.current_stream().record_event()
    if ranks.rank == 1:
        assert len(device.violations) == 1  # of the second turn: the third one waits
        device.violations.clear()
