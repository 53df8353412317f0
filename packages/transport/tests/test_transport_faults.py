"""When a rank dies, stops, is late or in another order: the right error on every surviving rank, in time."""

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.testing import Fault
from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PCommunicator,
    P2PConfig,
    P2PError,
    P2PLaneDeadError,
    P2PPeerError,
    P2PTimeoutError,
    open_lanes,
)

from .stages import in_turn

DEADLINE = 2.0
# How long after a fault the errors may come: what is promised, which a test can hold a quiet machine to (the nightly
# ones do), and what shows on a loaded one that they come at all.
PROMISED = DEADLINE + 2.0
LATEST = DEADLINE + 15.0
SHAPE = (4,)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
THERE, BACK = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
config = partial(P2PConfig, pipeline_dtype=torch.float32, deadline=DEADLINE, open_deadline=30.0)


def caught(act, *, latest=LATEST):
    """The error that ``act`` ends with, in time."""
    began = time.monotonic()
    with pytest.raises(P2PError) as found:
        act()
    assert time.monotonic() - began < latest
    return found.value


def run_around(communicator, ranks):
    """Activations once round the ring per round, a moment each; a fault of one rank happens in round 3."""
    with in_turn(ranks, communicator):
        for round_ in range(20):
            ranks.reach(f"round {round_}")
            communicator.send_forward_recv_forward(torch.full(SHAPE, float(round_)), True, SHAPE)


MODES = pytest.mark.parametrize(
    "settings",
    [{}, {"strict": True}, {"variable_seq_lengths": True}, {"communicators": "shared"}],
    ids=["agreed", "strict", "variable", "shared"],
)
in_time = pytest.mark.parametrize(
    "latest", [LATEST, pytest.param(PROMISED, marks=pytest.mark.nightly)], ids=["at all", "as promised"]
)


@pytest.mark.few(2)
@MODES
@pytest.mark.ranks(2, 4)
@in_time
def test_a_peer_that_dies_is_named(ranks, settings, latest):
    victim = 1
    communicator = P2PCommunicator(dist.group.WORLD, config(**settings))
    ranks.plan_fault(Fault("kill", rank=victim, at="round 3"))
    error = caught(lambda: run_around(communicator, ranks), latest=latest)
    assert isinstance(error, (P2PPeerError, P2PTimeoutError))
    if victim in (communicator.next_rank, communicator.prev_rank):
        assert isinstance(error, P2PPeerError)
        assert f"lost rank {victim}" in str(error)
        assert f"rank {victim} died, or closed its connection" in str(error)
    communicator.close()


@pytest.mark.few(2)
@MODES
@pytest.mark.ranks(2, 4)
@in_time
def test_a_peer_that_stops_is_waited_for_until_the_deadline(ranks, settings, latest):
    victim = 1
    communicator = P2PCommunicator(dist.group.WORLD, config(**settings))
    ranks.plan_fault(Fault("stop", rank=victim, at="round 3"))
    error = caught(lambda: run_around(communicator, ranks), latest=latest)
    assert isinstance(error, (P2PPeerError, P2PTimeoutError))
    if ranks.world_size == 2:
        assert isinstance(error, P2PTimeoutError)
        assert (error.rank, error.peer, error.seconds) == (0, victim, DEADLINE)
        assert error.sequence == 3
        assert error.lane in ("0>1[forward]", "1>0[forward]")
    communicator.close()


