"""Enumeration is what brute force says, for every small shape and for random large ones."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.topology import GridError
from pipegrid.topology.grid import Grid, Relation, make_view, relation

NAMES = ("tp", "cp", "ep", "dp", "pp", "sp", "xp")


def factorizations(number):
    """Every ordered list of factors of at least 2 with this product."""
    if number == 1:
        yield ()
    for factor in range(2, number + 1):
        if number % factor == 0:
            for rest in factorizations(number // factor):
                yield (factor, *rest)


def with_ones(shape):
    """The shape, and the shape with a dimension of size one at each place."""
    yield shape
    for place in range(len(shape) + 1):
        yield (*shape[:place], 1, *shape[place:])


SMALL_SHAPES = sorted(
    {bare for size in range(2, 65) for bare in factorizations(size)}
    | {shape for size in range(1, 33) for bare in factorizations(size) for shape in with_ones(bare) if shape}
)


def brute_force(shape, names, offset, dims):
    """Ranks with equal coordinates outside ``dims``, by counting through all coordinates, first fastest."""
    groups = {}
    for local, reversed_coords in enumerate(itertools.product(*(range(size) for size in reversed(shape)))):
        coords = dict(zip(names, reversed(reversed_coords), strict=True))
        fixed = tuple(coords[name] for name in names if name not in dims)
        groups.setdefault(fixed, []).append(offset + local)
    return sorted(groups.values())


def subsets(names):
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def test_the_small_shapes_are_all_there():
    assert (2,) * 6 in SMALL_SHAPES
    assert (1, 32) in SMALL_SHAPES
    assert (8, 1, 4) in SMALL_SHAPES
    assert len(SMALL_SHAPES) > 500


def test_every_shape_up_to_64_ranks_enumerates_as_brute_force():
    for shape in SMALL_SHAPES:
        names = NAMES[: len(shape)]
        box = Grid(shape, names, 3)
        for dims in subsets(names):
            expected = brute_force(shape, names, 3, dims)
            assert box.groups(dims[::-1]) == expected, (shape, dims)
            for group in expected:
                assert list(box.group_of(group[-1], dims)) == group, (shape, dims)


@st.composite
def boxes_and_dims(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    names = NAMES[: len(shape)]
    dims = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return Grid(shape, names, draw(st.integers(0, 1000))), tuple(dims)


@given(boxes_and_dims())
@settings(max_examples=60, deadline=None)
def test_larger_shapes_enumerate_as_brute_force(case):
    box, dims = case
    assert box.groups(dims) == brute_force(box.shape, box.dim_names, box.rank_offset, dims)


@given(boxes_and_dims(), st.data())
@settings(max_examples=60, deadline=None)
def test_coordinates_and_ranks_are_inverse(case, data):
    box, dims = case
    rank = data.draw(st.sampled_from(box.ranks))
    coords = box.coords(rank)
    assert box.rank_at(coords) == rank
    group = box.group_of(rank, dims)
    assert rank in group
    assert math.prod(box.size_of(dim) for dim in dims) == len(group) == len(set(group))
    for other in group:
        there = box.coords(other)
        assert all(there[name] == coords[name] for name in box.dim_names if name not in dims)


def test_the_order_of_the_spec():
    box = Grid((2, 2, 2), ("tp", "cp", "dp"))
    assert box.groups(["cp", "tp"]) == box.groups(("tp", "cp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert box.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert box.groups(["dp", "tp"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_groups_at_one_distance_stay_ranges_however_large():
    box = Grid((8, 2, 2048, 4), ("tp", "cp", "dp", "pp"))
    assert box.group_of(131_071, "dp") == range(98_319, 131_072, 16)
    assert box.group_of(5, ("dp", "cp")) == range(5, 32_768, 8)
    assert box.group_of(5, ("tp", "cp", "dp", "pp")) == range(131_072)


class IntegerLike:
    """As numpy's integers are: no int, but with an index."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_anything_with_an_index_is_an_integer():
    box = Grid([IntegerLike(2), IntegerLike(3)], ["tp", "dp"], IntegerLike(4))
    assert box.shape == (2, 3)
    assert box.ranks == range(4, 10)
    assert box.coords(IntegerLike(7)) == {"tp": 1, "dp": 1}
    assert box.rank_at({"tp": IntegerLike(1), "dp": IntegerLike(2)}) == 9


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([2, 2], ["tp"]), r"shape \[2, 2\] and dim_names \['tp'\] must be sizes and names, one each"),
        (([], []), r"shape \[\] and dim_names \[\] must be .*, at least one"),
        (([2, 2], ["tp", "tp"]), r"dim_names \['tp', 'tp'\] must be .*, each name once"),
        (([2], [""]), r"dim_names\[0\] is ''; it must be a string that is not empty"),
        (([2], [3]), r"dim_names\[0\] is 3; it must be a string that is not empty"),
        (([2, 0], ["tp", "dp"]), r"shape\[1\] is 0; it must be an integer of at least 1"),
        (([-2], ["tp"]), "is -2; it must be an integer of at least 1"),
        (([2.0], ["tp"]), "is 2.0; it must be an integer of at least 1"),
        (([True], ["tp"]), "is True; it must be an integer of at least 1"),
        (([2], ["tp"], -1), "rank_offset is -1; it must be an integer of at least 0"),
        ((2, ["tp"]), "shape is 2; it must be a list or tuple"),
        (([2, 2], "tp"), "dim_names is 'tp'; it must be a list or tuple"),
    ],
)
def test_a_box_that_is_none_says_why(arguments, text):
    with pytest.raises(GridError, match=text) as caught:
        Grid(*arguments)
    assert isinstance(caught.value, ValueError)


