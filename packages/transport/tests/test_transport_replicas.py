"""Lanes between the pipelines of replicas: opened when a plan first needs them, in batches with the others."""

import itertools
import time

import pytest
import torch.distributed as dist

from pipegrid.core.graph import ModuleGraph
from pipegrid.core.lanes import pair_lanes, placed_stages, planned_lanes, require_edge
from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PCommunicator,
    P2PError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PTimeoutError,
    P2PUsageError,
)

from .stages import SHAPE, activation, assert_received, config, gradient, in_turn
from .two_ranks import heard, say

F, B = Direction
REPLICAS = [[0, 1], [2, 3]]
FIRST = Edge(0, 1)


def pipelines(ranks, replicas=REPLICAS, *, tensor_shape=None, placement=None, graph=None, **settings):
    """This rank's communicator, and its replica and place."""
    groups = [dist.new_group(row) for row in replicas]
    ((replica, row),) = ((number, row) for number, row in enumerate(replicas) if ranks.rank in row)
    given = {"replicas": replicas, "tensor_shape": tensor_shape, "placement": placement, "graph": graph}
    return P2PCommunicator(groups[replica], config(**settings), **given), replica, row.index(ranks.rank)


def crossing(replica, place, *pairs):
    """``sends`` and ``receives`` of this rank, where activations go from stage 0 of one replica to stage 1 of another.

    Gradients come back. ``pairs``: of replicas.
    """
    ways = {"sends": [], "receives": []}
    for source, destination in pairs:
        if (replica, place) == (source, 0):
            ways["sends"].append((FIRST, F, destination))
            ways["receives"].append((FIRST, B, destination))
        if (replica, place) == (destination, 1):
            ways["receives"].append((FIRST, F, source))
            ways["sends"].append((FIRST, B, source))
    return ways


def exchange(communicator, replica, place, source, destination, number):
    """An activation over, and a gradient back."""
    if (replica, place) == (source, 0):
        port = communicator.port_across(FIRST, F, destination)
        port.isend(activation(source, number)).wait()
        assert_received(communicator.port_across(FIRST, B, destination).irecv().result(), gradient(destination, number))
    if (replica, place) == (destination, 1):
        received = communicator.port_across(FIRST, F, source).irecv().result()
        assert_received(received, activation(source, number))
        communicator.port_across(FIRST, B, source).isend(gradient(destination, number)).wait()


MODES = pytest.mark.parametrize(
    "settings",
    [{}, {"communicators": "shared"}, {"strict": True}, {"shapes": "header"}, {"tensor_shape": SHAPE}],
    ids=str,
)
BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("default", marks=pytest.mark.ranks(4)),
        *[
            pytest.param(mode, marks=pytest.mark.ranks(4, backend="fake_nccl", fake_nccl=mode))
            for mode in ("streams", "serial")
        ],
    ],
)


@pytest.mark.few(5)
@BACKENDS
@MODES
def test_lanes_to_another_replica_open_once_and_carry_messages(ranks, backend, settings):
    communicator, replica, place = pipelines(ranks, **settings)
    assert communicator.job.replica == replica
    before = dict(communicator.lanes)
    communicator.open_across(sends=[], receives=[])
    assert communicator.lanes == before
    for pairs in ([(0, 1)], [(0, 1), (1, 0)], [(1, 0)]):
        communicator.open_across(**crossing(replica, place, *pairs))
        for number, (source, destination) in itertools.product(range(3), pairs):
            exchange(communicator, replica, place, source, destination, number)
    opened = {spec for spec in communicator.lanes if spec not in before}
    expected = {
        LaneSpec(0, 3, "forward"),
        LaneSpec(3, 0, "backward"),
        LaneSpec(2, 1, "forward"),
        LaneSpec(1, 2, "backward"),
    }
    if settings.get("communicators") == "shared":
        expected = pair_lanes(expected)
    assert opened == {spec for spec in expected if ranks.rank in spec.pair}
    assert all(communicator.lanes[spec] is lane for spec, lane in before.items())
    # The pipeline's own lanes are as they were.
    with in_turn(ranks, communicator):
        if place == 0:
            communicator.send_forward(activation(0))
            assert_received(communicator.recv_backward(SHAPE), gradient(1))
        else:
            assert_received(communicator.recv_forward(SHAPE), activation(0))
            communicator.send_backward(gradient(1))
    communicator.close()
    assert len(dist.distributed_c10d._world.pg_map) == 2  # the default group, and this rank's pipeline