@pytest.mark.ranks(3)
def test_a_rank_that_fails_for_its_own_reasons_tells_the_others(ranks):
    communicator = P2PCommunicator(dist.group.WORLD, config())
    if ranks.rank == 1:
        communicator.abort("loss is nan")
    else:
        error = caught(lambda: run_around(communicator, ranks))
        assert isinstance(error, (P2PPeerError, P2PTimeoutError))
        if ranks.rank == 0 or "rank 1" in str(error):
            assert "loss is nan" in str(error)
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sends", [True, False])
def test_a_peer_that_closes_its_lanes_says_so_at_once(ranks, sends):
    lane = THERE if sends else BACK
    with open_lanes([THERE, BACK], config=config(deadline=60.0)) as lanes:
        if ranks.rank == 0:
            handle = lanes[lane].isend(torch.ones(2)) if sends else lanes[lane].irecv()
            ranks.barrier()
            error = caught(handle.wait)
            assert isinstance(error, P2PPeerError)
            assert f"lane {lane} was closed on rank 1 (rank 1 ended lane {lane})" in str(error)
        else:
            ranks.barrier()


@pytest.mark.ranks(2)
def test_what_was_raised_inside_the_block_is_the_cause_on_the_other_side(ranks):
    def act():
        with open_lanes([THERE], config=config(deadline=60.0)) as lanes:
            if ranks.rank == 0:
                raise ZeroDivisionError("no samples")
            lanes[THERE].irecv().wait()

    if ranks.rank == 0:
        with pytest.raises(ZeroDivisionError):
            act()
    else:
        error = caught(act)
        assert isinstance(error, P2PPeerError)
        assert str(error) == "ZeroDivisionError: no samples (rank 0 ended lane 0>1[there])"
    ranks.barrier()


