"""Group specs, and why the order of creation cannot deadlock."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.topology import GridError, GroupSpec, creation_order

CYCLE = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}


def create_members_only(programs):
    """Run every rank's creations, each blocking until all members are at it; the ranks that stay stuck."""
    left = {rank: list(groups) for rank, groups in programs.items()}
    moved = True
    while moved:
        moved = False
        for groups in list(left.values()):
            if groups and all(left[member][:1] == groups[:1] for member in groups[0].ranks):
                done = groups[0]
                for member in done.ranks:
                    left[member].pop(0)
                moved = True
    return {rank for rank, groups in left.items() if groups}


def test_the_cycle_deadlocks_in_each_ranks_own_order_and_not_in_creation_order():
    specs = {rank: [GroupSpec(ranks, "pair") for ranks in pairs] for rank, pairs in CYCLE.items()}
    assert create_members_only(specs) == {0, 1, 2}
    assert create_members_only({rank: creation_order(groups) for rank, groups in specs.items()}) == set()


@st.composite
def jobs(draw):
    world = draw(st.integers(1, 8))
    ranks = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    groups = st.lists(st.builds(GroupSpec, ranks, st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=20)
    return world, draw(groups)


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_no_rank_gets_stuck_whatever_the_groups_and_however_each_rank_lists_its_own(job, shuffler):
    world, specs = job
    programs = {}
    for rank in range(world):
        own = [spec for spec in specs if rank in spec.ranks]
        shuffler.shuffle(own)
        programs[rank] = creation_order(own)
    assert create_members_only(programs) == set()


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_the_order_is_total_and_a_function_of_the_specs_alone(job):
    _, specs = job
    ordered = creation_order(specs)
    assert len(ordered) == len(set(specs)) == len({spec.order_key for spec in ordered})
    shuffled = random.Random(0).sample(specs, len(specs))
    assert creation_order(shuffled) == ordered
    some = specs[::2]
    assert creation_order(some) == tuple(spec for spec in ordered if spec in some)


def test_ranks_are_kept_in_group_rank_order():
    assert GroupSpec([3, 1, 2], "lane").ranks == (3, 1, 2)
    assert GroupSpec(range(2, 8, 2), "lane").ranks == (2, 4, 6)
    assert GroupSpec([1], "a") == GroupSpec((1,), "a", shared=True) != GroupSpec((1,), "a", shared=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([], "lane"), r"group 'lane' has ranks \(\); give global ranks, each once"),
        (([1, -2], "lane"), r"ranks\[1\] is -2; it must be an integer of at least 0"),
        ((range(-1, 2), "lane"), r"group 'lane' has ranks \(-1, 0, 1\)"),
        (([1, 2, 1, 2], "lane"), r"group 'lane' has ranks \(1, 2, 1, 2\); give global ranks, each once"),
        (([1.5], "lane"), r"ranks\[0\] is 1.5; it must be an integer of at least 0"),
        ((3, "lane"), "ranks is 3; it must be a list or tuple"),
        (([1], ""), "GroupSpec.label is ''; it must be a string that is not empty"),
        (([1], None), "GroupSpec.label is None"),
    ],
)
def test_a_spec_that_is_none_says_why(arguments, text):
    with pytest.raises(GridError, match=text) as caught:
        GroupSpec(*arguments)
    assert isinstance(caught.value, ValueError)