@pytest.mark.few(5)
@BACKENDS
@MODES
def test_a_batch_has_lanes_of_both_kinds(ranks, backend, settings):
    """Both ranks of stage 0 send to both of stage 1; each of these sends a gradient back, in one batch."""
    communicator, replica, place = pipelines(ranks, **settings)
    communicator.open_across(**crossing(replica, place, (0, 1), (1, 0)))
    own, other = communicator.port(FIRST, F), communicator.port_across(FIRST, F, 1 - replica)
    back, other_back = communicator.port(FIRST, B), communicator.port_across(FIRST, B, 1 - replica)
    with communicator.in_order():
        for number in range(3):
            with communicator.batch():
                if place == 0:
                    sent = [own.isend(activation(replica, number)), other.isend(activation(10 + replica, number))]
                    taken = [back.irecv(), other_back.irecv()] if number else []
                else:
                    taken = [own.irecv(), other.irecv()]
                    sent = [back.isend(gradient(replica)), other_back.isend(gradient(10 + replica))] if number else []
            make = gradient if place == 0 else activation
            expected = [make(replica, 0 if place == 0 else number), make(11 - replica, 0 if place == 0 else number)]
            for handle, value in zip(taken, expected, strict=False):
                assert_received(handle.result(), value)
            for handle in sent:
                handle.wait()
    communicator.close()


@pytest.mark.ranks(4, fake_nccl="streams")  # both send first
def test_stages_on_one_rank_have_an_end_each_way(ranks):
    """In a V, stages 1 and 2 are on the same rank: activations go from it to the same place of another replica."""
    communicator, replica, place = pipelines(ranks, placement=[0, 1, 1, 0])
    edge = Edge(1, 2)
    if place == 1:
        ways = [(edge, F, 1 - replica)]
        communicator.open_across(sends=ways, receives=ways)
        port = communicator.port_across(edge, F, 1 - replica)
        sent, received = port.isend(activation(replica)), port.irecv()
        assert_received(received.result(), activation(1 - replica))
        sent.wait()
        assert {one.peer for one in communicator.neighbours_across([], [(edge, 1 - replica)])} == {4 - ranks.rank}
    communicator.close()


@pytest.mark.ranks(4)
def test_the_handshake_has_the_neighbours_in_other_replicas(ranks):
    communicator, replica, place = pipelines(ranks)
    communicator.open_across(**crossing(replica, place, (0, 1)))
    across = [(FIRST, 1 - replica)] if ranks.rank in (0, 3) else []
    neighbours = communicator.neighbours_across([FIRST], across)
    peers = {one.peer for one in neighbours}
    assert peers == {ranks.rank ^ 1} | ({3 - ranks.rank} if across else set())
    ranks.barrier()
    say(neighbours, f"plan {ranks.rank}")
    ranks.barrier()
    assert heard(neighbours) == {peer: f"plan {peer}" for peer in peers}
    communicator.close()


@pytest.mark.ranks(4)
def test_an_end_that_nobody_else_opens_is_a_timeout_and_the_pipeline_goes_on(ranks):
    communicator, replica, place = pipelines(ranks, open_deadline=1.0)
    if ranks.rank == 0:
        began = time.monotonic()
        with pytest.raises(P2PTimeoutError, match=r"0>3\[forward\]"):
            communicator.open_across(sends=[(FIRST, F, 1)], receives=[])
        assert time.monotonic() - began < 20
    if place == 0:
        communicator.send_forward(activation(replica))
    else:
        assert_received(communicator.recv_forward(SHAPE), activation(replica))
    communicator.close()


@pytest.mark.ranks(4)
def test_ends_that_open_other_lanes_are_a_mismatch_on_both(ranks):
    communicator, _, _ = pipelines(ranks)
    if ranks.rank in (0, 3):
        with pytest.raises(P2PMismatchError, match=r"0>3\[forward\]"):
            if ranks.rank == 0:
                communicator.open_across(sends=[(FIRST, F, 1)], receives=[])
            else:
                communicator.open_across(sends=[(FIRST, B, 0)], receives=[(FIRST, F, 0)])
    communicator.close()


@pytest.mark.ranks(4)
def test_an_abort_ends_lanes_to_other_replicas_as_well(ranks):
    communicator, replica, place = pipelines(ranks)
    communicator.open_across(**crossing(replica, place, (0, 1)))
    ranks.barrier()
    if ranks.rank == 3:
        communicator.abort("stage 1 of replica 1 failed")
    if ranks.rank == 0:
        with pytest.raises(P2PError, match="stage 1 of replica 1 failed"):
            communicator.port_across(FIRST, B, 1).irecv().result()
    ranks.barrier()
    communicator.close()
    if ranks.rank in (1, 2):
        with pytest.raises(P2PLaneDeadError, match="closed on this rank"):
            communicator.open_across(**crossing(replica, place, (1, 0)))


