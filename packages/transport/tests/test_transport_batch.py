"""Batches: issued at their end as one, or not at all."""

import threading
from types import SimpleNamespace

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PLaneDeadError, P2PUsageError, open_lanes
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.messages.handle import State

from .two_ranks import BACK, THERE, config


class TestBatch:
    @pytest.mark.ranks(2, fake_nccl="streams")  # both send first
    @pytest.mark.parametrize("communicators", ["separate", "shared"])
    def test_is_issued_at_its_end_and_nests(self, ranks, communicators):
        with open_lanes([THERE, BACK], config=config(communicators=communicators)) as lanes:
            for n in range(3):
                started = []
                with lanes.batch():
                    with lanes.batch():
                        sent = (lanes[THERE] if ranks.rank == 0 else lanes[BACK]).isend(torch.full((2,), float(n)))
                        lanes.when_started(lambda sent=sent, started=started: started.append(sent.sequence))
                    received = (lanes[BACK] if ranks.rank == 0 else lanes[THERE]).irecv()
                    assert sent.sequence == received.sequence == -1
                    assert not sent.is_completed()
                    with pytest.raises(P2PUsageError, match=r"waited for inside the batch\(\)"):
                        received.wait()
                assert [sent.sequence] == [received.sequence] == started == [n]
                lanes.when_started(started.clear)
                assert started == []
                assert received.result().tolist() == [n, n]
                sent.wait()

    @pytest.mark.ranks(2)
    def test_that_raises_issues_nothing(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            if ranks.rank == 0:
                with pytest.raises(ZeroDivisionError), lanes.batch():
                    lane.isend(torch.zeros(2))
                    lanes.when_started(pytest.fail)
                    _ = 1 / 0
                handle = lane.isend(torch.ones(2))
                handle.wait()
                assert handle.sequence == 0
            else:
                assert lane.irecv().result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("steady", [False, True])
    def test_of_a_dead_lane_and_a_sound_one_issues_the_sound_ones_part(self, ranks, steady):
        specs = [LaneSpec(0, 1, "dies"), LaneSpec(0, 1, "lives")]
        with open_lanes(specs, config=config()) as lanes:
            dies, lives = (lanes[spec] for spec in specs)
            for _ in range(2 if steady else 0):
                for lane in (dies, lives):
                    (lane.isend(torch.zeros(2)) if ranks.rank == 0 else lane.irecv()).wait()
            ranks.barrier()
            if ranks.rank == 0:
                with pytest.raises(P2PLaneDeadError), lanes.batch():
                    lost, sent = dies.isend(torch.ones(2)), lives.isend(torch.ones(2))
                    dies.abort("while it is held")
                sent.wait()
                with pytest.raises(P2PLaneDeadError):
                    lost.wait()
            else:
                assert lives.irecv().result().tolist() == [1, 1]

    @pytest.mark.ranks(2)
    def test_of_what_was_agreed_before_a_renewal_agrees_anew(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            for n in range(2):
                (lane.isend(torch.full((2,), float(n))) if ranks.rank == 0 else lane.irecv()).wait()
            with lanes.batch():
                handle = lane.isend(torch.full((2,), 2.0)) if ranks.rank == 0 else lane.irecv()
                lane.renew()
            handle.wait()
            assert ranks.rank == 0 or handle.result().tolist() == [2, 2]
            assert lane.stats.headers == 2

    @pytest.mark.ranks(2)
    def test_keeps_the_order_of_a_lane_whatever_form_its_receives_have(self, ranks):
        with open_lanes([THERE], config=config()) as lanes:
            lane = lanes[THERE]
            for n in range(0, 8, 2):
                if ranks.rank == 0:
                    for value in (n, n + 1):
                        lane.isend(torch.full((2,), float(value))).wait()
                    continue
                with lanes.batch():
                    listed, plain = lane.irecv([(2,)]), lane.irecv((2,))
                assert listed.result()[0].tolist() == [n, n]
                assert plain.result().tolist() == [n + 1, n + 1]

    @pytest.mark.ranks(2, fake_nccl="streams")  # each starts a receive beside its send
    def test_belongs_to_its_thread(self, ranks):
        with open_lanes([THERE, BACK], config=config()) as lanes:
            mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
            with lanes.batch():
                held = mine.isend(torch.ones(2)) if ranks.rank == 0 else None
                issued = []
                thread = threading.Thread(target=lambda: issued.append(theirs.irecv()))
                thread.start()
                thread.join()
                assert issued[0].sequence == 0
                assert held is None or held.sequence == -1
            if ranks.rank == 1:
                mine.isend(torch.zeros(2)).wait()
            issued[0].wait()


@pytest.mark.parametrize(
    ("shared", "order", "calls"),
    [
        (False, "aba", ["a0", "b1", "a2"]),
        (False, "aab", ["a0 a1", "b2"]),
        (False, "ba", ["b0", "a1"]),
        (True, "aba", ["a0 a2", "b1"]),
    ],
)
def test_communicators_start_in_the_order_of_the_plan(shared, order, calls):
    # In order is what the proof covers where a GPU runs one communication kernel at a time.
    started = []

    def start(operations):
        started.append(" ".join(operations))
        return list(operations)

    def lane(name):
        mover = SimpleNamespace(start=start)
        connection = SimpleNamespace(is_shared=shared)
        return SimpleNamespace(connection=connection, spec=name, mover=mover, operation=lambda transfer: transfer.name)

    lanes = {name: lane(name) for name in "ab"}
    transfers = [
        SimpleNamespace(name=f"{name}{at}", lane=lanes[name], state=State.ACTIVE, ticket=None, stream=None)
        for at, name in enumerate(order)
    ]
    Submitter(strict=False, shares=shared).start(transfers)
    assert started == calls
    assert [transfer.ticket for transfer in transfers] == [transfer.name for transfer in transfers]


def test_a_call_on_a_shared_communicator_is_whole_beside_a_receive_that_waits_for_its_shape():
    """In order, what a batch has before such a receive starts first; the rest of its call must not come behind."""
    started = []

    def start(operations):
        started.append(" ".join(operations))
        return list(operations)

    def lane(name, shared):
        connection, mover = SimpleNamespace(is_shared=shared), SimpleNamespace(start=start)
        settled = SimpleNamespace(settle=lambda: [setattr(one, "is_ready", True) for one in transfers])
        return SimpleNamespace(
            connection=connection, spec=name, mover=mover, operation=lambda one: one.name, transfers=settled
        )

    lanes = {"a": lane("a", True), "b": lane("b", False)}
    transfers = [
        SimpleNamespace(
            name=f"{name}{at}",
            lane=lanes[name],
            state=State.ACTIVE,
            ticket=None,
            stream=None,
            is_ready=name == "a",
        )
        for at, name in enumerate("abab")
    ]
    Submitter(strict=False, shares=True)._start_in_order(transfers)
    assert started == ["a0 a2", "b1 b3"]