def test_unknown_and_repeated_dimensions_name_the_known_ones():
    box = Grid((2, 3), ("tp", "dp"))
    with pytest.raises(GridError, match=r"dims \['tp', 'pp'\] must be some of \['tp', 'dp'\], each once"):
        box.groups(["tp", "pp"])
    with pytest.raises(GridError, match=r"dims \['tp', 'tp'\] must be some of .*, each once"):
        box.groups(["tp", "tp"])
    with pytest.raises(GridError, match=r"dims \[\] must be some of"):
        box.groups([])
    with pytest.raises(GridError, match=r"dims \['pp'\] must be some of"):
        box.size_of("pp")
    assert issubclass(GridError, ValueError)


def test_ranks_and_coordinates_outside_are_errors():
    box = Grid((2, 3), ("tp", "dp"), 4)
    for rank in (3, 10, -1, 4.0):
        with pytest.raises(GridError, match=r"is not in the ranks of \(tp=2 dp=3 at ranks 4..9\)"):
            box.coords(rank)
    with pytest.raises(GridError, match=r"{'tp': 1} \(dict\) must have an index in each dim of \(tp=2 dp=3"):
        box.rank_at({"tp": 1})
    for index in (3, -1, 1.0):
        with pytest.raises(GridError, match=r"coordinates .* must have an index in each dim of \(tp=2 dp=3"):
            box.rank_at({"tp": 1, "dp": index})


@given(boxes_and_dims(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_grid_with_gaps_is_the_one_without_with_other_ranks(case, data):
    box, dims = case
    shape, names, size = box.shape, box.dim_names, min(box.size, 64)
    shape = shape if size == box.size else (size, *[1] * (len(names) - 1))
    ranks = sorted(data.draw(st.sets(st.integers(0, 3 * size), min_size=size, max_size=size)))
    plain, grid = Grid(shape, names), Grid(shape, names, members=ranks)
    assert list(grid.ranks) == ranks
    assert grid.groups(dims) == [[ranks[number] for number in group] for group in plain.groups(dims)]
    number = data.draw(st.integers(0, size - 1))
    rank = ranks[number]
    assert list(grid.group_of(rank, dims)) == [ranks[other] for other in plain.group_of(number, dims)]
    assert grid.coords(rank) == plain.coords(number)
    assert grid.rank_at(grid.coords(rank)) == rank
    dim = data.draw(st.sampled_from([*names, "none"]))
    index = data.draw(st.integers(0, grid.length(dim) - 1))
    coords = plain.coords(number)
    assert grid.along(rank, dim, index) == ranks[plain.rank_at({**coords, dim: index} if dim in coords else coords)]
    view = make_view(grid, "all", [size], ["all"], None).grid
    assert list(view.ranks) == ranks
    with pytest.raises(GridError, match="is not in the ranks of"):
        grid.coords(next(other for other in range(3 * size + 2) if other not in ranks))


def test_consecutive_ranks_are_the_grid_with_an_offset_and_others_are_checked():
    assert Grid([2, 2], ["tp", "dp"], members=[4, 5, 6, 7]) == Grid([2, 2], ["tp", "dp"], 4)
    assert Grid([2], ["dp"], members=[4, 5]).ranks == range(4, 6)
    assert str(Grid([5], ["dp"], members=[0, 2, 3, 4, 9])) == "(dp=5 at ranks 0, 2..4, 9)"
    assert str(Grid([20], ["dp"], members=range(0, 40, 2))) == "(dp=20 at ranks 0, 2, 4, 6, 8, 10, ..., 38)"
    for ranks, text in (
        ([2, 0], "must ascend"),
        ([1, 1], "must ascend"),
        ([0, 2, 4], "has 2 ranks"),
        ([], "has 2 ranks"),
    ):
        with pytest.raises(GridError, match=text):
            Grid([2], ["dp"], members=ranks)
    with pytest.raises(GridError, match="no rank_offset beside them"):
        Grid([2], ["dp"], 1, members=[2, 4])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_relation_of_two_grids_is_that_of_their_sets_of_ranks(data):
    def drawn():
        if data.draw(st.booleans()):
            ranks = range(start := data.draw(st.integers(0, 4)), start + data.draw(st.integers(1, 4)))
        else:
            ranks = sorted(data.draw(st.sets(st.integers(0, 7), min_size=1, max_size=5)))
        return Grid([len(ranks)], ["dp"], members=ranks)

    a, b = drawn(), drawn()
    one, two = {*a.ranks}, {*b.ranks}
    expected = Relation.EQUAL if one == two else Relation.NESTED if one <= two or two <= one else Relation.OVERLAPPING
    assert relation(a, b) is (Relation.DISJOINT if one.isdisjoint(two) else expected)
