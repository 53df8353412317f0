"""What every public name says to what it cannot use: an error of the package, which names the value and the rule."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pipegrid.topology
from pipegrid.topology import (
    CoordinateError,
    GridShapeError,
    GroupRequest,
    GroupSpec,
    GroupSpecError,
    HyperCommGrid,
    ModuleLayout,
    ModuleStageInfo,
    MultiModuleProcessGroupCollection,
    PlacementError,
    ProcessGroupCollection,
    RankRole,
    Relation,
    RoleError,
    UnknownDimensionError,
    UnknownViewError,
    ViewError,
    control_store,
    create_grid_groups,
    create_groups,
    creation_order,
    data_lane,
    describe,
    destroy_groups,
    from_device_mesh,
    lane_bounds,
    lane_samples,
    lane_sizes,
    place,
    relation,
    to_device_mesh,
)


@pytest.fixture(scope="module", autouse=True)
def _world():
    """A world of this process: what needs one is refused before it is used."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_grid(**changed):
    return HyperCommGrid(**{"shape": [2, 2], "dim_names": ["tp", "dp"], "world_size": 4, **changed})


GRID = a_grid()
GRID.register_view("expert", [2, 2], ["ep", "expt_dp"])
GRIDS = {"images": a_grid(), "language": a_grid()}
SPEC = GroupSpec([0], "a")

TENSORS = [torch.tensor(1.5), torch.tensor(True), torch.tensor([1, 2])]
NO_INTEGER = ["x", object(), [], {}, True, 1.5, math.nan, *TENSORS]
NO_RANK = [*NO_INTEGER, None, -1, 10**30]
NO_RANK_OR_NONE = [*NO_INTEGER, -1]
NO_SIZE = [*NO_INTEGER, None, -1, 0]
NO_TEXT = [None, "", 5, True, ["tp"], {}, object(), math.nan, *TENSORS]
NO_LIST = [None, 5, True, object(), math.nan, torch.tensor(2)]
NO_DIMS = [*NO_LIST, "x", "", [], {}, ["x"], [None], [5], ["tp", "tp"], torch.tensor([1])]
NO_NAMES = [*NO_LIST, "language", [None], [5], [""], torch.tensor([1])]
NO_MAP = [None, "x", 5, object(), [], ["x"], {5: 1}, {None: 1}, torch.tensor([1])]
NO_GRID = [None, "x", 5, object(), {}, [GRID], HyperCommGrid, torch.tensor(1)]
NO_GRIDS = [*NO_MAP, {"a": None}, {"a": 5}]
NO_FLAG = [None, 0, 1, "yes", [], torch.tensor(True)]
NO_TIME = [5, 1.5, "5 s", timedelta(0), timedelta(seconds=-1), True]
NO_VIEW = ["x", "", 5, [], {}, object()]


def made(call, **given):
    def with_one_changed(**changed):
        return call(**{**given, **changed})

    return with_one_changed


def request_of(dims):
    return create_grid_groups({HyperCommGrid([1], ["dp"]): dims})


def one_module(dims):
    return place({"a": dims}, world_size=2)


def from_grid_map(**changed):
    given = {"module_to_grid_map": GRIDS, "modality_module_names": ["images"], "rank": 0}
    return RankRole.from_grid_map(**{**given, **changed})


ROLE = RankRole.unified(["images", "language"])
COLLECTIONS = MultiModuleProcessGroupCollection({"a": ProcessGroupCollection()}, None)

