"""What an exchange whose shape stands costs: counted where it leaves for the backend."""

import contextlib
import random

import pytest
import torch

from pipegrid.transport import open_lanes

from .two_ranks import BACK, THERE, config, count


@pytest.mark.ranks(2, backend="gloo")  # counts calls of gloo; of device groups the fake's record of launches
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "payload", [torch.ones(3), [torch.ones(3)], torch.ones(3, dtype=torch.complex64)], ids=["plain", "list", "bytes"]
)
def test_a_steady_exchange_is_one_message_each_way_and_no_host_wait(ranks, together, payload):
    size = (payload[0] if isinstance(payload, list) else payload).nbytes
    with open_lanes([THERE, BACK], config=config()) as lanes:
        mine, theirs = (lanes[THERE], lanes[BACK]) if ranks.rank == 0 else (lanes[BACK], lanes[THERE])
        seen = []
        for lane in (mine, theirs):
            count(lane, seen)

        def exchange():
            with lanes.batch() if together else contextlib.nullcontext():
                sent, received = mine.isend(payload), theirs.irecv()
            received.wait()
            sent.wait()

        exchange()
        assert len(seen) > 4  # the headers of the first messages
        seen.clear()
        before = mine.stats, theirs.stats
        for _ in range(10):
            exchange()
        assert sorted(seen) == sorted(
            [("send", size), ("recv", size), ("wait for recv", size), ("wait for send", size)] * 10
        )
        for old, new in zip(before, (mine.stats, theirs.stats), strict=True):
            assert new.messages - old.messages == new.transfers - old.transfers == 10
            assert new.bytes - old.bytes == 10 * size
            assert new.headers == old.headers == 1
            assert new.host_syncs == old.host_syncs


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", [0, 2])
def test_stats_count_every_message_alone_or_in_a_batch_before_and_after_a_renewal(ranks, seed):
    generator = random.Random(seed)  # one order on both ranks
    with open_lanes([THERE], config=config()) as lanes:
        lane, sizes = lanes[THERE], []
        for elements in (3, 5, 5, 2):
            for _ in range(generator.randrange(1, 6)):
                with lanes.batch() if generator.random() < 0.5 else contextlib.nullcontext():
                    handle = lane.irecv() if ranks.rank else lane.isend(torch.ones(elements))
                handle.wait()
                sizes.append(4 * elements)
                assert (lane.stats.messages, lane.stats.transfers, lane.stats.bytes) == (
                    len(sizes),
                    len(sizes),
                    sum(sizes),
                )
            ranks.barrier()
            lane.renew()
