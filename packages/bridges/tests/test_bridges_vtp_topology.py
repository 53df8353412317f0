"""Which rank is where when stages have different tensor-parallel sizes, and what is refused before anything is sent."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.bridges import VTPTopology
from pipegrid.bridges.vtp.topology import VTPBoundary, VTPStage
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard import Sizes, plan_reshard
from pipegrid.reshard.errors import BridgeError, ShapeError
from reshard_kit.played import play

F, B = Direction.FORWARD, Direction.BACKWARD


# -- who is where -------------------------------------------------------------------------------------


def test_ranks_are_consecutive_stage_after_stage():
    topology = VTPTopology([2, 4, 4])
    assert topology.stage_ranks == ((0, 1), (2, 3, 4, 5), (6, 7, 8, 9))
    assert topology.place_of(5) == (1, 0)
    assert [str(boundary.edge) for boundary in topology.boundaries(0)] == ["0>1", "1>2"]


def test_replicas_of_a_stage_lie_side_by_side_and_exchange_with_their_own():
    topology = VTPTopology([1, 2], dp=2)
    assert topology.stage_ranks == ((0, 1), (2, 3, 4, 5))
    assert [topology.place_of(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    (boundary,) = topology.boundaries(1)
    assert (boundary.source.ranks, boundary.destination.ranks) == ((1,), (4, 5))


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_ring_has_one_boundary_more_and_stage_0_twice(stages):
    topology = VTPTopology(range(1, stages + 1), ring=True)
    assert topology.placement == (*range(stages), 0)
    around = topology.boundaries(0)[-1]
    assert around.edge == Edge(stages - 1, stages)
    assert (around.source.ranks, around.destination.ranks) == (topology.stage_ranks[-1], (0,))


def test_ranks_may_lie_anywhere():
    topology = VTPTopology([1, 2], ranks=[[7], [3, 1]], world_size=8)
    assert topology.place_of(1) == (1, 0)
    with pytest.raises(BridgeError, match=r"rank 0 holds no stage; the stages are on ranks \(\(7,\), \(3, 1\)\)"):
        topology.place_of(0)


sizes = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@given(sizes, st.integers(1, 3))
def test_every_rank_has_one_place_and_every_place_its_ranks(tp_sizes, dp):
    topology = VTPTopology(tp_sizes, dp=dp)
    world = dp * sum(tp_sizes)
    topology.check_world(world)
    assert sorted(itertools.chain.from_iterable(topology.stage_ranks)) == list(range(world))
    for replica in range(dp):
        for index, stage in enumerate(topology.replica(replica)):
            assert len(stage.ranks) == tp_sizes[index]
            assert {topology.place_of(rank) for rank in stage.ranks} == {(index, replica)}


@pytest.mark.parametrize(
    ("ring", "stage", "is_end_stage", "receives", "sends"),
    [
        (False, 0, False, False, True),
        (False, 1, False, True, True),
        (False, 2, False, True, False),
        (True, 0, False, False, True),
        (True, 0, True, True, False),
        (True, 1, False, True, True),
        (True, 2, False, True, True),
    ],
)
def test_who_receives_and_sends_activations(ring, stage, is_end_stage, receives, sends):
    topology = VTPTopology([1, 1, 1], ring=ring)
    assert topology.receives_forward(stage, is_end_stage=is_end_stage) is receives
    assert topology.sends_forward(stage, is_end_stage=is_end_stage) is sends


# -- what is refused: the value, the rule, the remedy ---------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tp_sizes": []}, r"tp_sizes is \[\]; a chain has one stage or more, a ring two"),
        ({"tp_sizes": 4}, "tp_sizes is 4; it must be a list or tuple"),
        ({"tp_sizes": "24"}, "tp_sizes is '24'; it must be a list"),
        ({"tp_sizes": [2, 0]}, r"tp_sizes\[1\] is 0; it must be an integer of at least 1"),
        ({"tp_sizes": [2, 1.5]}, r"tp_sizes\[1\] is 1.5; it must be an integer"),
        ({"tp_sizes": [True]}, r"tp_sizes\[0\] is True; it must be an integer"),
        ({"dp": 0}, "dp is 0; it must be an integer of at least 1"),
        ({"tp_sizes": [2], "ring": True}, r"tp_sizes is \[2\]; .* a ring two"),
        ({"world_size": 8}, r"tp_sizes \[2, 4, 4\] with dp=1 need a world of 10, not of 8"),
        ({"world_size": 20}, "need a world of 10, not of 20; in a larger one .*ranks="),
        ({"ranks": [[0, 1], [2, 3, 4, 5]]}, r"ranks has 2 stages; tp_sizes \[2, 4, 4\], ring=False has 3"),
        (
            {"ranks": [[0, 1], [2, 3, 4], [6]]},
            r"stage 1 has ranks \[2, 3, 4\]; it needs tp 4 x dp 1",
        ),
        ({"ranks": [[0, 1], [1, 2, 3, 4], [6, 7, 8, 9]]}, "name a rank twice"),
        (
            {"ranks": [[0, -1], [1, 2, 3, 4], [6, 7, 8, 9]]},
            r"VTPTopology.ranks\[0\]\[1\] is -1; it must be an integer of at least 0",
        ),
        ({"ranks": 3}, "VTPTopology.ranks is 3; it must be a list or tuple"),
        ({"ranks": [[0, 1], [2, 3, 4, 5], [6, 7, 8, 12]], "world_size": 10}, "need a world of 13, not of 10"),
        ({"layout": ["Et", "tL"]}, r"layout has 2 stages; tp_sizes \[2, 4, 4\], ring=False has 3"),
        ({"layout": SimpleNamespace(stages=(("t",),) * 3), "ring": True}, "layout has 3 stages; .* ring=True has 4"),
        ({"sequence_parallel": [True]}, "sequence_parallel has 1 stages; .* has 3"),
        ({"sequence_axis": -1}, "sequence_axis is -1; it must be an integer of at least 0"),
    ],
)
def test_bad_input_is_refused_with_value_rule_and_remedy(arguments, text):
    with pytest.raises(BridgeError, match=text):
        VTPTopology(**{"tp_sizes": [2, 4, 4], **arguments})
    assert issubclass(BridgeError, ValueError)


def test_what_fits_is_taken():
    VTPTopology([2, 4, 4], layout=3, world_size=10, sequence_length=12, sequence_parallel=True)
    VTPTopology([2, 4, 4], layout=["Et", "t", "t", "tL"], ring=True)
    VTPTopology([2, 4, 4], dp=2, world_size=20)
    VTPTopology([2, 4, 4], sequence_length=7)  # nobody cuts it


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="sequence_paralel"):
        VTPTopology([2, 4], sequence_paralel=True)


# -- a boundary: each byte crosses once -----------------------------------------------------------------


def boundary(a, b, cuts=(False, False), axis=0):
    source = VTPStage("stage 0", tuple(range(a)), cuts[0])
    destination = VTPStage("stage 1", tuple(range(100, 100 + b)), cuts[1])
    return VTPBoundary(Edge(0, 1), source, destination, axis)


def held(at, stage, rank, whole):
    """What the rank holds of a tensor of the shape ``whole`` whose elements are numbered."""
    numbered = torch.arange(math.prod(whole)).view(whole)
    return numbered.chunk(stage.parts, at.axis)[stage.ranks.index(rank)] if stage.parts > 1 else numbered


def crossing(at, whole, direction):
    """The plan that moves a tensor of the shape ``whole``, of a byte per element."""
    giver, taker = at.ends(direction)
    tensor = at.tensor(direction)
    before, length, after = tensor.folded(held(at, giver, giver.ranks[0], whole).shape)
    sizes = Sizes((before, length * giver.parts, after), axes=tensor.names)
    return plan_reshard(giver.side, taker.side, sizes, itemsize=1)


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 1),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([F, B]),
)
def test_every_element_crosses_once_and_arrives_everywhere(a, b, cuts, axis, lengths, width, direction):
    at = boundary(a, b, cuts, axis)
    whole = [width, width + 1]
    whole[axis] = lengths * math.lcm(at.source.parts, at.destination.parts)
    giver, taker = at.ends(direction)
    plan = crossing(at, whole, direction)
    given = {rank: held(at, giver, rank, whole) for rank in giver.ranks}
    sent = given[giver.ranks[0]].shape
    assert sum(map(plan.bytes_sent, giver.ranks)) == math.prod(whole)
    for rank, elements in play(plan, {r: given[r].reshape(plan.source_shape(r)) for r in giver.ranks}).items():
        assert plan.receives(rank).keys() <= set(at.wiring("vtp", rank, direction).senders(F))
        expected = held(at, taker, rank, whole)
        assert at.tensor(direction).unfolded(elements.shape, sent) == expected.shape
        assert torch.equal(elements.view(expected.shape), expected)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 90))
def test_copies_share_the_sending_and_the_receiving(a, b, numel):
    at = boundary(a, b)
    plan = crossing(at, (numel,), F)
    for rank in at.source.ranks:
        receivers = at.wiring("vtp", rank, F).receivers(F)
        assert abs(plan.bytes_sent(rank) - numel / a) <= len(receivers)  # but for rounding, once per message
    for rank in at.destination.ranks:
        assert abs(plan.bytes_received(rank) - numel / b) <= len(at.wiring("vtp", rank, F).senders(F))


@pytest.mark.parametrize("cuts", [(True, True), (False, True)])
def test_a_boundary_whose_receivers_hold_parts_needs_no_gather(cuts):
    at = boundary(2, 4, cuts)
    assert crossing(at, (8, 3), F).completions == ()


def test_a_sequence_that_cannot_be_cut_is_refused():
    at = boundary(2, 4, (True, True))
    assert at.tensor(F).folded((4, 3)) == (1, 4, 3)
    with pytest.raises(ShapeError, match="a sequence of 10 cannot be cut in 4 equal parts for stage 1; pad it to 12"):
        VTPTopology([2, 4, 4], sequence_parallel=[True, True, False], sequence_length=10)
    with pytest.raises(ShapeError, match="a sequence of 6 cannot be cut in 4 equal parts for stage 1; pad it to 8"):
        at.tensor(F).check((3, 3), side=0)
    with pytest.raises(ShapeError, match=r"boundary 0>1 cuts axis 0; shape \(\) has no such axis"):
        at.tensor(F).check((), side=0)