REFUSED = [
    (
        "grid",
        a_grid,
        "shape",
        [*NO_LIST, "x", {2, 3}, [], [2], [2, 0], [2, -1], [2, True], [2, None], [2, 1.5]],
        GridShapeError,
    ),
    (
        "grid",
        a_grid,
        "dim_names",
        [*NO_LIST, "td", {"tp", "dp"}, [], ["tp"], ["tp", ""], ["tp", 5], ["a", "a"]],
        GridShapeError,
    ),
    ("grid", a_grid, "rank_offset", [*NO_INTEGER, None, -1], GridShapeError),
    ("grid", a_grid, "backend", NO_TEXT[1:], GridShapeError),
    ("grid", a_grid, "world_size", [*NO_INTEGER, 0, -1], GridShapeError),
    ("dim_size", GRID.dim_size, "name", [*NO_TEXT, "x", "ep"], UnknownDimensionError),
    ("dim_size", made(GRID.dim_size, name="tp"), "view", NO_VIEW, UnknownViewError),
    ("coords", GRID.coords, "rank", [*NO_RANK, 4], CoordinateError),
    ("coords", made(GRID.coords, rank=1), "view", NO_VIEW, UnknownViewError),
    ("rank_at", made(GRID.rank_at, tp=0, dp=0), "tp", [*NO_RANK, 2], CoordinateError),
    ("rank_at", made(GRID.rank_at, tp=0, dp=0), "cp", [0], CoordinateError),
    ("get_rank_enum", GRID.get_rank_enum, "dims", NO_DIMS, UnknownDimensionError),
    ("get_rank_enum", made(GRID.get_rank_enum, dims="tp"), "view", NO_VIEW, UnknownViewError),
    ("group_ranks", made(GRID.group_ranks, rank=0), "dims", NO_DIMS, UnknownDimensionError),
    ("group_ranks", made(GRID.group_ranks, dims="tp"), "rank", [*NO_INTEGER, -1], GridShapeError),
    ("group_ranks", made(GRID.group_ranks, dims="tp"), "rank", [4, 10**30], CoordinateError),
    ("register_view", made(a_grid().register_view, shape=[4], dim_names=["ep"]), "name", NO_TEXT, ViewError),
    (
        "register_view",
        made(a_grid().register_view, name="e", dim_names=["ep"]),
        "shape",
        [*NO_LIST, "x", [], [3], [True]],
        ViewError,
    ),
    (
        "register_view",
        made(a_grid().register_view, name="e", shape=[4]),
        "dim_names",
        [*NO_LIST, "x", [], [5]],
        ViewError,
    ),
    (
        "register_view",
        made(a_grid().register_view, name="e", shape=[4], dim_names=["ep"]),
        "shared_dims",
        [*NO_NAMES[1:], ["x"]],
        ViewError,
    ),
    ("select_dims", GRID.select_dims, "dims", NO_DIMS[1:], UnknownDimensionError),
    ("canonical", GRID.canonical, "dims", NO_DIMS, UnknownDimensionError),
    ("canonical", made(GRID.canonical, dims="tp"), "view", NO_VIEW, UnknownViewError),
    ("has_pg", GRID.has_pg, "dims", NO_DIMS, UnknownDimensionError),
    ("get_pg", GRID.get_pg, "dims", NO_DIMS, UnknownDimensionError),
    ("get_pg", made(GRID.get_pg, dims="tp"), "view", NO_VIEW, UnknownViewError),
    ("create_pg", GRID.create_pg, "dims", NO_DIMS, UnknownDimensionError),
    ("create_pg", made(GRID.create_pg, dims="tp"), "view", NO_VIEW, UnknownViewError),
    ("create_pg", made(GRID.create_pg, dims="tp"), "timeout", NO_TIME, GroupSpecError),
    ("create_pg", made(GRID.create_pg, dims="tp"), "group_desc", NO_TEXT[1:], GroupSpecError),
    ("create_pg", made(GRID.create_pg, dims="tp"), "pg_options", [5, "x", [], {}, torch.tensor(1)], GroupSpecError),
    ("create_pgs", GRID.create_pgs, "requests", [*NO_LIST, ["x"], [None], [5]], UnknownDimensionError),
    (
        "create_grid_groups",
        create_grid_groups,
        "requests",
        [None, "x", 5, [], {"x": ["tp"]}, {5: ["tp"]}],
        GridShapeError,
    ),
    ("create_grid_groups", request_of, "dims", [*NO_LIST, "x", ["x"], [None], [[]]], UnknownDimensionError),
    ("create_grid_groups", made(create_grid_groups, requests={}), "timeout", [], GroupSpecError),
    ("request", GroupRequest, "dims", [*NO_LIST, [], [None], [""]], UnknownDimensionError),
    ("request", made(GroupRequest, dims="tp"), "view", NO_TEXT[1:], UnknownViewError),
    (
        "spec",
        made(GroupSpec, label="a"),
        "ranks",
        [*NO_LIST, "x", {1, 2}, [], [-1], [True], [1.5], [None], [0, 0]],
        GroupSpecError,
    ),
    ("spec", made(GroupSpec, ranks=[0]), "label", NO_TEXT, GroupSpecError),
    ("spec", made(GroupSpec, ranks=[0], label="a"), "shared", NO_FLAG, GroupSpecError),
    ("creation_order", creation_order, "specs", [*NO_LIST, "x", [None], ["x"], {5: 1}, SPEC], GroupSpecError),
    ("create_groups", create_groups, "specs", [*NO_LIST, "x", [None], ["x"], {5: 1}, SPEC], GroupSpecError),
    ("create_groups", made(create_groups, specs=[SPEC]), "rank", [*NO_RANK_OR_NONE, 1], GroupSpecError),
    ("create_groups", made(create_groups, specs=[SPEC]), "backend", ["x", 5, True], GroupSpecError),
    ("create_groups", made(create_groups, specs=[SPEC]), "timeout", NO_TIME, GroupSpecError),
    ("create_groups", made(create_groups, specs=[SPEC]), "group_desc", NO_TEXT[1:], GroupSpecError),
    ("create_groups", made(create_groups, specs=[SPEC]), "pg_options", [5, "x", torch.tensor(1)], GroupSpecError),
    ("destroy_groups", destroy_groups, "groups", [*NO_LIST, "x", [None], ["x"], {SPEC: None}], GroupSpecError),
    ("control_store", control_store, "label", NO_TEXT, GroupSpecError),
    ("data_lane", made(data_lane, rank=0), "grid", NO_GRID, GridShapeError),
    ("data_lane", made(data_lane, grid=GRID), "rank", NO_RANK_OR_NONE, GridShapeError),
    ("data_lane", made(data_lane, grid=GRID), "rank", [4], CoordinateError),
    ("data_lane", made(data_lane, grid=GRID, rank=0), "dims", [*NO_LIST, [None], [5]], UnknownDimensionError),
    ("lane_bounds", made(lane_bounds, lanes=2), "num_samples", [*NO_INTEGER, None, -1], GridShapeError),
    ("lane_bounds", made(lane_bounds, num_samples=2), "lanes", [*NO_SIZE, 10**30], GridShapeError),
    ("lane_sizes", made(lane_sizes, lanes=2), "num_samples", [*NO_INTEGER, None, -1], GridShapeError),
    ("lane_sizes", made(lane_sizes, num_samples=2), "lanes", [*NO_SIZE, 10**30], GridShapeError),
    ("lane_samples", made(lane_samples, num_samples=4, rank=0), "grid", NO_GRID, GridShapeError),
    ("lane_samples", made(lane_samples, grid=GRID, rank=0), "num_samples", [*NO_INTEGER, None, -1], GridShapeError),
    (
        "lane_samples",
        made(lane_samples, grid=GRID, num_samples=2, rank=0),
        "sizes",
        [*NO_LIST[1:], "x", [2], [1, True], [3, -1], [1.0, 1.0], {}],
        GridShapeError,
    ),
    ("describe", describe, "grids", NO_GRIDS, GridShapeError),
    ("describe", made(describe, grids=GRIDS), "max_rows", [*NO_INTEGER, None, -1], GridShapeError),
    ("describe", made(describe, grids=GRIDS), "color", NO_FLAG, GridShapeError),
    (
        "place",
        made(place, world_size=2),
        "modules",
        [*NO_MAP, {}, {"a": None}, {"a": 5}, {"a": ["tp"]}],
        PlacementError,
    ),
    (
        "place",
        one_module,
        "dims",
        [{"tp": None}, {"tp": "2"}, {"tp": 0}, {"tp": -1}, {"tp": True}, {"tp": 2.0}, {}],
        GridShapeError,
    ),
    ("place", made(place, modules={"a": {"tp": 2}}), "world_size", [*NO_INTEGER, 0, -1], GridShapeError),
    (
        "place",
        made(place, modules={"a": {"tp": 2}}, world_size=2),
        "together",
        [*NO_LIST, "a", ["a"], [None], [5], [["x"]], [[None]]],
        PlacementError,
    ),
    (
        "place",
        made(place, modules={"a": {"tp": 2}}, world_size=2),
        "offsets",
        [*NO_MAP[1:], {"x": 0}, {"a": None}, {"a": -1}, {"a": True}, {"a": 1.5}],
        PlacementError,
    ),
    ("place", made(place, modules={"a": {"tp": 2}}, world_size=2), "backend", NO_TEXT[1:], GridShapeError),
    ("relation", made(relation, b=GRID), "a", NO_GRID, GridShapeError),
    ("relation", made(relation, a=GRID), "b", NO_GRID, GridShapeError),
    ("stage info", made(ModuleStageInfo, is_last_stage=True), "is_first_stage", NO_FLAG, RoleError),
    ("stage info", made(ModuleStageInfo, is_first_stage=True), "is_last_stage", NO_FLAG, RoleError),
    ("role", RankRole, "modules", [*NO_MAP, {"a": None}, {"a": (True, True)}], RoleError),
    ("role", RankRole, "mode", [None, "unified", 5, ModuleLayout], RoleError),
    ("role", RankRole, "sources", NO_NAMES[1:], RoleError),
    ("role", RankRole, "sinks", NO_NAMES, RoleError),
    ("role of a stage", ROLE.is_first_stage, "module_name", NO_TEXT, RoleError),
    ("role of a stage", ROLE.is_last_stage, "module_name", NO_TEXT, RoleError),
    ("unified", RankRole.unified, "module_names", NO_NAMES, RoleError),
    (
        "from_grid_map",
        from_grid_map,
        "module_to_grid_map",
        [*NO_MAP, {}, {"images": None, "language": GRID}],
        RoleError,
    ),
    ("from_grid_map", from_grid_map, "modality_module_names", [*NO_NAMES, ["x"]], RoleError),
    ("from_grid_map", from_grid_map, "rank", NO_RANK_OR_NONE, GridShapeError),
    ("from_grid_map", from_grid_map, "sources", [*NO_NAMES[1:], ["x"]], RoleError),
    ("from_grid_map", from_grid_map, "sinks", [*NO_NAMES, ["x"]], RoleError),
    ("collection", ProcessGroupCollection, "tp", [5, "tp", True, [], object()], RoleError),
    ("collection", ProcessGroupCollection.from_grid, "grid", NO_GRID, RoleError),
    ("collection", made(ProcessGroupCollection.from_grid, grid=GRID), "expert_view", NO_VIEW, UnknownViewError),
    ("collection", made(ProcessGroupCollection.from_grid, grid=GRID), "embd", [5, "x"], RoleError),
    ("collection", made(ProcessGroupCollection.from_grid, grid=GRID), "x", [None], RoleError),
    ("collection", lambda name: ProcessGroupCollection.from_grid(GRID, name), "name", [*NO_TEXT, "x"], RoleError),
    (
        "collections",
        MultiModuleProcessGroupCollection,
        "modules",
        [*NO_MAP, {"a": None}, {"a": 5}, {"a": {}}],
        RoleError,
    ),
    (
        "collections",
        made(MultiModuleProcessGroupCollection, modules={}),
        "language_module_name",
        [*NO_TEXT[1:], "x"],
        RoleError,
    ),
    ("collections", COLLECTIONS.__getitem__, "module", [*NO_TEXT, "x"], RoleError),
    ("collections", MultiModuleProcessGroupCollection.from_grids, "grids", NO_GRIDS, RoleError),
    (
        "collections",
        made(MultiModuleProcessGroupCollection.from_grids, grids=GRIDS),
        "expert_views",
        [*NO_MAP[1:], {"x": "e"}],
        RoleError,
    ),
    ("to_device_mesh", to_device_mesh, "grid", NO_GRID, GridShapeError),
    ("to_device_mesh", made(to_device_mesh, grid=GRID), "dims", NO_DIMS[1:], UnknownDimensionError),
    ("to_device_mesh", made(to_device_mesh, grid=GRID), "view", NO_VIEW, UnknownViewError),
    ("to_device_mesh", made(to_device_mesh, grid=GRID), "device_type", [*NO_TEXT[1:], "no device"], GridShapeError),
    ("from_device_mesh", from_device_mesh, "mesh", [None, 5, "x", GRID, object()], GridShapeError),
]