@pytest.mark.ranks(2)
def test_a_timeout_has_the_numbers_and_the_lane_is_dead_on_both_sides(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            lane = lanes[BACK]
            handle = lane.irecv()
            error = caught(lambda: handle.wait(0.3))
            assert isinstance(error, P2PTimeoutError)
            assert (error.rank, error.peer, error.lane, error.sequence) == (0, 1, "1>0[back]", 0)
            assert error.seconds == 0.3
            assert "rank 0 waited 0.3 s for receiving message 0 of lane 1>0[back]" in str(error)
            assert caught(handle.wait) is error
            assert handle.is_completed()
            assert "is dead on rank 0" in str(caught(lane.irecv))
            ranks.barrier()
        else:
            ranks.barrier()
            error = caught(lambda: lanes[BACK].isend(torch.ones(2)).wait())
            assert isinstance(error, P2PPeerError)
            assert str(error).startswith("rank 0 waited 0.3 s")
            assert str(error).endswith("(rank 0 ended lane 1>0[back])")
            assert isinstance(caught(lambda: lanes[BACK].isend(torch.ones(2))), P2PLaneDeadError)
        # Its neighbour in the other direction is none the worse.
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            assert lanes[THERE].irecv().result().tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_everything_under_way_on_a_dead_lane_fails_with_the_first_cause(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 1:
            handles = [lanes[THERE].irecv() for _ in range(3)]
            calls = []
            handles[2].on_done(lambda handle: calls.append(handle.error))
            error = caught(lambda: handles[0].wait(0.2))
            assert [caught(handle.wait) for handle in handles] == [error] * 3
            assert calls == [error]
            assert all(handle.is_completed() for handle in handles)
        ranks.barrier()


class EndsAsTheLaneDoes:
    """A ticket that is done; before any thread can say so, another one ends the lane."""

    def __init__(self, ticket, lane):
        self.ticket, self.lane = ticket, lane

    def hold(self, timeout):
        self.ticket.hold(timeout)
        self.lane.abort("another thread gave up")


@pytest.mark.ranks(2, backend="gloo")  # whose tickets hold the host; a device group's order a stream
def test_a_transfer_that_comes_just_as_its_lane_ends_has_failed(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            for _ in range(2):
                lanes[THERE].isend(torch.ones(SHAPE)).wait()
            lanes[BACK].irecv().result()
        else:
            lanes[THERE].irecv().result()
            last = lanes[THERE].irecv()
            last.ticket = EndsAsTheLaneDoes(last.ticket, lanes[THERE])
            for _ in range(2):
                with pytest.raises(P2PLaneDeadError, match="another thread gave up"):
                    last.result()
            lanes[BACK].isend(torch.ones(SHAPE)).wait()


@pytest.mark.ranks(2)
def test_a_transfer_that_is_started_just_as_its_lane_ends_has_an_end_though_nobody_waits(ranks, monkeypatch):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.empty(SHAPE)}) as lanes:
        lane, ended = lanes[THERE], threading.Event()
        if ranks.rank == 0:
            lane.isend(torch.ones(SHAPE)).wait()
            ranks.barrier()  # the receiver is through: on a device a sender's wait does not tell
            start = lane._start_send

            def start_while_another_thread_aborts(tensors):
                ticket = start(tensors)
                lane.abort("another thread gave up")
                return ticket

            monkeypatch.setattr(lane, "_start_send", start_while_another_thread_aborts)
            handle = lane.isend(torch.ones(SHAPE))
            handle.on_done(lambda _: ended.set())
            assert ended.wait(LATEST)
            with pytest.raises(P2PLaneDeadError, match="another thread gave up"):
                handle.wait()
        else:
            lane.irecv().result()
            ranks.barrier()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_a_send_that_nobody_receives_ends_at_the_deadline_though_nobody_waits(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        if ranks.rank == 0:
            handle = lanes[THERE].isend(torch.ones(2))
            end = time.monotonic() + LATEST
            while lanes[THERE].error is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert isinstance(lanes[THERE].error, P2PTimeoutError)
            assert handle.is_completed()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_a_receive_posted_long_ahead_is_not_late_until_somebody_waits(ranks):
    # The deadline also bounds the transfer itself, so it is no shorter than a loaded machine may take for one.
    with open_lanes([THERE], config=config(deadline=1.0)) as lanes:
        if ranks.rank == 1:
            handle = lanes[THERE].irecv()
            time.sleep(1.5)
            ranks.barrier()
            assert handle.result().tolist() == [1, 1]
        else:
            ranks.barrier()
            lanes[THERE].isend(torch.ones(2)).wait()


@pytest.mark.ranks(2)
@in_time
def test_ten_lanes_of_a_stopped_peer_end_in_time_together(ranks, latest):
    specs = [LaneSpec(0, 1, str(n)) for n in range(10)]
    ranks.plan_fault(Fault("stop", rank=1, at="now"))
    with open_lanes(specs, config=config()) as lanes:
        ranks.reach("now")
        began = time.monotonic()
        handles = [lanes[spec].isend(torch.ones(2)) for spec in specs]
        for handle in handles:
            with pytest.raises(P2PTimeoutError):
                handle.wait()
        assert time.monotonic() - began < latest


class TestWrongOrder:
    @pytest.mark.ranks(2)
    @in_time
    def test_of_two_lanes_ends_in_an_error_on_both_sides(self, ranks, latest):
        # Rank 0 sends on one lane after the other; rank 1 receives in the other order. With buffered sends and
        # lanes of their own this works; with a rendezvous, or one communicator, it does not.
        self.cross(ranks, {"strict": True}, latest)

    @pytest.mark.ranks(2, backend="gloo")  # whose tags tell lanes apart: NCCL swaps the tensors
    @in_time
    def test_of_two_lanes_of_one_communicator_ends_in_an_error_on_both_sides(self, ranks, latest):
        self.cross(ranks, {"communicators": "shared"}, latest)

    def cross(self, ranks, settings, latest):
        specs = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b")]
        with open_lanes(specs, config=config(**settings), agreed=dict.fromkeys(specs, torch.ones(2))) as lanes:

            def act():
                order = specs if ranks.rank == 0 else reversed(specs)
                handles = [
                    lanes[spec].isend(torch.ones(2)) if ranks.rank == 0 else lanes[spec].irecv() for spec in order
                ]
                for handle in handles:
                    handle.wait()

            error = caught(act, latest=latest)
            ranks.barrier()  # or the first to be through would close the other's lane before its own deadline
            assert isinstance(error, (P2PTimeoutError, P2PPeerError))
            if isinstance(error, P2PPeerError):
                assert f"rank {1 - ranks.rank} waited" in str(error)

    @pytest.mark.ranks(2, fake_nccl="streams")  # receives in another order than sends
    def test_is_survived_by_buffered_sends_on_lanes_of_their_own(self, ranks):
        specs = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b")]
        with open_lanes(specs, config=config()) as lanes:
            if ranks.rank == 0:
                for handle in [lanes[spec].isend(torch.tensor(float(n))) for n, spec in enumerate(specs)]:
                    handle.wait()
            else:
                assert [lanes[spec].irecv().result().item() for spec in reversed(specs)] == [1, 0]

    @pytest.mark.ranks(2, fake_nccl="streams")  # both send first
    @in_time
    def test_both_send_before_they_receive(self, ranks, latest):
        edge, way = Edge(0, 1), (FORWARD, BACKWARD)
        mine, theirs = way if ranks.rank == 0 else reversed(way)

        def act(communicator):
            sent = communicator.isend(torch.ones(2), edge=edge, direction=mine)
            communicator.irecv(edge=edge, direction=theirs).wait()
            sent.wait()

        buffered = P2PCommunicator(dist.group.WORLD, config())
        act(buffered)
        buffered.close()
        strict = P2PCommunicator(dist.group.WORLD, config(strict=True))
        error = caught(lambda: act(strict), latest=latest)
        assert isinstance(error, (P2PTimeoutError, P2PPeerError))
        strict.close()


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_to_open_its_lanes(ranks):
    if ranks.rank == 0:
        began = time.monotonic()
        with pytest.raises(P2PTimeoutError, match=r"rank 0 waited 1 s for opening.*P2PConfig.open_deadline") as found:
            open_lanes([BACK, THERE], config=config(open_deadline=1.0))
        assert time.monotonic() - began < LATEST
        assert (found.value.rank, found.value.peer, found.value.seconds) == (0, 1, 1.0)
        assert found.value.lane == str(THERE)  # the first in the order that all ranks have
    ranks.barrier()


@pytest.mark.ranks(2)
def test_a_peer_that_dies_while_lanes_are_opened(ranks):
    ranks.plan_fault(Fault("kill", rank=1, after=0.0))
    began = time.monotonic()
    if ranks.rank == 1:
        while True:
            time.sleep(0.01)
    with pytest.raises((P2PTimeoutError, P2PPeerError), match="rank 1|rank 0 could not open lanes 0>1"):
        open_lanes([THERE], config=config(open_deadline=2.0))
    assert time.monotonic() - began < LATEST


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
def test_the_cause_of_an_abort_reaches_every_lane_and_stays_first(ranks, communicators):
    specs = [THERE, BACK, LaneSpec(0, 1, "more")]
    with open_lanes(specs, config=config(communicators=communicators)) as lanes:
        if ranks.rank == 0:
            ranks.barrier()
            lanes.abort("rank 0, stage 1: DataEndedError: no more samples\nand where it was")
        else:
            ranks.barrier()
            for spec in (THERE, specs[2]):
                error = caught(lambda spec=spec: lanes[spec].irecv().wait())
                assert str(error).startswith("rank 0, stage 1: DataEndedError: no more samples (rank 0 ended lane 0>1")
        ranks.barrier()


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.ranks(1)
def test_an_error_whose_text_cannot_be_read_ends_the_lane_all_the_same(ranks):
    def fail(handle):
        raise NoTextError

    here = LaneSpec(0, 0)
    with open_lanes([here], config=config()) as lanes:
        lanes[here].isend(torch.ones(1)).on_done(fail)
        assert "NoTextError (its text cannot be read: RuntimeError)" in str(lanes[here].error)


@pytest.mark.ranks(2)
def test_a_forked_child_ends_without_closing_lanes_of_its_parent(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                lanes.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            assert lanes[THERE].irecv().result().tolist() == [1, 1]
