"""Groups of one rank of a large job, in one process on torch's fake backend: sharing, and errors."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipegrid.topology import (
    GridError,
    GridKeyError,
    GroupRequest,
    GroupSpec,
    HyperCommGrid,
    MultiModuleProcessGroupCollection,
    PlacementError,
    ProcessGroupCollection,
    RankRole,
    control_store,
    create_grid_groups,
    create_groups,
    destroy_groups,
    from_device_mesh,
    place,
)


@pytest.fixture(autouse=True)
def _world(request):
    rank, size = getattr(request, "param", (5, 16))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def in_world(rank, size):
    return pytest.mark.parametrize("_world", [(rank, size)], indirect=True, ids=[""])


def alive(group):
    return group in dist.distributed_c10d._world.pg_map


def real_groups():
    """How many groups torch has, besides the default one."""
    return len(dist.distributed_c10d._world.pg_map) - 1


# create_groups


def test_only_the_ranks_own_groups_are_made():
    specs = [GroupSpec((rank, rank + 1), "pair") for rank in range(0, 16, 2)]
    groups = create_groups(specs)
    assert list(groups) == [GroupSpec((4, 5), "pair")]
    assert real_groups() == 1
    assert create_groups([]) == {}


def test_equal_ranks_share_one_group_unless_the_spec_is_not_shared():
    specs = [
        GroupSpec((4, 5), "tp"),
        GroupSpec((4, 5), "ep"),
        GroupSpec((5, 4), "reversed"),
        GroupSpec((4, 5), "lane", shared=False),
        GroupSpec((4, 5), "lane back", shared=False),
    ]
    groups = create_groups([*specs, specs[0]])
    assert groups[specs[0]] is groups[specs[1]]
    assert len({id(groups[spec]) for spec in specs}) == 4
    assert real_groups() == 4
    assert dist.get_process_group_ranks(groups[specs[2]]) == [5, 4]


def test_destroying_groups_is_idempotent():
    specs = [GroupSpec((4, 5), "tp"), GroupSpec((4, 5), "cp"), GroupSpec((5,), "dp")]
    groups = create_groups(specs)
    destroy_groups(groups)
    assert real_groups() == 0
    destroy_groups(groups)
    destroy_groups(list(create_groups(specs).values()))
    assert real_groups() == 0
    again = create_groups(specs)
    dist.destroy_process_group()
    destroy_groups(again)


def test_groups_that_the_world_cannot_hold_are_errors_before_any_is_made():
    with pytest.raises(GridError, match="group 'big' has rank 16, the world has 16 ranks"):
        create_groups([GroupSpec((4, 5), "tp"), GroupSpec((5, 16), "big")])
    assert real_groups() == 0


def test_a_creation_that_fails_leaves_no_groups_behind():
    class Options:
        copies = 0

        def __deepcopy__(self, memo):
            Options.copies += 1
            if Options.copies == 2:
                raise MemoryError("on the second group")
            return FakeProcessGroup.Options()

    with pytest.raises(MemoryError, match="on the second group"):
        create_groups([GroupSpec((4, 5), "tp"), GroupSpec((5, 6), "dp")], pg_options=Options())
    assert real_groups() == 0


def test_one_options_object_serves_many_groups():
    """Torch keeps NCCL's options object and writes each group's name into it."""

    class Options:
        copies = 0

        def __deepcopy__(self, memo):
            Options.copies += 1
            return FakeProcessGroup.Options()

    create_groups([GroupSpec((4, 5), "tp"), GroupSpec((5, 6), "dp")], pg_options=Options())
    assert Options.copies == real_groups() == 2
    create_groups([GroupSpec((1, 5), "pp")], pg_options=FakeProcessGroup.Options())


def test_a_fake_group_has_no_timeout_to_set():
    (group,) = create_groups(
        [GroupSpec((4, 5), "lane")], timeout=timedelta(hours=9), creation_timeout=timedelta(seconds=9)
    ).values()
    assert alive(group)


def test_groups_with_peers_are_an_error_as_none_exist():
    with pytest.raises(GridError, match=r"group 'lane' has backend 'gloo', but .* a dry run"):
        create_groups([GroupSpec((4, 5), "lane")], backend="gloo")
    assert real_groups() == 0


def test_the_control_store_is_the_ranks_own():
    """torch's FakeStore has no operation at all."""
    store = control_store("monitor")
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert not control_store("monitor").check(["key"])


