"""Lanes of several peers on one communicator: what shares, how it opens, how its batches match, and how it ends."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.lanes import LaneSharing, PositionLane, carried_lanes, communicators_of, pipeline_lanes
from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PCommunicator,
    P2PConfig,
    P2PError,
    P2PMismatchError,
    P2PTimeoutError,
    P2PUsageError,
)

from .two_ranks import config, until

F, B = Direction
LANES = st.builds(PositionLane, st.integers(0, 6), st.integers(0, 6), st.sampled_from(Direction)).filter(
    lambda lane: lane.source != lane.destination
)
PLACED = st.dictionaries(LANES, st.integers(0, 3), max_size=12)
CHAIN = [PositionLane(0, 1, F), PositionLane(1, 0, B), PositionLane(1, 2, F), PositionLane(2, 1, B)]


def by_number(placed):
    return [[lane for lane in placed if placed[lane] == number] for number in range(4)]


def reach(lane, lanes):
    """The lanes that ``lane`` leads to by common ends."""
    found, size = {lane}, 0
    while len(found) != size:
        size = len(found)
        ends = {end for one in found for end in (one.source, one.destination)}
        found |= {one for one in lanes if {one.source, one.destination} & ends}
    return found


@given(PLACED, st.randoms(use_true_random=False))
def test_lanes_share_where_they_have_one_number_and_lead_to_each_other(placed, chance):
    sharing = LaneSharing(by_number(placed))
    expected = {frozenset(reach(lane, [one for one in placed if placed[one] == placed[lane]])) for lane in placed}
    assert set(map(frozenset, sharing.communicators)) == expected
    names = chance.sample(range(4), 4)  # whatever the numbers
    assert sharing == LaneSharing(by_number({lane: names[number] for lane, number in placed.items()}))
    assert hash(sharing) == hash(LaneSharing(sharing.communicators[::-1]))
    for number, (lanes, members) in enumerate(zip(sharing.communicators, sharing.members, strict=True)):
        assert {sharing.numbers[lane] for lane in lanes} == {number}
        assert set(members) == {end for lane in lanes for end in (lane.source, lane.destination)}


@given(st.integers(2, 5), st.sampled_from(["separate", "shared", "all", "directions"]), st.integers(0, 9))
def test_each_lane_has_one_communicator(count, kind, first):
    ranks = range(first, first + count)
    specs = pipeline_lanes(ranks)
    carried = carried_lanes(ranks, specs)
    groups = {
        "all": [[*carried.values()]],
        "directions": [[v for v in carried.values() if v.direction is d] for d in (F, B)],
    }
    bundles = communicators_of(specs, LaneSharing(groups[kind]) if kind in groups else kind, carried)
    assert sorted(lane for bundle in bundles for lane in bundle) == sorted(specs)
    assert (
        len(bundles)
        == {"all": 1, "directions": 2, "separate": len(specs), "shared": len({s.pair for s in specs})}[kind]
    )
    assert all(list(bundle) == sorted(bundle) for bundle in bundles)


def test_mistakes():
    twice = [[CHAIN[0]], [CHAIN[0], CHAIN[1]]]
    with pytest.raises(P2PUsageError, match=r"lane F0>1 is on two communicators; each lane has one"):
        LaneSharing(twice)
    with pytest.raises(P2PUsageError, match=r"communicators is 'both'; it must be 'separate' or 'shared', or what"):
        P2PConfig(communicators="both")
    specs = [LaneSpec(0, 1, "a"), LaneSpec(0, 1, "b")]
    with pytest.raises(P2PUsageError, match=r"lanes 0>1\[a\] and 0>1\[b\] both carry lane F0>1"):
        communicators_of(specs, LaneSharing([CHAIN]), dict.fromkeys(specs, CHAIN[0]))
    with pytest.raises(P2PUsageError, match=r"communicators has B1>0, .* of a plan, but lane 0>1\[a\] carries F0>1"):
        communicators_of(specs[:1], LaneSharing([CHAIN[1:]]), {specs[0]: CHAIN[0]})
    with pytest.raises(P2PUsageError, match=r"but lane 0>1\[a\] carries no lane of a plan"):
        communicators_of(specs[:1], LaneSharing([CHAIN]), {})


def chain(ranks, sharing, **settings):
    """A communicator of three ranks in a row."""
    settings = {"pipeline_dtype": torch.float32, "communicators": sharing, **settings}
    return P2PCommunicator(dist.group.WORLD, config(**settings), device=ranks.device)


@pytest.mark.ranks(3)
def test_the_communicators_of_a_plan_and_no_others_are_opened(ranks):
    before = len(dist.distributed_c10d._world.pg_map)
    with chain(ranks, LaneSharing([CHAIN])) as pipe:
        groups = {lane.group for lane in pipe.lanes.values()}
        assert [group.size() for group in groups] == [3]
        controls = ranks.backend in ("fake_nccl", "nccl")
        assert len(dist.distributed_c10d._world.pg_map) == before + 1 + controls
        assert len(pipe.lanes) == (2, 4, 2)[ranks.rank]
        ranks.barrier()
    with pytest.raises(P2PUsageError, match="communicators has lane F0>2 of a plan.*no neighbours in the pipeline"):
        P2PCommunicator(
            dist.group.WORLD, config(communicators=LaneSharing([[PositionLane(0, 2, F)]])), placement=(0, 1, 2)
        )


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="legacy")
def test_a_communicator_of_three_that_connects_at_its_first_operation_opens(ranks):
    """That operation waits for all members; lanes are proved pair by pair, the last rank's after the first rank's."""
    with chain(ranks, LaneSharing([CHAIN]), open_deadline=20.0) as pipe:
        (group,) = {lane.group for lane in pipe.lanes.values()}
        launched = [launch.kind for launch in ranks.fake_device.launches if launch.group == group.group_name]
        assert launched == ["allreduce", *["p2p"] * len(pipe.lanes)]
        ranks.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"shapes": "header"}, {"staged": True}], ids=str)
def test_random_batches_with_several_peers_arrive_in_order(ranks, settings):
    """Each round is a batch of random lanes of all three ranks; each rank lists its ends in an order of its own."""
    chance, mine = random.Random(1), random.Random(ranks.rank)
    edges = [(Edge(0, 1), F), (Edge(0, 1), B), (Edge(1, 2), F), (Edge(1, 2), B)]
    with chain(ranks, LaneSharing([CHAIN]), **settings) as pipe:
        for number in range(30):
            used = [way for way in edges if chance.random() < 0.7]
            here = [way for way in used if ranks.rank in (way[0].source, way[0].destination)]
            received = []
            with pipe.batch():
                for edge, direction in mine.sample(here, len(here)):
                    value = float(100 * number + 10 * edge.source + (direction is B))
                    sender = edge.source if direction is F else edge.destination
                    if ranks.rank == sender:
                        pipe.isend(torch.full((3,), value, device=ranks.device), edge=edge, direction=direction)
                    else:
                        received.append((pipe.irecv(edge=edge, direction=direction), value))
            for handle, value in received:
                assert handle.result().tolist() == [value] * 3
        ranks.barrier()


@pytest.mark.ranks(3)
def test_ranks_that_disagree_make_no_group(ranks):
    """Ranks 0 and 2 are no neighbours, and both are members of what rank 1 opens."""
    before = len(dist.distributed_c10d._world.pg_map)
    sharing = LaneSharing([CHAIN]) if ranks.rank < 2 else LaneSharing([CHAIN[:2], CHAIN[2:]])
    error = P2PTimeoutError if ranks.rank == 0 else P2PMismatchError
    differs = (
        "no answer from rank 1",
        r"ranks 1 and 2 open lanes with different settings.*of ranks \[0, 1, 2\].*of ranks \[1, 2\]",
        r"ranks 2 and 1 open lanes with different settings.*of ranks \[1, 2\].*of ranks \[0, 1, 2\]",
    )
    ranks.barrier()
    with pytest.raises(error, match=differs[ranks.rank]):
        chain(ranks, sharing, open_deadline=6.0)
    assert len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.ranks(3)
def test_all_lanes_of_a_communicator_end_together_with_the_cause_on_all_ranks(ranks):
    """Rank 0 ends its lanes to rank 1; rank 2 has no lane to it."""
    pipe = chain(ranks, LaneSharing([CHAIN]))
    ranks.barrier()
    start = time.monotonic()
    if ranks.rank == 0:
        pipe.abort("the disk is full")
        lanes = list(pipe.lanes.values())
    else:
        ways = {1: (Edge(0, 1), F), 2: (Edge(1, 2), F)}
        with pytest.raises(P2PError, match="the disk is full.*rank 0"):
            pipe.irecv(edge=ways[ranks.rank][0], direction=F).result()
        lanes = list(pipe.lanes.values())
        until(lambda: all(lane.error is not None for lane in lanes))
    assert all("the disk is full" in str(lane.error) for lane in lanes)
    assert time.monotonic() - start < 10
    ranks.barrier()
    pipe.close()


@pytest.mark.ranks(3)
@pytest.mark.fault("kill", rank=0, at="kill")
def test_a_member_that_dies_is_named_on_ranks_that_have_no_lane_to_it(ranks):
    pipe = chain(ranks, LaneSharing([CHAIN]))
    ranks.reach("kill")
    way = (Edge(0, 1), F) if ranks.rank == 1 else (Edge(1, 2), F)
    with pytest.raises(P2PError, match="rank 1 lost rank 0"):
        pipe.irecv(edge=way[0], direction=F).result()
    pipe.close()


@pytest.mark.ranks(3)
def test_one_member_closes_while_two_go_on(ranks):
    pipe = chain(ranks, LaneSharing([CHAIN]))
    ranks.barrier()
    if ranks.rank == 0:
        pipe.close()
    else:
        time.sleep(0.5)
        if ranks.rank == 1:
            pipe.isend(torch.ones(2, device=ranks.device), edge=Edge(1, 2), direction=F).wait()
        else:
            assert pipe.irecv(edge=Edge(1, 2), direction=F).result().tolist() == [1, 1]
        pipe.close()