@pytest.mark.parametrize(
    ("call", "argument", "values", "error"),
    [
        pytest.param(call, argument, values, error, id=f"{name}-{argument}-{error.__name__}")
        for name, call, argument, values, error in REFUSED
    ],
)
def test_what_an_argument_cannot_be_is_refused_in_words(call, argument, values, error):
    for value in values:
        with pytest.raises(error) as refused:
            call(value) if argument == "module" else call(**{argument: value})
        assert type(refused.value).__module__ == "pipegrid.topology.errors", value
        assert len(str(refused.value)) > 30, value  # what was given, and what may be


def test_every_public_name_is_in_the_list_or_takes_nothing():
    errors = {name for name in pipegrid.topology.__all__ if name.endswith("Error")}
    listed = {name for name in pipegrid.topology.__all__ if name in globals()}
    assert set(pipegrid.topology.__all__) == errors | listed - errors | {"MIMO_LANGUAGE_MODULE_KEY"}
    for words in (ModuleLayout, Relation):
        with pytest.raises(ValueError, match="'x' is not a valid"):
            words("x")


def test_integers_of_other_libraries_are_integers():
    two = torch.tensor(2)
    grid = HyperCommGrid([two, two], ["tp", "dp"], world_size=torch.tensor(4))
    assert grid.shape == (2, 2)
    assert grid.coords(two) == {"tp": 0, "dp": 1}
    assert grid.rank_at(tp=torch.tensor(1), dp=0) == 1
    assert GroupSpec([two, 0], "a").ranks == (2, 0)
    assert lane_sizes(torch.tensor(5), two) == (3, 2)


def test_one_dimension_may_be_named_without_a_list():
    assert data_lane(GRID, 3, dims="dp") == data_lane(GRID, 3, dims=("dp",)) == (1, 2)
    assert lane_samples(4, GRID, 3, dims="dp") == range(2, 4)


def test_what_is_refused_leaves_the_grid_as_it_was():
    grid = HyperCommGrid([1], ["dp"])
    with pytest.raises(GroupSpecError):
        grid.create_pg("dp", timeout=5)
    assert not grid.has_pg("dp")
    assert grid.create_pg("dp") is not None
    grid.destroy()