# HyperCommGrid


def test_the_order_of_dims_does_not_matter():
    grid = HyperCommGrid([2, 2, 2, 2], ["tp", "cp", "dp", "pp"])
    group = grid.create_pg(["dp", "cp"])
    assert grid.get_pg(("cp", "dp")) is grid.get_pg(["dp", "cp"]) is group
    assert dist.get_process_group_ranks(group) == [1, 3, 5, 7]
    assert grid.world_size == 16
    assert grid.is_current_rank_in_grid()
    assert grid.has_pg(["cp", "dp"])


def test_making_the_same_group_twice_says_why_not():
    grid = HyperCommGrid([2, 2], ["tp", "dp"], 4)
    grid.create_pg("tp")
    text = r"^the group tp of 4\.\.7 is already made, and its options could differ; use get_pg"
    with pytest.raises(GridKeyError, match=text) as caught:
        grid.create_pg(["tp"])
    assert isinstance(caught.value, KeyError)
    with pytest.raises(GridKeyError, match=r"tp\+dp of .* is already made"):
        create_grid_groups({grid: [("tp", "dp"), ("dp", "tp")]})
    assert grid.group_count == real_groups() == 1


def test_unknown_names_are_errors():
    grid = HyperCommGrid([2, 2], ["tp", "dp"], 4)
    with pytest.raises(GridError, match=r"dims \['pp'\] must be some of \['tp', 'dp'\]"):
        grid.create_pg("pp")
    with pytest.raises(GridKeyError, match=r"unknown view 'expert'; the registered ones are \[\]"):
        grid.create_pg("ep", view="expert")
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeouts'"):
        grid.create_pg("tp", timeouts=timedelta(seconds=1))


def test_a_rank_outside_the_grid_gets_none_and_makes_nothing():
    grid = HyperCommGrid([2, 2], ["tp", "dp"], 8)
    assert grid.create_pg("tp") is None
    assert grid.get_pg("tp") is None
    assert grid.create_pgs(["dp", ("tp", "dp")]) == [None, None]
    with pytest.raises(GridKeyError):
        grid.create_pg("tp")
    assert grid.group_count == real_groups() == 0
    assert grid.to_device_mesh() is None
    grid.destroy()
    with pytest.raises(GridKeyError):
        grid.get_pg("tp")


def test_dimensions_of_size_one_cost_one_group_together():
    grid = HyperCommGrid([1, 1, 16, 1], ["tp", "cp", "dp", "pp"])
    groups = grid.create_pgs(["tp", "cp", "pp", "dp", ("dp", "cp"), ("tp", "pp"), ("tp", "cp", "dp", "pp")])
    assert grid.group_count == real_groups() == 2
    assert [dist.get_world_size(group) for group in groups] == [1, 1, 1, 16, 16, 1, 16]


def test_groups_made_one_by_one_are_shared_as_well_unless_options_differ():
    grid = HyperCommGrid([1, 1, 16, 1], ["tp", "cp", "dp", "pp"])
    first = grid.create_pg("tp")
    assert grid.create_pg("cp") is first
    assert grid.create_pg("pp", timeout=timedelta(seconds=5)) is not first
    assert grid.create_pg(("tp", "pp"), group_desc="another") is not first
    assert grid.create_pg(("tp", "cp"), timeout=timedelta(seconds=5)) is grid.get_pg("pp")
    assert grid.group_count == real_groups() == 3


def test_a_shared_dimension_is_the_grids_own_group_through_any_view():
    grid = HyperCommGrid([2, 2, 2, 2], ["tp", "cp", "dp", "pp"])
    grid.register_view("expert", [1, 4, 2, 2], ["expt_tp", "ep", "expt_dp", "pp"], ["pp"])
    grid.register_view("other", [8, 2], ["sp", "pp"], ["pp"])
    group = grid.create_pg("pp", view="expert")
    assert grid.get_pg("pp") is grid.get_pg("pp", view="other") is group
    with pytest.raises(GridKeyError, match=r"the group pp of 0\.\.15 is"):
        grid.create_pg("pp")
    expert = grid.create_pg("ep", view="expert")
    assert dist.get_process_group_ranks(expert) == [4, 5, 6, 7]
    with pytest.raises(GridKeyError, match="the group expert:ep of"):
        grid.create_pg("ep", view="expert")
    with pytest.raises(GridKeyError, match=r"of view 'other'"):
        grid.get_pg("sp", view="other")
    assert grid.create_pg(["tp", "cp"]) is expert


