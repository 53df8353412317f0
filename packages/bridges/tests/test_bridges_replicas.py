"""Ways from one replica of a pipeline of modules to another: sides of one replica, bridges and lanes between two."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.bridges import BridgeCommunicator, EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.bridges.bridge.ends import BridgeEnds
from pipegrid.bridges.bridge.structure import Axes, Whole
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard import Partial, Replicate, Shard, axis_names, boundary_side, replica_side, routes
from pipegrid.reshard.errors import BridgeError
from pipegrid.transport import P2PConfig, P2PLaneDeadError, P2PUsageError
from reshard_kit.grids import coords_of, grid

F, B = Direction.FORWARD, Direction.BACKWARD

SIZES = st.tuples(st.permutations(["tp", "cp", "dp"]), st.integers(1, 2), st.integers(1, 2))


@given(st.integers(1, 3), SIZES, SIZES, st.sampled_from([Replicate(), Partial(), Shard("h"), Shard("s")]))
def test_the_sides_of_replicas_are_the_parts_of_the_whole(dp, source, destination, tp):
    """Their ranks are those of each replica, and together they send what all replicas send where each is alone."""
    offset, both = 0, []
    for end, (order, *sizes) in (("source", source), ("destination", destination)):
        dims = dict(zip(("tp", "cp"), sizes, strict=True)) | {"dp": dp}
        one = grid(offset, **{name: dims[name] for name in order})
        side = boundary_side(one, end, placements={"tp": tp})
        parts = [replica_side(side, replica) for replica in range(dp)]
        for replica, part in enumerate(parts):
            assert part.ranks == tuple(rank for rank in side.ranks if coords_of(one, rank)["dp"] == replica)
            assert part.num_lanes == 1
            for axis in ("s", "h"):
                assert [part.shard_of(rank, axis) for rank in part.ranks] == [
                    side.shard_of(rank, axis) for rank in part.ranks
                ]
        both.append((side, parts))
        offset += dp * sizes[0] * sizes[1]
    (src, sources), (dst, destinations) = both
    for backward, rank in itertools.product((False, True), range(offset)):
        ways = {"axes": axis_names(3), "backward": backward, "strategy": "direct", "rank": rank}
        alone = [set(routes(a, b, **ways)) for a, b in zip(sources, destinations, strict=True)]
        assert set().union(*alone) == set(routes(src, dst, **ways))


@pytest.mark.parametrize(
    ("dims", "options", "text"),
    [
        ({"dp": 2}, {"placements": {"dp": Replicate()}}, "only 'dp' may share out the batch"),
        ({"dp": 2, "ep": 2}, {"placements": {"ep": Shard("b")}}, "only 'dp' may share out the batch"),
        ({"dp": 2}, {"lane_weights": (1, 2)}, "in equal parts"),
    ],
)
def test_a_side_without_like_replicas_is_an_error(dims, options, text):
    with pytest.raises(BridgeError, match=text):
        replica_side(boundary_side(grid(**dims), "source", **options), 0)


def test_a_replica_that_is_not_there_is_an_error():
    assert replica_side(boundary_side(grid(tp=2), "source"), 0).ranks == (0, 1)
    with pytest.raises(BridgeError, match=r"replicas 0\.\.1, not 2"):
        replica_side(boundary_side(grid(dp=2), "source"), 2)


def ends(shape, replicas, directions=None):
    options = EdgeOptions(shape=shape)
    given = {"tensor_ndim": 3, "label": None, "directions": directions, "stage_dim": "pp", "stages": (None, None)}
    return BridgeEnds(0, (grid(dp=2), grid(2, dp=2)), ("a", "b"), options, replicas=replicas, **given)


def test_a_declared_shape_is_that_of_one_replica():
    assert ends((4, None, 6), (0, 1)).options.shape == (2, None, 6)
    assert ends((4, None, 6), None).options.shape == (4, None, 6)
    assert str(ends(None, (0, 1))) == "bridge a>b@0>1"
    with pytest.raises(BridgeError, match="its batch, 3, is to be shared by 2 replicas"):
        ends((3, 2, 6), (0, 1))


def test_directions_may_be_an_iterator():
    every = ends(None, None, Direction)
    assert every.carries_gradients
    assert ends(None, None, iter(Direction)).lane_specs == every.lane_specs == ends(None, None).lane_specs


# -- on ranks -----------------------------------------------------------------------------------------

GRIDS = {"a": grid(0, dp=2, pp=2), "b": grid(4, tp=2, dp=2)}
INSIDE, BETWEEN = Edge(0, 1), Edge(1, 2)


def connect(grids=GRIDS, **options):
    config = P2PConfig(deadline=20.0, open_deadline=20.0, variable_seq_lengths=True, **options)
    payload = {"x": Axes("b", "s", "h"), "n": Whole()}
    edges = {("a", "b"): EdgeOptions(payload=payload, comm_dtype=torch.float32)}
    return MultiModulePipelineCommunicator(grids, {"a": ["b"]}, config, edges=edges, replicas=True)


def made(replica, number):
    x = torch.arange(2.0 * (number + 1) * 3).view(2, number + 1, 3) + 100 * replica
    return {"x": x.double().requires_grad_(), "n": torch.tensor(number)}


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"communicators": "shared"}], ids=str)
def test_a_payload_goes_to_all_ranks_of_another_replica_and_its_gradient_comes_back(ranks, options):
    communicator = connect(**options)
    rank, replica = ranks.rank, ranks.rank % 2 if ranks.rank < 4 else (ranks.rank - 4) // 2
    assert communicator.job.replica == replica
    before = dict(communicator.lanes)
    other, last = 1 - replica, {2, 3}
    ways = [(BETWEEN, F, other)], [(BETWEEN, B, other)]
    sends, receives = ways if rank in last else ways[::-1] if rank >= 4 else ([], [])
    for _ in range(2):  # a second time opens nothing
        communicator.open_across(sends=sends, receives=receives)
    if rank in last:
        port, back = communicator.port_across(BETWEEN, F, other), communicator.port_across(BETWEEN, B, other)
        for number in (0, 2, 1):
            port.isend(made(replica, number)).wait()
        for number in (0, 2, 1):
            gradient = back.irecv().result()
            torch.testing.assert_close(gradient["x"], 2 * made(replica, number)["x"].detach(), rtol=0, atol=0)
    if rank >= 4:
        port, back = communicator.port_across(BETWEEN, F, other), communicator.port_across(BETWEEN, B, other)
        got = [port.irecv().result() for _ in range(3)]
        for number, payload in zip((0, 2, 1), got, strict=True):
            torch.testing.assert_close(payload["x"], made(other, number)["x"])
            assert payload["n"].item() == number
            back.isend({"x": 2 * payload["x"].detach(), "n": None}).wait()
    peers = {one.peer for one in communicator.neighbours_across([], [(BETWEEN, other)])} if rank > 1 else set()
    assert peers == ({4 + 2 * other, 5 + 2 * other} if rank in last else {2 + other} if rank >= 4 else set())
    assert all(communicator.lanes[spec] is lane for spec, lane in before.items())
    # Within the replica as before.
    if rank in last:
        communicator.isend(made(replica, 1), edge=BETWEEN, direction=F).wait()
    if rank >= 4:
        payload = communicator.irecv(edge=BETWEEN, direction=F).result()
        torch.testing.assert_close(payload["x"], made(replica, 1)["x"])
    ranks.barrier()
    communicator.close()
    if sends:
        with pytest.raises((P2PLaneDeadError, P2PUsageError)):
            communicator.open_across(sends=[(BETWEEN, F, 1 - replica)] if rank in last else [], receives=receives)
            communicator.port_across(BETWEEN, F, 5)


@pytest.mark.ranks(8)
def test_inside_a_module_lanes_lead_to_the_same_place_of_another_replica(ranks):
    communicator, rank = connect(), ranks.rank
    replica = rank % 2
    if rank < 2:
        communicator.open_across(sends=[(INSIDE, F, 1 - replica)], receives=[(INSIDE, B, 1 - replica)])
        communicator.port_across(INSIDE, F, 1 - replica).isend(torch.full((3,), float(rank))).wait()
        assert communicator.port_across(INSIDE, B, 1 - replica).irecv().result().tolist() == [10.0 + 3 - rank] * 3
        with pytest.raises(P2PUsageError, match="no way is open for irecv of edge 0>1 forward, replica"):
            communicator.port_across(INSIDE, F, 1 - replica).irecv()
    elif rank < 4:
        communicator.open_across(sends=[(INSIDE, B, 1 - replica)], receives=[(INSIDE, F, 1 - replica)])
        assert communicator.port_across(INSIDE, F, 1 - replica).irecv().result().tolist() == [float(1 - replica)] * 3
        communicator.port_across(INSIDE, B, 1 - replica).isend(torch.full((3,), 10.0 + rank)).wait()
        with pytest.raises(P2PUsageError, match=r"edge 1>2 goes to replica 2; .* are in 0\.\.1"):
            communicator.open_across(sends=[(BETWEEN, F, 2)], receives=[])
    ranks.barrier()
    communicator.close()


@pytest.mark.ranks(3)
def test_modules_with_other_numbers_of_replicas_are_an_error_on_every_rank(ranks):
    with pytest.raises(BridgeError, match=r"replicas=True, and the modules have dp \{'a': 1, 'b': 2\}"):
        connect({"a": grid(0), "b": grid(1, dp=2)})
    ranks.barrier()


@pytest.mark.ranks(2)
def test_without_replicas_a_unit_that_moves_names_the_argument(ranks):
    grids = {"a": grid(0), "b": grid(1)}
    with MultiModulePipelineCommunicator(grids, {"a": ["b"]}, P2PConfig(open_deadline=20.0)) as communicator:
        with pytest.raises(P2PUsageError, match=r"MultiModulePipelineCommunicator\(\.\.\., replicas=True\)"):
            communicator.open_across(sends=[(Edge(0, 1), F, 1)], receives=[])
        ranks.barrier()


@pytest.mark.ranks(4)
def test_a_bridge_of_two_replicas_alone(ranks):
    bridge = BridgeCommunicator(grid(dp=2), grid(2, dp=2), replicas=(0, 1))
    assert (bridge.is_source, bridge.is_destination) == (ranks.rank == 0, ranks.rank == 3)
    if ranks.rank == 0:
        bridge.send_forward(torch.ones(1, 2, 3))
    if ranks.rank == 3:
        assert bridge.recv_forward().tolist() == torch.ones(1, 2, 3).tolist()
    ranks.barrier()
    bridge.destroy()
