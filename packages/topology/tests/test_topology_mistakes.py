"""Mistakes of a user's first hour: each ends in an error of the package with the value and the rule."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipegrid.topology import (
    GridError,
    GridKeyError,
    GroupSpec,
    HyperCommGrid,
    MultiModuleProcessGroupCollection,
    PlacementError,
    ProcessGroupCollection,
    RankRole,
    control_store,
    create_grid_groups,
    create_groups,
    describe,
    place,
    replica_bounds,
    replica_of,
    replica_samples,
    replica_sizes,
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
    (lambda: grid_of([2, 0]), GridError, r"shape\[1\] is 0; it must be an integer of at least 1"),
    (lambda: grid_of([2, 2.0]), GridError, r"shape\[1\] is 2.0; it must be an integer"),
    (lambda: grid_of([2, True]), GridError, r"shape\[1\] is True; it must be an integer"),
    (lambda: grid_of({2, 3}), GridError, r"shape is {2, 3} \(set\); it must be a list or tuple"),
    (lambda: grid_of(4, ["tp"]), GridError, "shape is 4; it must be a list or tuple"),
    (lambda: grid_of([2, 2], "td"), GridError, "dim_names is 'td'; it must be a list or tuple"),
    (lambda: grid_of([4]), GridError, r"shape \[4\] and dim_names \['tp', 'dp'\] must be sizes and"),
    (lambda: grid_of(rank_offset=-1), GridError, "Grid.rank_offset is -1; it must be an integer of at least 0"),
    (lambda: grid_of(rank_offset=None), GridError, "Grid.rank_offset is None; it must be an integer"),
    (lambda: grid_of(backend=""), GridError, "backend is ''; it must be a string that is not empty"),
    (lambda: HyperCommGrid([2], ["tp"], world_size="8"), GridError, "world_size is '8'; it must be an integer"),
    (lambda: GRID.dim_size("pp"), GridError, r"dims \['pp'\] must be some of \['tp', 'dp'\]"),
    (lambda: GRID.get_rank_enum("tpdp"), GridError, r"dims \['tpdp'\] must be some of"),
    (lambda: GRID.get_rank_enum([]), GridError, r"dims \[\] must be some of"),
    (lambda: GRID.get_rank_enum(None), GridError, "dims is None; it must be a list or tuple"),
    (lambda: GRID.get_rank_enum([2]), GridError, r"dims\[0\] is 2; it must be a string that is not empty"),
    (lambda: replica_of(3), GridError, "grid is 3; it must be a HyperCommGrid"),
    (lambda: replica_samples(4, None), GridError, "grid is None; it must be a HyperCommGrid"),
    (lambda: describe([GRID]), PlacementError, "grids is .*; it must be a mapping"),
    (lambda: describe(GRIDS, max_rows=0), PlacementError, "max_rows is 0; it must be an integer of at least 1"),
    (lambda: place(None, world_size=4), PlacementError, "modules are None; each must have names of dims and sizes"),
    (lambda: place({}, together=3, world_size=4), PlacementError, "together is 3; it must be a list or tuple"),
    (lambda: place({}, together=[3], world_size=4), PlacementError, r"together is \[3\]; it must be a list of sets"),
    (lambda: place({}, offsets=[3], world_size=4), PlacementError, r"offsets is \[3\] \(list\); it must be a mapping"),
    (lambda: RankRole.from_grid_map(GRID, []), PlacementError, "module_to_grid_map is .*; it must be a mapping"),
    (lambda: RankRole.from_grid_map(GRIDS, [3]), PlacementError, r"module names\[0\] is 3; it must be a string"),
    (lambda: MultiModuleProcessGroupCollection(3), PlacementError, "modules is 3; it must be a mapping"),
    (
        lambda: GRID.get_pg("tp", view="expert"),
        GridKeyError,
        r"unknown view 'expert'; the registered ones are \[\]",
    ),
    (lambda: GRID.coords(4), GridError, "rank 4 is not in the ranks of"),
    (lambda: GRID.coords("0"), GridError, "rank '0' is not in the ranks of"),
    (lambda: GRID.rank_at(tp=1), GridError, r"{'tp': 1} \(dict\) must have an index in each dim"),
    (lambda: GRID.rank_at(tp=1, dp=2), GridError, r"'dp': 2} \(dict\) must have an index in each dim"),
    (lambda: GRID.register_view("e", [4], ["ep"], "tp"), GridError, "cannot share 'tp' of the grid"),
    (lambda: GRID.register_view("e", [2, 2], ["ep"]), GridError, r"shape \[2, 2\] and dim_names \['ep'\] must be"),
    (lambda: GRID.create_pg("tp", timeout=30), GridError, "timeout is 30; it must be a datetime.timedelta above"),
    (
        lambda: GRID.create_pg("tp", timeout=timedelta(0)),
        GridError,
        "timeout is .*; it must be a datetime.timedel",
    ),
    (
        lambda: GRID.create_pg("tp", pg_options={}),
        GridError,
        "pg_options is or holds {}; it must be a backend",
    ),
    (lambda: create_grid_groups({GRID: ["tp", "pp"]}), GridError, r"dims \['pp'\] must be"),
    (lambda: create_grid_groups({GRID: [[]]}), GridError, r"dims \[\] must be some of"),
    (lambda: GroupSpec([], "lane"), GridError, r"group 'lane' has ranks \(\)"),
    (lambda: GroupSpec([0, 0], "lane"), GridError, r"group 'lane' has ranks \(0, 0\)"),
    (lambda: GroupSpec([0], ""), GridError, "GroupSpec.label is ''; it must be a string that is not empty"),
    (lambda: create_groups([GroupSpec([0, 1], "a")]), GridError, "has rank 1, the world has 1 ranks"),
    (lambda: create_groups([], backend="mccl"), GridError, "the backend 'mccl' does not serve groups here"),
    (lambda: create_groups([], creation_timeout=5), GridError, "creation_timeout is 5; it must be a datetime"),
    (lambda: control_store(""), GridError, "label is ''; it must be a string that is not empty"),
    (lambda: replica_of(GRID, -1), GridError, "rank is -1; it must be an integer of at least 0"),
    (lambda: replica_bounds(8, 0), GridError, "replicas is 0; it must be an integer of at least 1"),
    (lambda: replica_samples(8.0, GRID, 0), GridError, "num_samples is 8.0; it must be an integer of at least 0"),
    (lambda: place({}, world_size=4), PlacementError, r"ranks 0\.\.3 are left over"),
    (
        lambda: place({"a": 4}, world_size=4),
        PlacementError,
        r"modules are {'a': 4} \(dict\); each must have",
    ),
    (lambda: place({"a": {"tp": "2"}}, world_size=2), GridError, r"shape\[0\] is '2'; it must be"),
    (lambda: place({"a": {"tp": 2}}, world_size=4), PlacementError, r"ranks 2\.\.3 are left over"),
    (lambda: place({"a": {"tp": 2}}, world_size=10**30), PlacementError, r"ranks 2\.\.9{30} are left over"),
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
    (lambda: RankRole.from_grid_map(GRIDS, "images", rank=0), PlacementError, "module names are 'images'; give a list"),
    (lambda: RankRole.from_grid_map(GRIDS, [], rank=0), PlacementError, r"missing \[\], extra \['images'\]"),
    (lambda: RankRole.unified("language"), PlacementError, "module names are 'language'; give a list"),
    (lambda: ProcessGroupCollection.from_grid(GRID, "tensor"), PlacementError, r"groups \['tensor'\] must be some of"),
    (lambda: MultiModuleProcessGroupCollection({})["images"], PlacementError, "this rank is not in module 'images'"),
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
    assert replica_sizes(torch.tensor(5), two) == (3, 2)


def test_one_dim_may_be_named_without_a_list():
    assert replica_of(GRID, 3, dims="dp") == replica_of(GRID, 3, dims=("dp",)) == (1, 2)
    assert replica_samples(4, GRID, 3, dims="dp") == range(2, 4)


def test_a_mistake_leaves_the_grid_as_it_was():
    grid = HyperCommGrid([1], ["dp"])
    with pytest.raises(GridError):
        grid.create_pg("dp", timeout=5)
    assert not grid.has_pg("dp")
    assert grid.create_pg("dp") is not None