def test_destroy_is_idempotent_and_the_grid_creates_again():
    grid = HyperCommGrid([2, 1, 4], ["tp", "cp", "dp"])
    made = grid.create_pgs(["tp", "cp", "dp"])
    grid.destroy()
    assert real_groups() == grid.group_count == 0
    grid.destroy()
    with pytest.raises(GridKeyError):
        grid.get_pg("tp")
    again = grid.create_pgs(["dp", "tp"])
    assert real_groups() == 2
    assert all(alive(group) for group in again)
    assert not any(alive(group) for group in made)
    dist.destroy_process_group()
    grid.destroy()


def test_grids_with_equal_groups_share_them_and_the_last_one_tears_down():
    images = HyperCommGrid([2, 8], ["tp", "dp"])
    language = HyperCommGrid([2, 2, 4], ["tp", "pp", "dp"])
    create_grid_groups({images: ["tp", "dp"], language: ["tp", "pp", ("pp", "dp")]})
    assert images.get_pg("tp") is language.get_pg("tp")
    assert images.get_pg("dp") is language.get_pg(["dp", "pp"])
    assert real_groups() == 3
    images.destroy()
    images.destroy()
    assert real_groups() == 3
    assert alive(language.get_pg("tp"))
    language.destroy()
    assert real_groups() == 0


def test_a_failed_creation_changes_no_grid():
    images, language = HyperCommGrid([16], ["dp"]), HyperCommGrid([16], ["dp"], backend="no such backend")
    with pytest.raises(GridError, match="the backend 'no such backend' does not serve groups here"):
        create_grid_groups({images: ["dp"], language: ["dp"]})
    assert not images.has_pg("dp")
    assert real_groups() == 0


@in_world(1000, 16_384)
def test_a_rank_of_a_large_world_makes_its_own_groups_only():
    grid = HyperCommGrid([8, 2, 256, 4], ["tp", "cp", "dp", "pp"])
    create_grid_groups({grid: ["tp", "cp", "pp", "dp", ("dp", "cp")]})
    assert real_groups() == grid.group_count == 5
    assert dist.get_process_group_ranks(grid.get_pg(["dp", "cp"])) == list(range(0, 4096, 8))


# DeviceMesh


def test_a_device_mesh_uses_the_grids_groups():
    grid = HyperCommGrid([2, 1, 4, 2], ["tp", "cp", "dp", "pp"])
    grid.create_pgs(["tp", "cp", "dp", "pp"])
    before = real_groups()
    mesh = grid.to_device_mesh()
    assert isinstance(mesh, DeviceMesh)
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert mesh.mesh.flatten().tolist() == list(range(16))
    assert all(mesh.get_group(name) is grid.get_pg(name) for name in grid.dim_names)
    coords = grid.coords(5)
    assert list(mesh.get_coordinate()) == [coords[name] for name in mesh.mesh_dim_names]
    slice_ = grid.to_device_mesh(["tp", "dp"], device_type="cpu")
    assert slice_.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert slice_["dp"].get_group() is grid.get_pg("dp")
    assert real_groups() == before
    assert mesh.device_type == "cpu"


def test_a_device_mesh_needs_the_groups_first():
    grid = HyperCommGrid([2, 8], ["tp", "dp"])
    grid.create_pg("tp")
    with pytest.raises(GridKeyError, match=r"no group for dims \['dp'\] has been made; call create_pg"):
        grid.to_device_mesh()
    assert grid.to_device_mesh("tp").mesh.tolist() == [4, 5]


def test_a_views_device_mesh():
    grid = HyperCommGrid([4, 4], ["tp", "dp"])
    grid.register_view("expert", [8, 2], ["ep", "expt_dp"])
    grid.create_pgs(["ep", "expt_dp"], view="expert")
    mesh = grid.to_device_mesh(view="expert")
    assert mesh.mesh_dim_names == ("expt_dp", "ep")
    assert mesh.get_group("ep") is grid.get_pg("ep", view="expert")