@pytest.mark.ranks(2)
def test_arguments_that_do_not_fit(ranks):
    own = dist.new_group([ranks.rank], use_local_synchronization=True)
    for replicas in ([[0]], [[0], [0, 1]], [[0], [0]], [[0, 1]], [[2], [3]], "no", [[0.5], [1]]):
        if replicas == [[0]] and ranks.rank == 0:
            continue
        with pytest.raises(P2PUsageError, match="replicas"):
            P2PCommunicator(own, config(), replicas=replicas)
    communicator = P2PCommunicator(own, config(), replicas=[[0], [1]])
    for way, error in (
        ((FIRST, F, 2), r"edge 0>1 goes to replica 2; the others than this rank's, \d, are in 0\.\.1"),
        ((FIRST, F, ranks.rank), rf"goes to replica {ranks.rank}; the others"),
        ((Edge(0, 2), F, 1 - ranks.rank), "must be an Edge of this pipeline"),
    ):
        with pytest.raises(P2PUsageError, match=error):
            communicator.open_across(sends=[way], receives=[])
    with pytest.raises(P2PUsageError, match=r"no way is open for isend of edge 0>1 forward, replica"):
        communicator.port_across(FIRST, F, 1 - ranks.rank).isend(activation(0))
    communicator.close()
    with P2PCommunicator(own, config()) as alone, pytest.raises(P2PUsageError, match=r"replicas=\[\[ranks of"):
        alone.open_across(sends=[(FIRST, F, 1)], receives=[])


BRANCHED = ModuleGraph({"images": 1, "audio": 1, "text": 1}, [("images", "text"), ("audio", "text")])


def test_stages_of_a_graph_have_a_place_each():
    assert placed_stages(None, 2, BRANCHED) == (0, 1, 0)
    assert placed_stages([0, 0, 1], 2, BRANCHED) == (0, 0, 1)
    assert placed_stages(None, 2, None) is None
    with pytest.raises(P2PUsageError, match=r"placement is \[0, 1\]; it must give the 3 stages of the graph a rank"):
        placed_stages([0, 1], 2, BRANCHED)


def test_the_lanes_of_a_graph_are_those_of_its_edges():
    edges = frozenset(BRANCHED.stage_edges)
    specs, carried = planned_lanes([5, 6, 7], (0, 1, 2), None, "separate", edges)
    ends = {(5, 7), (6, 7)}
    assert {spec.pair for spec in specs} == ends
    assert len(specs) == len(carried) == 4
    only, _ = planned_lanes([5, 6, 7], (0, 1, 2), [(Edge(0, 2), F)], "separate", edges)
    assert only == (LaneSpec(5, 7, "forward"),)
    require_edge(Edge(0, 2), (0, 1, 2), edges)
    with pytest.raises(P2PUsageError, match="the edge is 0>1; those of the graph are 0>2, 1>2"):
        require_edge(Edge(0, 1), (0, 1, 2), edges)


@pytest.mark.ranks(6)
def test_a_graph_that_branches_has_lanes_within_a_replica_and_across(ranks):
    replicas = [[0, 1, 2], [3, 4, 5]]
    communicator, replica, place = pipelines(ranks, replicas=replicas, graph=BRANCHED)
    assert communicator.job.graph == BRANCHED
    assert communicator.job.stages == (place,)
    edge = Edge(place, 2)
    if place < 2:
        communicator.open_across(sends=[(edge, F, 1 - replica)], receives=[])
        communicator.port(edge, F).isend(activation(replica, place)).wait()
        communicator.port_across(edge, F, 1 - replica).isend(activation(10 + replica, place)).wait()
    else:
        ways = [(Edge(source, 2), F, 1 - replica) for source in (0, 1)]
        communicator.open_across(sends=[], receives=ways)
        for source, (one, _, other) in enumerate(ways):
            assert_received(communicator.port(one, F).irecv().result(), activation(replica, source))
            received = communicator.port_across(one, F, other).irecv().result()
            assert_received(received, activation(10 + other, source))
        with pytest.raises(P2PUsageError, match="those of the graph are 0>2, 1>2"):
            communicator.port(Edge(0, 1), F)
    ranks.barrier()
    communicator.close()
