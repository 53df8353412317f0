"""The reshard plan against brute force: every element, every rank, integers only."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.reshard import (
    Box,
    Message,
    Partial,
    Replicate,
    Shard,
    Sizes,
    axis_names,
    boundary_side,
    check_plan,
    plan_reshard,
    routes,
)
from pipegrid.reshard.box import shares
from pipegrid.reshard.cuts import local_shape
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.topology import HyperCommGrid, replica_samples, replica_sizes
from reshard_kit.grids import grid
from reshard_kit.pairs import DIMS, SHAPES
from reshard_kit.played import contribution, contributions, part, play

BSH = axis_names(3)


# -- brute force ------------------------------------------------------------------------------------


def inner(side, left, right):
    """The inner product of two tensors that a side holds: replicas count once, contributions to a sum each."""
    holders = {(side.class_of(rank), contribution(side, rank)): rank for rank in side.ranks}
    return sum((left[rank] * right[rank]).sum() for rank in holders.values())


def check(src, dst, sizes, strategy, *, routed):
    """All invariants of one boundary, both directions; ``routed``: cut such that lanes opened without sizes do."""
    forward = plan_reshard(src, dst, sizes, strategy=strategy, leader_below=200)
    backward = forward.adjoint()
    assert backward.adjoint() == forward
    given, taken = [], []
    for seed, plan in enumerate((forward, backward)):
        check_plan(plan)
        parts = contributions(plan.src, sizes.shape, seed=seed, most=10**6)
        held = {rank: part(parts[contribution(plan.src, rank)], plan.source_spans(rank)) for rank in plan.src.ranks}
        out = play(plan, held)
        for rank in plan.dst.ranks:
            assert torch.equal(out[rank], part(sum(parts), plan.destination_spans(rank)))
        given.append(held)
        taken.append(out)
        possible = routes(src, dst, sizes.axes, backward=plan.backward, strategy=strategy)
        assert not routed or set(plan.transfers) <= set(possible)
        crossing = sum(m.source_box.numel for m in plan.messages if m.source != m.destination)
        copied = sum(m.source_box.numel for m in plan.messages if m.source == m.destination)
        assert crossing <= math.prod(sizes.shape) <= crossing + copied  # each byte once
        for rank in {*src.ranks, *dst.ranks}:
            own = plan_reshard(src, dst, sizes, backward=plan.backward, strategy=strategy, leader_below=200, rank=rank)
            assert own.sends(rank) == plan.sends(rank)
            assert own.receives(rank) == plan.receives(rank)
            assert own.completions == tuple(c for c in plan.completions if rank in c.ranks)
    # <F x, g> == <x, B g>
    assert inner(dst, taken[0], given[1]) == inner(src, given[0], taken[1])
    if not (forward.reductions or backward.reductions) and not set(src.ranks) & set(dst.ranks):
        mirrored = sorted(Message(m.destination, m.source, m.destination_box, m.source_box) for m in forward.messages)
        assert mirrored == list(backward.messages)


# -- all pairs of small grids -----------------------------------------------------------------------

VARIANTS = [
    {"ep": Shard("b")},
    {"ep": Replicate(), "tp": Shard("s")},
    {"ep": Partial(), "cp": Shard("s", order="zigzag")},
    {"ep": Shard("h"), "cp": Partial(), "tp": Shard("s")},
    {"ep": Shard("b"), "tp": Shard("s"), "cp": Shard("s", order="zigzag")},
]
PAIRS = list(itertools.product(SHAPES, repeat=2))


def random_case(pair, seed):
    """A pair of grids with placements, lane sizes and strategy drawn from the seed."""
    rng = random.Random(f"{pair}/{seed}")
    sides = []
    for end, shape in zip(("source", "destination"), pair, strict=True):
        offset = 0 if end == "source" else rng.choice([0, 2, math.prod(pair[0])])
        order = list(zip(DIMS, shape, strict=True))
        rng.shuffle(order)
        sides.append(boundary_side(grid(offset, **dict(order)), end, placements=rng.choice(VARIANTS)))
    src, dst = sides
    kind = rng.choice(["even", "uneven", "exact", "packed", "zero"])
    lanes = [rng.randrange(4) for _ in range(src.num_lanes)]
    s, h = rng.choice([(8, 3), (5, 2)])
    cut = rng.choice(["batch", "lane"])
    if kind == "even":
        sizes = Sizes((src.num_lanes * dst.num_lanes // math.gcd(src.num_lanes, dst.num_lanes), s, h), axes=BSH)
    elif kind == "uneven":
        sizes = Sizes((sum(lanes), s, h), axes=BSH, src_lanes=lanes, cut=cut)
    elif kind == "zero":
        sizes = Sizes((0, s, h), axes=BSH)
    elif kind == "exact":
        cuts = sorted(rng.randrange(sum(lanes) + 1) for _ in range(dst.num_lanes - 1))
        out = [b - a for a, b in itertools.pairwise([0, *cuts, sum(lanes)])]
        sizes = Sizes((sum(lanes), s, h), axes=BSH, src_lanes=lanes, dst_lanes=out)
    else:
        samples = [rng.randrange(6) for _ in range(sum(lanes))]
        sizes = Sizes((sum(samples), h), axes=axis_names(2), src_lanes=lanes, samples=samples, cut=cut)
    return src, dst, sizes, kind


def check_case(pair, seed):
    src, dst, sizes, kind = random_case(pair, seed)
    # Exact lane sizes move the cuts, and so does a batch that is cut as one where it does not divide: routes made
    # without them need not contain theirs.
    routed = kind in ("even", "zero") or (kind != "exact" and sizes.cut == "lane")
    check(src, dst, sizes, ("direct", "leader", "auto")[seed % 3], routed=routed)


@pytest.mark.parametrize("seed", range(3))
def test_a_representative_part_of_all_pairs_of_grids_up_to_8_ranks(seed):
    for pair in PAIRS[seed * 7 :: 97]:
        check_case(pair, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_all_pairs_of_grids_up_to_8_ranks(seed):
    """Each pair once, element by element; `test_bridges_all_pairs` has every strategy and kind of sizes."""
    for pair in PAIRS[seed::6]:
        check_case(pair, seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(PAIRS) - 1), st.integers(0, 10**6))
def test_any_pair_with_any_sizes(index, seed):
    check_case(PAIRS[index], seed)


def test_an_uneven_batch_that_is_cut_as_one_may_need_other_lanes_than_its_lanes_cut_by_themselves():
    src, dst = boundary_side(grid(dp=2), "source"), boundary_side(grid(2, dp=8), "destination")
    possible = set(routes(src, dst, BSH))
    needed = {
        cut: set(plan_reshard(src, dst, Sizes((4, 8, 3), axes=BSH, src_lanes=(2, 2), cut=cut)).transfers)
        for cut in ("batch", "lane")
    }
    assert needed["lane"] <= possible
    assert needed["batch"] - possible == {(1, 4), (1, 5)}


# -- what the numbers are ---------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), list(itertools.product(range(1, 9), repeat=2)))
def test_copies_share_the_sending(a, b):
    src = boundary_side(grid(tp=a), "source")
    dst = boundary_side(grid(a, tp=b), "destination")
    n = math.lcm(a, b)
    plan = plan_reshard(src, dst, Sizes((2, 3, n), axes=BSH), itemsize=1)
    assert len(plan.messages) == a + b - math.gcd(a, b) == len(list(shares(a, b)))
    assert {plan.bytes_sent(rank) for rank in src.ranks} == {6 * n // a}
    assert {plan.bytes_received(rank) for rank in dst.ranks} == {6 * n // b}


def test_leaders_are_the_last_of_the_source_and_the_first_of_the_destination():
    dims = {"tp": 2, "cp": 1, "pp": 2, "dp": 2}
    src, dst = boundary_side(grid(**dims), "source"), boundary_side(grid(8, **dims), "destination")
    plan = plan_reshard(src, dst, Sizes((4, 3, 2), axes=BSH), strategy="leader")
    assert plan.transfers == ((3, 8), (7, 12))
    assert [(step.ranks, step.root) for step in plan.completions] == [((8, 9), 8), ((12, 13), 12)]
    assert plan.adjoint().transfers == ((8, 3), (12, 7))
    same = plan_reshard(src, boundary_side(grid(8, tp=2, pp=2, dp=2), "destination"), plan.sizes, strategy="leader")
    assert same.messages == plan.messages


def test_fan_in_concatenates_lanes_in_order_and_fan_out_splits_them_in_order():
    four, two = grid(dp=4), grid(4, dp=2)
    into = plan_reshard(
        boundary_side(four, "source"),
        boundary_side(two, "destination"),
        Sizes((10, 1, 1), axes=BSH, src_lanes=(1, 2, 3, 4)),
    )
    assert [into.destination_spans(rank)[0] for rank in (4, 5)] == [((0, 3),), ((3, 10),)]
    assert [(m.source, m.destination) for m in into.messages] == [(0, 4), (1, 4), (2, 5), (3, 5)]
    out = plan_reshard(
        boundary_side(grid(dp=2), "source"),
        boundary_side(grid(2, dp=4), "destination"),
        Sizes((8, 1, 1), axes=BSH),
    )
    assert [out.destination_spans(rank)[0] for rank in (2, 3, 4, 5)] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]


def test_zigzag_holds_two_chunks_and_sequence_parallel_tp_cuts_what_cp_left():
    side = boundary_side(grid(tp=2, cp=2), "source", placements={"cp": Shard("s", order="zigzag"), "tp": Shard("s")})
    plan = plan_reshard(side, boundary_side(grid(4), "destination"), Sizes((1, 16, 1), axes=BSH))
    held = {rank: plan.source_spans(rank)[1] for rank in side.ranks}
    assert held == {0: ((0, 4),), 1: ((12, 16),), 2: ((4, 8),), 3: ((8, 12),)}


def test_tp_cuts_what_cp_left_wherever_it_stands_in_the_grid():
    for dims in ({"tp": 2, "cp": 2}, {"cp": 2, "tp": 2}):
        side = boundary_side(grid(**dims), "source", placements={"tp": Shard("s")})
        assert [dim.name for dim in side.dims] == ["cp", "tp"]


def test_packed_samples_are_cut_per_sample_by_cp():
    src = boundary_side(grid(dp=2), "source")
    dst = boundary_side(grid(2, cp=2), "destination", placements={"cp": Shard("s", order="zigzag")})
    sizes = Sizes((12, 4), axes=axis_names(2), src_lanes=(1, 1), samples=(8, 4))
    plan = plan_reshard(src, dst, sizes)
    assert plan.destination_spans(2)[0] == ((0, 2), (6, 9), (11, 12))
    assert plan.destination_spans(3)[0] == ((2, 6), (9, 11))


def test_packed_lanes_are_cut_between_samples():
    src, dst = boundary_side(grid(dp=1), "source"), boundary_side(grid(1, dp=2), "destination")
    plan = plan_reshard(src, dst, Sizes((12, 4), axes=axis_names(2), samples=(1, 7, 4, 0)))
    assert [plan.destination_shape(rank) for rank in dst.ranks] == [(8, 4), (4, 4)]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["tp", "cp"]))
def test_destination_lanes_have_the_samples_that_lane_samples_says(batch, a, b, copies):
    src, dst = grid(**{copies: 2}, dp=a), grid(2 * a, **{copies: 2}, dp=b)
    sizes = Sizes((batch, 4, 2), axes=BSH, src_lanes=replica_sizes(batch, a))
    plan = plan_reshard(boundary_side(src, "source"), boundary_side(dst, "destination"), sizes)
    check_plan(plan)
    real = HyperCommGrid([2, b], [copies, "dp"], 2 * a, world_size=2 * (a + b))
    for rank in real.ranks:
        samples = replica_samples(batch, real, rank)
        rows = [row for start, stop in plan.destination_spans(rank)[0] for row in range(start, stop)]
        assert rows == list(samples)
    crossing = sum(plan.bytes_sent(rank) for rank in plan.src.ranks)
    assert crossing == batch * 4 * 2 * plan.itemsize  # each byte once


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 9))
def test_lanes_cut_by_themselves_use_the_routes_of_the_sides(lanes, b):
    src = boundary_side(grid(dp=len(lanes)), "source")
    dst = boundary_side(grid(len(lanes), dp=b), "destination")
    plan = plan_reshard(src, dst, Sizes((sum(lanes), 2, 2), axes=BSH, src_lanes=lanes, cut="lane"))
    check_plan(plan)
    assert set(plan.transfers) <= set(routes(src, dst, BSH))


def test_lane_weights_move_the_cut():
    src = boundary_side(grid(dp=2), "source", lane_weights=(3, 1))
    dst = boundary_side(grid(2, dp=2), "destination")
    plan = plan_reshard(src, dst, Sizes((8, 1, 1), axes=BSH, src_lanes=(6, 2)))
    assert [plan.destination_shape(rank)[0] for rank in dst.ranks] == [4, 4]
    assert plan.transfers == ((0, 2), (0, 3), (1, 3))


def test_a_source_rank_knows_its_cuts_from_its_own_lane():
    src, dst = boundary_side(grid(dp=3), "source"), boundary_side(grid(3, tp=2, dp=2), "destination")
    real = plan_reshard(src, dst, Sizes((11, 2, 4), axes=BSH, src_lanes=(2, 6, 3)))
    guess = plan_reshard(src, dst, Sizes((18, 2, 4), axes=BSH), rank=1)
    assert {d: [m.source_box for m in ms] for d, ms in real.sends(1).items()} == {
        d: [m.source_box for m in ms] for d, ms in guess.sends(1).items()
    }


def test_equal_sides_copy_locally():
    side = {"tp": 2, "dp": 2}
    plan = plan_reshard(
        boundary_side(grid(**side), "source"), boundary_side(grid(**side), "destination"), Sizes((4, 2, 2), axes=BSH)
    )
    assert plan.transfers == ()
    assert plan.completions == ()
    assert {(m.source, m.destination) for m in plan.messages} == {(rank, rank) for rank in range(4)}


def test_auto_leads_for_small_tensors_and_shares_large_ones():
    src, dst = boundary_side(grid(tp=2), "source"), boundary_side(grid(2, tp=4), "destination")
    small = plan_reshard(src, dst, Sizes((1, 8, 8), axes=BSH), strategy="auto", itemsize=2)
    large = plan_reshard(src, dst, Sizes((8, 512, 8), axes=BSH), strategy="auto", itemsize=2)
    assert len(small.transfers) == 1
    assert len(large.transfers) == 4
    assert set(routes(src, dst, BSH, strategy="auto")) == set(small.transfers) | set(large.transfers)


def test_a_plan_for_one_rank_of_a_large_grid_is_small():
    src = boundary_side(grid(tp=8, dp=4096), "source")
    dst = boundary_side(grid(8 * 4096, tp=4, dp=2048), "destination")
    plan = plan_reshard(src, dst, Sizes((8192, 4, 8), axes=BSH), rank=17)
    assert {m.source for m in plan.messages} == {17}
    assert len(plan.messages) == 1


# -- what is refused --------------------------------------------------------------------------------


def test_an_undeclared_dim_is_named_with_the_remedy():
    with pytest.raises(BridgeError, match=r"dim 'ep' \(size 2\).*placements"):
        boundary_side(grid(tp=2, ep=2), "source")
    assert boundary_side(grid(tp=2, ep=1), "source").ranks == (0, 1)


def test_placements_of_a_dim_that_does_not_exist():
    with pytest.raises(BridgeError, match=r"\['expert'\].*\['tp'\]"):
        boundary_side(grid(tp=2), "source", placements={"expert": Replicate()})


def test_a_sharded_axis_that_the_tensor_does_not_name():
    src, dst = boundary_side(grid(cp=2), "source"), boundary_side(grid(2), "destination")
    with pytest.raises(BridgeError, match="shards axis 's'"):
        plan_reshard(src, dst, Sizes((2, 2), axes=axis_names(2, {"b": 0, "h": 1})))


def test_lanes_that_do_not_add_up():
    with pytest.raises(BridgeError, match=r"dst_lanes=\(2, 1\) add up to 3, the batch has 4"):
        Sizes((4, 1, 1), axes=BSH, dst_lanes=(2, 1))
    with pytest.raises(BridgeError, match=r"samples=\(1, 2\) add up to 3, the batch has 4"):
        Sizes((4, 1), axes=axis_names(2), samples=(1, 2))


def test_lane_sizes_for_the_wrong_number_of_lanes():
    src, dst = boundary_side(grid(dp=2), "source"), boundary_side(grid(2, dp=2), "destination")
    with pytest.raises(BridgeError, match="has 2 replicas"):
        plan_reshard(src, dst, Sizes((4, 1, 1), axes=BSH, src_lanes=(4,)))
    with pytest.raises(BridgeError, match="has 2 replicas"):
        plan_reshard(src, dst, Sizes((4, 1, 1), axes=BSH, dst_lanes=(4,)))
    with pytest.raises(BridgeError, match=r"2 replicas and sizes \(1, 1, 1\)"):
        boundary_side(grid(dp=2), "source", lane_weights=(1, 1, 1))


def test_a_lane_of_weight_0_holds_nothing():
    src = boundary_side(grid(dp=2), "source", lane_weights=(1, 0))
    dst = boundary_side(grid(2), "destination")
    with pytest.raises(BridgeError, match="weight 0 but holds 1"):
        plan_reshard(src, dst, Sizes((2, 1, 1), axes=BSH, src_lanes=(1, 1)))


def test_a_folded_sequence_cut_by_cp_needs_the_samples():
    src, dst = boundary_side(grid(dp=2), "source"), boundary_side(grid(2, cp=2), "destination")
    with pytest.raises(BridgeError, match="give `samples`"):
        plan_reshard(src, dst, Sizes((8, 2), axes=axis_names(2)))


def test_zigzag_batch_and_unknown_names():
    src = boundary_side(grid(dp=2), "source")
    with pytest.raises(BridgeError, match="zigzag.*; replicas are contiguous blocks"):
        Shard("b", order="zigzag")
    with pytest.raises(BridgeError, match="Shard.order is 'spiral'; it must be 'contiguous' or 'zigzag'"):
        Shard("s", order="spiral")
    with pytest.raises(BridgeError, match="strategy is 'fastest'; it must be 'direct' or 'leader'"):
        plan_reshard(src, src, Sizes((4, 1, 1), axes=BSH), strategy="fastest")
    with pytest.raises(BridgeError, match="'source' or 'destination'"):
        boundary_side(grid(2), "middle")


def test_axes_are_named_once_and_inside_the_tensor():
    assert axis_names(2) == (("b", "s"), ("h",))
    assert axis_names(4, {"b": 1, "s": 0}) == (("s",), ("b",), (), ())
    with pytest.raises(BridgeError, match="no batch axis"):
        axis_names(3, {"s": 0})
    with pytest.raises(BridgeError, match="an axis that the tensor lacks"):
        axis_names(3, {"b": 3})
    with pytest.raises(BridgeError, match="fold"):
        axis_names(3, {"b": 0, "s": 1, "h": 1})
    with pytest.raises(ShapeError, match="has 2 axes"):
        Sizes((1, 2), axes=BSH)


def test_a_box_needs_one_range_per_axis():
    with pytest.raises(BridgeError, match="one start and one extent"):
        Box((0,), (1, 2))
    with pytest.raises(BridgeError, match="at least 0"):
        Box((-1,), (1,))
    assert str(Box((1, 2), (3, 4))) == "[1:4, 2:6]"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda ms: ms[1:], "a hole"),
        (lambda ms: [*ms, ms[0]], "twice"),
        (
            lambda ms: [Message(ms[0].source, ms[0].destination, ms[-1].source_box, ms[0].destination_box), *ms[1:]],
            "reads",
        ),
        (lambda ms: [Message(9, ms[0].destination, ms[0].source_box, ms[0].destination_box), *ms[1:]], "rank 9"),
    ],
)
def test_a_plan_whose_boxes_do_not_tile_is_refused(edit, text):
    from attrs import evolve

    src, dst = boundary_side(grid(dp=1), "source"), boundary_side(grid(1, dp=2, cp=2), "destination")
    plan = plan_reshard(src, dst, Sizes((4, 2, 1), axes=BSH))
    check_plan(plan)
    with pytest.raises(BridgeError, match=text):
        check_plan(evolve(plan, messages=tuple(edit(list(plan.messages)))))


def test_local_shape_counts_the_ranges():
    assert local_shape([[(0, 2), (5, 6)], []]) == (3, 0)