def test_a_grid_from_a_device_mesh_uses_its_groups_and_leaves_them_alive():
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    before = real_groups()
    grid = from_device_mesh(mesh)
    assert (grid.shape, grid.dim_names, grid.ranks) == ((2, 4, 2), ("tp", "dp", "pp"), range(16))
    assert all(grid.get_pg(name) is mesh.get_group(name) for name in grid.dim_names)
    assert dist.get_process_group_ranks(grid.get_pg("dp")) == list(grid.group_ranks("dp"))
    grid.create_pg(["dp", "tp"])
    assert real_groups() == before + 1
    grid.destroy()
    assert real_groups() == before
    assert all(alive(mesh.get_group(name)) for name in grid.dim_names)
    back = HyperCommGrid.from_device_mesh(mesh).to_device_mesh()
    assert back == mesh


def test_a_mesh_of_part_of_the_world_is_a_grid_with_an_offset():
    mesh = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))
    grid = from_device_mesh(mesh)
    assert (grid.ranks, grid.world_size) == (range(4, 8), 16)
    assert dist.get_process_group_ranks(grid.get_pg("dp")) == [5, 7]
    elsewhere = DeviceMesh("cpu", [[8, 9], [10, 11]], mesh_dim_names=("dp", "tp"))
    assert from_device_mesh(elsewhere).ranks == range(8, 12)
    assert not from_device_mesh(elsewhere).has_pg("dp")


def test_a_mesh_of_ranks_that_are_not_consecutive_is_a_grid_of_these():
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))
    grid = from_device_mesh(mesh["dp"])
    assert tuple(grid.ranks) == tuple(range(1, 16, 2))
    assert dist.get_process_group_ranks(grid.get_pg("dp")) == list(grid.ranks)
    assert grid.to_device_mesh("dp").mesh.tolist() == list(grid.ranks)


def test_groups_of_a_grid_with_gaps_are_among_its_members():
    grid = HyperCommGrid([2, 2], ["tp", "dp"], ranks=[1, 5, 6, 11])
    assert [dist.get_process_group_ranks(group) for group in grid.create_pgs(["tp", "dp"])] == [[1, 5], [5, 11]]
    assert grid.create_pg(["tp", "dp"]).size() == 4
    grid.destroy()
    assert HyperCommGrid([2], ["dp"], ranks=[0, 15]).create_pg("dp") is None


