"""Which share of the batch a rank works on."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.topology import (
    GridError,
    HyperCommGrid,
    replica_bounds,
    replica_of,
    replica_samples,
    replica_sizes,
)


def test_a_rank_works_on_the_replica_of_its_dp_coordinate():
    grid = HyperCommGrid([2, 3, 2], ["tp", "dp", "pp"], 4, world_size=16)
    assert [replica_of(grid, rank) for rank in (4, 5, 6, 8, 10, 15)] == [(0, 3), (0, 3), (1, 3), (2, 3), (0, 3), (2, 3)]
    assert replica_of(HyperCommGrid([2], ["tp"], world_size=2), 1) == (0, 1)


def test_further_dims_may_be_replicas():
    grid = HyperCommGrid([2, 3], ["ep", "dp"], world_size=6)
    assert [replica_of(grid, rank, dims=("dp", "ep", "other")) for rank in range(6)] == [
        (replica, 6) for replica in range(6)
    ]


@given(st.integers(0, 100), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_replicas_share_all_samples_as_evenly_as_can_be(samples, replicas):
    sizes = replica_sizes(samples, replicas)
    assert len(sizes) == replicas
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_the_first_replicas_have_one_sample_more():
    assert replica_bounds(10, 4) == (0, 3, 6, 8, 10)
    assert replica_bounds(2, 3) == (0, 1, 2, 2)
    assert replica_bounds(0, 2) == (0, 0, 0)


@given(st.integers(0, 100), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_bounds_sizes_and_samples_are_one_contract(samples, replicas):
    bounds = replica_bounds(samples, replicas)
    grid = HyperCommGrid([replicas], ["dp"], world_size=replicas)
    assert [replica_samples(samples, grid, replica) for replica in range(replicas)] == [
        range(*pair) for pair in itertools.pairwise(bounds)
    ]
    assert replica_sizes(samples, replicas) == tuple(stop - start for start, stop in itertools.pairwise(bounds))
    assert all(start >= samples * replica / replicas for replica, start in enumerate(bounds))  # first replicas larger


@given(st.integers(0, 40), st.permutations([("tp", 2), ("dp", 3), ("pp", 2)]))
@settings(max_examples=40, deadline=None)
def test_the_replicas_of_a_grid_take_consecutive_blocks_that_cover_the_batch(samples, dims):
    grid = HyperCommGrid([size for _, size in dims], [name for name, _ in dims], world_size=12)
    blocks = {replica_of(grid, rank)[0]: list(replica_samples(samples, grid, rank)) for rank in grid.ranks}
    assert [sample for replica in range(3) for sample in blocks[replica]] == list(range(samples))
    for group in grid.get_rank_enum(["tp", "pp"]):
        assert len({replica_samples(samples, grid, rank) for rank in group}) == 1


def test_uneven_shares_may_be_given():
    grid = HyperCommGrid([3], ["dp"], world_size=3)
    assert [replica_samples(10, grid, rank, sizes=(7, 0, 3)) for rank in range(3)] == [
        range(7),
        range(7, 7),
        range(7, 10),
    ]


def test_shares_that_do_not_fit_are_errors():
    grid = HyperCommGrid([3], ["dp"], world_size=3)
    for sizes in ((5, 5), (5, 4, 2)):
        with pytest.raises(GridError, match="do not share 10 samples among 3 replicas"):
            replica_samples(10, grid, 0, sizes=sizes)
    with pytest.raises(GridError, match=r"sizes\[2\] is -1; it must be an integer of at least 0"):
        replica_samples(10, grid, 0, sizes=(11, 0, -1))
    with pytest.raises(GridError, match="num_samples is -1"):
        replica_sizes(-1, 2)
    with pytest.raises(GridError, match="replicas is 0; it must be an integer of at least 1"):
        replica_sizes(1, 0)
    with pytest.raises(GridError, match="rank 3 is not in the ranks of"):
        replica_of(grid, 3)
