"""A small all-gather, by messages between ranks."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipegrid.testing import Fault
from pipegrid.transport.backends.wire import cut_all_connections
from pipegrid.transport.collectives.small_all_gather import MOST, SmallAllGather
from pipegrid.transport.collectives.waiting import finish


def posted(group):
    gather = SmallAllGather(group)
    gather.post()
    return gather


@pytest.mark.ranks(3)
def test_numbers_come_to_all_ranks_however_far_one_is_ahead(ranks):
    group = dist.group.WORLD
    ahead = [posted(group) for _ in range(3)] if ranks.rank == 1 else None
    for turn in range(3):
        gather = posted(group) if ahead is None else ahead[turn]
        numbers = [float(10 * turn + ranks.rank), -math.inf, math.nan][: 1 + turn]
        gather.send(numbers if turn else numbers * MOST)
        assert finish(gather, group, on_device=False, end=time.monotonic() + 20) is None
        assert gather.is_completed()
        assert not gather.missing()
        found = gather.here()
        assert [row[0] for row in found] == [10.0 * turn, 10.0 * turn + 1, 10.0 * turn + 2]
        assert {len(row) for row in found} == {1 + turn if turn else MOST}


@pytest.mark.ranks(2)
def test_their_memory_is_used_again(ranks):
    gather = SmallAllGather(dist.group.WORLD)
    for turn in range(50):
        assert gather.ended is True
        gather.post()
        assert gather.ended is False
        gather.send([float(turn)] * (1 + turn % MOST))
        assert gather.wait(timedelta(seconds=20))
        assert gather.wait(timedelta(seconds=20))  # at once: a cut of the group asks each work for its result
        assert gather.here() == [[float(turn)] * (1 + turn % MOST)] * 2


@pytest.mark.ranks(3)
def test_memory_tells_who_is_missing_also_behind_a_wait_that_was_late(ranks):
    group = dist.new_group([0, 1, 2], timeout=timedelta(minutes=10))
    gather = posted(group)
    if ranks.rank != 2:
        gather.send([1.0])
        limit = time.monotonic() + 20
        while gather.missing() != [2] and time.monotonic() < limit:
            time.sleep(0.001)
        assert gather.missing() == [2]
        assert gather.here() == [[1.0], [1.0]]
    ranks.barrier()
    if ranks.rank != 2:  # the end of one wait is not that of the other, which can name who is missing as well
        began, seconds = time.monotonic(), 0.3 + ranks.rank
        failed = finish(gather, group, on_device=False, end=began + seconds)
        assert failed is not None
        assert failed.why == "late"
        assert seconds - 0.1 < time.monotonic() - began < 10
        assert gather.missing() == [2]
        assert not gather.is_completed()
    ranks.barrier()


@pytest.mark.ranks(2)
def test_a_wait_that_gloo_ends_a_moment_early_is_late(ranks, monkeypatch):
    """Its clock has whole milliseconds: a wait of 300 ms was seen to end after 299.5, and a rank was called lost."""
    gather = posted(dist.new_group([0, 1], timeout=timedelta(minutes=10)))
    if ranks.rank == 0:
        gather.send([1.0])
        now, seconds = time.monotonic(), 0.3
        clock = iter([now, now])  # then the end of the first wait
        monkeypatch.setattr(time, "monotonic", lambda: next(clock, now + seconds - 5e-4))
        with pytest.raises(RuntimeError):
            gather.wait(timedelta(seconds=seconds))
        monkeypatch.undo()
        assert gather.ended is False
        assert gather.missing() == [1]
    ranks.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_ends_is_lost_at_once(ranks):
    ranks.plan_fault(Fault("kill", rank=1, at="here"))
    gather = posted(dist.group.WORLD)
    ranks.barrier()
    ranks.reach("here")
    gather.send([1.0])
    began = time.monotonic()
    failed = finish(gather, dist.group.WORLD, on_device=False, end=began + 60)
    assert failed is not None
    assert failed.why == "lost"
    assert time.monotonic() - began < 10
    assert gather.missing() == [1]


@pytest.mark.ranks(2)
def test_numbers_that_have_come_count_also_where_a_rank_has_closed_its_connections(ranks):
    group = dist.new_group([0, 1], timeout=timedelta(minutes=10))
    gather = posted(group)
    ranks.barrier()
    gather.send([float(ranks.rank)])
    limit = time.monotonic() + 20
    while gather.missing() and time.monotonic() < limit:
        time.sleep(0.001)
    ranks.barrier()
    if ranks.rank == 1:
        cut_all_connections(group)
    ranks.barrier()
    assert gather.end()
    assert gather.here() == [[0.0], [1.0]]
    again = posted(group)
    with pytest.raises(RuntimeError):
        again.wait(timedelta(seconds=20))