def test_a_mesh_that_is_no_grid_says_why():
    mesh = DeviceMesh("cpu", [[4, 6], [5, 7]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        GridError, match=r"DeviceMesh \('dp', 'tp'\) of ranks \[\[4, 6\], .*\] is not a grid: .* ascend"
    ):
        from_device_mesh(mesh)
    with pytest.raises(GridError, match="has no mesh_dim_names"):
        from_device_mesh(DeviceMesh("cpu", list(range(16))))


# Collections


def test_collections_have_todays_names_of_megatron_and_take_attributes_later():
    grid = HyperCommGrid([2, 8], ["cp", "dp"])
    grid.create_pgs(["cp", "dp"])
    groups = ProcessGroupCollection()
    assert groups.cp is None
    groups.cp, groups.dp = grid.get_pg("cp"), grid.get_pg("dp")
    assert groups == ProcessGroupCollection(cp=groups.cp, dp=groups.dp)
    for both in (
        MultiModuleProcessGroupCollection(module_pgs={"llm": groups}, language_model_module_name="llm"),
        MultiModuleProcessGroupCollection({"llm": groups}, "llm"),
    ):
        assert both.module_pgs is both.modules
        assert both.language_model_module_name == both.language_module_name == "llm"
        assert both.has_language_model()
        assert both.get_language_model_collection() is both.get_module_collection("llm") is groups
        assert both.get_language_model_cp_size() == 2
        assert (list(both.keys()), list(both.values()), list(both.items())) == (["llm"], [groups], [("llm", groups)])
    none = MultiModuleProcessGroupCollection(module_pgs={"language": groups}, language_model_module_name=None)
    assert not none.has_language_model()
    assert MultiModuleProcessGroupCollection(module_pgs={"language": groups}).has_language_model()
    for arguments, keywords in (
        ((), {}),
        (({},), {"module_pgs": {}}),
        (({}, None), {"language_model_module_name": None}),
    ):
        with pytest.raises(PlacementError, match="names of one argument"):
            MultiModuleProcessGroupCollection(*arguments, **keywords)
    grid.destroy()


def test_a_collection_takes_the_groups_that_were_made():
    grid = HyperCommGrid([2, 2, 4], ["tp", "cp", "dp"])
    grid.register_view("expert", [1, 4, 4], ["expt_tp", "ep", "expt_dp"])
    grid.create_pgs(["tp", "cp", "dp", ("dp", "cp"), ("tp", "cp", "dp")])
    grid.create_pgs(["ep", "expt_dp"], view="expert")
    groups = ProcessGroupCollection.from_grid(grid, expert_view="expert", embd=grid.get_pg("tp"))
    assert groups.tp is groups.embd is grid.get_pg("tp")
    assert groups.dp_cp is grid.get_pg(["cp", "dp"])
    assert groups.tp_dp_cp is grid.get_pg(["cp", "dp", "tp"])
    assert groups.ep is grid.get_pg("ep", view="expert")
    assert groups.mp is groups.tp  # the grid has no pp: its size is one
    assert (groups.pp, groups.tp_cp, groups.expt_tp, groups.pos_embd) == (None, None, None, None)


def test_a_collection_requires_the_named_groups():
    grid = HyperCommGrid([2, 8], ["tp", "dp"])
    grid.create_pgs(["tp", "dp"])
    groups = ProcessGroupCollection.from_grid(grid, "tp", "dp_cp")
    assert groups.dp_cp is grid.get_pg("dp")
    assert groups.dp is None
    with pytest.raises(GridKeyError, match=r"no group for dims \['tp', 'dp'\]"):
        ProcessGroupCollection.from_grid(grid, "tp_dp_cp")
    with pytest.raises(PlacementError, match=r"groups \['xp'\] must be some of \['tp', 'cp', "):
        ProcessGroupCollection.from_grid(grid, "xp")
    with pytest.raises(TypeError, match="embedding"):
        ProcessGroupCollection.from_grid(grid, embedding=None)


def test_the_collections_of_several_modules():
    grids = place(
        {"images": {"dp": 8}, "audio": {"dp": 4, "tp": 2}, "language": {"tp": 8}},
        world_size=16,
        together=[("images", "audio")],
    )
    create_grid_groups({grids["images"]: ["dp"], grids["audio"]: ["tp", "dp"], grids["language"]: ["tp"]})
    grids["images"].register_view("expert", [2, 4], ["ep", "expt_dp"])
    grids["images"].create_pg("ep", view="expert")
    experts = MultiModuleProcessGroupCollection.from_grids(grids, expert_views={"images": "expert"})
    assert experts["images"].ep is grids["images"].get_pg("ep", view="expert")
    assert experts["audio"].ep is None
    groups = MultiModuleProcessGroupCollection.from_grids(grids, "dp")
    assert list(groups) == ["images", "audio"]
    assert len(groups) == 2
    assert groups["audio"].dp is grids["audio"].get_pg("dp")
    assert groups.language is groups.language_module_name is None
    with pytest.raises(PlacementError, match=r"this rank is not in module 'language'; it is in \['images', 'audio'\]"):
        _ = groups["language"]
    both = MultiModuleProcessGroupCollection({"language": groups["audio"], "images": groups["images"]})
    assert both.language is groups["audio"]
    assert both.language_module_name == "language"
    other = MultiModuleProcessGroupCollection(both.modules, "images")
    assert other.language is groups["images"]
    with pytest.raises(PlacementError, match=r"the language module 'llm' is none of \['language', 'images'\]"):
        MultiModuleProcessGroupCollection(both.modules, "llm")


def test_a_role_takes_the_rank_from_the_default_group():
    grids = place({"images": {"dp": 8}, "language": {"tp": 8}}, world_size=16)
    assert RankRole.from_grid_map(grids, ["images"]).modality_module_names == ["images"]


def test_one_name_is_a_list_of_one():
    grid, other = HyperCommGrid([4, 4], ["tp", "dp"]), HyperCommGrid([4, 4], ["tp", "dp"])
    create_grid_groups({grid: "tp", other: GroupRequest("dp")})
    assert grid.create_pgs("dp") == [grid.get_pg("dp")]
    assert other.has_pg("dp")


def test_requests_may_name_a_view():
    grid = HyperCommGrid([4, 4], ["tp", "dp"])
    grid.register_view("expert", [8, 2], ["ep", "expt_dp"])
    create_grid_groups({grid: ["tp", GroupRequest("ep", "expert")]})
    assert dist.get_process_group_ranks(grid.get_pg("ep", view="expert")) == list(range(8))
    assert grid.create_pgs(["dp", GroupRequest(["expt_dp"], "expert")]) == [
        grid.get_pg("dp"),
        grid.get_pg("expt_dp", view="expert"),
    ]
