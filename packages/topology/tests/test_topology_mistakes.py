"""Mistakes of a user's first hour: each ends in an error of the package with the value and the rule."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.topology import (
    CoordinateError,
    GridShapeError,
    GroupSpec,
    GroupSpecError,
    HyperCommGrid,
    MultiModuleProcessGroupCollection,
    PlacementError,
    ProcessGroupCollection,
    RankRole,
    RoleError,
    UnknownDimensionError,
    UnknownViewError,
    ViewError,
    control_store,
    create_grid_groups,
    create_groups,
    data_lane,
    lane_bounds,
    lane_samples,
    lane_sizes,
    place,
)


@pytest.fixture(scope="module", autouse=True)
def _world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def grid_of(shape=(2, 2), dim_names=("tp", "dp"), **others):
    return HyperCommGrid(shape, dim_names, world_size=4, **others)


GRID = grid_of()
GRIDS = {"images": GRID, "language": GRID}

MISTAKES = [
    (lambda: grid_of([2, 0]), GridShapeError, r"shape\[1\] is 0; it must be an integer of at least 1"),
    (lambda: grid_of([2, 2.0]), GridShapeError, r"shape\[1\] is 2.0; it must be an integer"),
    (lambda: grid_of([2, True]), GridShapeError, r"shape\[1\] is True; it must be an integer"),
    (lambda: grid_of({2, 3}), GridShapeError, r"shape is {2, 3} \(set\); it must be a list or tuple"),
    (lambda: grid_of(4, ["tp"]), GridShapeError, "shape is 4; it must be a list or tuple"),
    (lambda: grid_of([2, 2], "td"), GridShapeError, "dim_names is 'td'; it must be a list or tuple"),
    (lambda: grid_of([4]), GridShapeError, r"shape \[4\] and dim_names \['tp', 'dp'\] must be sizes and"),
    (lambda: grid_of(rank_offset=-1), GridShapeError, "Grid.rank_offset is -1; it must be an integer of at least 0"),
    (lambda: grid_of(rank_offset=None), GridShapeError, "Grid.rank_offset is None; it must be an integer"),
    (lambda: grid_of(backend=""), GridShapeError, "backend is ''; it must be a string that is not empty"),
    (lambda: HyperCommGrid([2], ["tp"], world_size="8"), GridShapeError, "world_size is '8'; it must be an integer"),
    (lambda: GRID.dim_size("pp"), UnknownDimensionError, r"dims \['pp'\] must be some of \['tp', 'dp'\]"),
    (lambda: GRID.get_rank_enum("tpdp"), UnknownDimensionError, r"dims \['tpdp'\] must be some of"),
    (lambda: GRID.get_rank_enum([]), UnknownDimensionError, r"dims \[\] must be some of"),
    (
        lambda: GRID.get_pg("tp", view="expert"),
        UnknownViewError,
        r"unknown view 'expert'; the registered ones are \[\]",
    ),
    (lambda: GRID.coords(4), CoordinateError, "rank 4 is not in the ranks of"),
    (lambda: GRID.coords("0"), CoordinateError, "rank '0' is not in the ranks of"),
    (lambda: GRID.rank_at(tp=1), CoordinateError, r"{'tp': 1} \(dict\) must have an index in each dim"),
    (lambda: GRID.rank_at(tp=1, dp=2), CoordinateError, r"'dp': 2} \(dict\) must have an index in each dim"),
    (lambda: GRID.register_view("e", [4], ["ep"], "tp"), ViewError, "cannot share 'tp' of the grid"),
    (lambda: GRID.register_view("e", [2, 2], ["ep"]), GridShapeError, r"shape \[2, 2\] and dim_names \['ep'\] must be"),
    (lambda: GRID.create_pg("tp", timeout=30), GroupSpecError, "timeout is 30; it must be a datetime.timedelta above"),
    (
        lambda: GRID.create_pg("tp", timeout=timedelta(0)),
        GroupSpecError,
        "timeout is .*; it must be a datetime.timedel",
    ),
    (
        lambda: GRID.create_pg("tp", pg_options={}),
        GroupSpecError,
        "pg_options is or holds {}; it must be a backend",
    ),
    (lambda: create_grid_groups({GRID: ["tp", "pp"]}), UnknownDimensionError, r"dims \['pp'\] must be"),
    (lambda: create_grid_groups({GRID: [[]]}), UnknownDimensionError, r"dims \[\] must be some of"),
    (lambda: GroupSpec([], "lane"), GroupSpecError, r"group 'lane' has ranks \(\)"),
    (lambda: GroupSpec([0, 0], "lane"), GroupSpecError, r"group 'lane' has ranks \(0, 0\)"),
    (lambda: GroupSpec([0], ""), GroupSpecError, "GroupSpec.label is ''; it must be a string that is not empty"),
    (lambda: create_groups([GroupSpec([0, 1], "a")]), GroupSpecError, "has rank 1, the world has 1 ranks"),
    (lambda: create_groups([], backend="mccl"), GroupSpecError, "the backend 'mccl' does not serve groups here"),
    (lambda: create_groups([], creation_timeout=5), GroupSpecError, "creation_timeout is 5; it must be a datetime"),
    (lambda: control_store(""), GroupSpecError, "label is ''; it must be a string that is not empty"),
    (lambda: data_lane(GRID, -1), GridShapeError, "rank is -1; it must be an integer of at least 0"),
    (lambda: lane_bounds(8, 0), GridShapeError, "lanes is 0; it must be an integer of at least 1"),
    (lambda: lane_samples(8.0, GRID, 0), GridShapeError, "num_samples is 8.0; it must be an integer of at least 0"),
    (lambda: place({}, world_size=4), PlacementError, r"ranks 0\.\.3 are left over"),
    (
        lambda: place({"a": 4}, world_size=4),
        PlacementError,
        r"modules are {'a': 4} \(dict\); each must have",
    ),
    (lambda: place({"a": {"tp": "2"}}, world_size=2), GridShapeError, r"shape\[0\] is '2'; it must be"),
    (lambda: place({"a": {"tp": 2}}, world_size=4), PlacementError, r"ranks 2\.\.3 are left over"),
    (
        lambda: place({"a": {"tp": 2}, "b": {"tp": 2}}, world_size=4, together=["a", "b"]),
        PlacementError,
        r"together is \['a', 'b'\]; it must be a list of sets of modules: \[\('a', 'b'\)\]",
    ),
    (
        lambda: place({"a": {"tp": 2}}, world_size=2, offsets={"a": "0"}),
        PlacementError,
        "the offset of module 'a' is '0'; it must be an integer of at least 0",
    ),
    (lambda: RankRole.from_grid_map(GRIDS, "images", rank=0), RoleError, "module names are 'images'; give a list"),
    (lambda: RankRole.from_grid_map(GRIDS, [], rank=0), RoleError, r"missing \[\], extra \['images'\]"),
    (lambda: RankRole.unified("language"), RoleError, "module names are 'language'; give a list"),
    (lambda: ProcessGroupCollection.from_grid(GRID, "tensor"), RoleError, r"groups \['tensor'\] must be some of"),
    (lambda: MultiModuleProcessGroupCollection({})["images"], RoleError, "this rank is not in module 'images'"),
]


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES, ids=[text for _, _, text in MISTAKES])
def test_a_mistake_says_what_the_value_and_the_rule(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_unknown_device_type():
    grid = HyperCommGrid([1], ["dp"])
    grid.create_pg("dp")
    with pytest.raises(RuntimeError, match="cup"):
        grid.to_device_mesh(device_type="cup")


def test_integers_of_other_libraries_are_integers():
    two = torch.tensor(2)
    grid = HyperCommGrid([two, two], ["tp", "dp"], world_size=torch.tensor(4))
    assert grid.shape == (2, 2)
    assert grid.coords(two) == {"tp": 0, "dp": 1}
    assert grid.rank_at(tp=torch.tensor(1), dp=0) == 1
    assert GroupSpec([two, 0], "a").ranks == (2, 0)
    assert lane_sizes(torch.tensor(5), two) == (3, 2)


def test_one_dim_may_be_named_without_a_list():
    assert data_lane(GRID, 3, dims="dp") == data_lane(GRID, 3, dims=("dp",)) == (1, 2)
    assert lane_samples(4, GRID, 3, dims="dp") == range(2, 4)


def test_a_mistake_leaves_the_grid_as_it_was():
    grid = HyperCommGrid([1], ["dp"])
    with pytest.raises(GroupSpecError):
        grid.create_pg("dp", timeout=5)
    assert not grid.has_pg("dp")
    assert grid.create_pg("dp") is not None
