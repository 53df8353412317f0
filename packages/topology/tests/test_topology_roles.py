"""Which modules a rank takes part in, at which stage, and what of the batch it reads."""

import pytest

from pipegrid.topology import (
    MIMO_LANGUAGE_MODULE_KEY,
    HyperCommGrid,
    ModuleLayout,
    ModuleStageInfo,
    PlacementError,
    RankRole,
    WorldError,
    place,
)

FIRST, LAST, ONLY, MIDDLE = (
    ModuleStageInfo(is_first_stage=first, is_last_stage=last)
    for first, last in ((True, False), (False, True), (True, True), (False, False))
)


def test_the_names_of_the_seed():
    assert MIMO_LANGUAGE_MODULE_KEY == "language"
    assert {layout.name: layout.value for layout in ModuleLayout} == {
        "UNIFIED": "unified",
        "NON_COLOCATED": "non_colocated",
        "COLOCATED": "colocated",
    }
    assert RankRole() == RankRole(modules={}, mode=ModuleLayout.UNIFIED)


def test_unified_is_every_module_first_and_last():
    role = RankRole.unified(["images", "language"])
    assert role.modules == {"images": ONLY, "language": ONLY}
    assert role.mode is ModuleLayout.UNIFIED
    assert role.has_modality_modules
    assert role.has_language_module
    assert role.modality_module_names == ["images"]
    assert role.reads_inputs
    assert role.reads_labels


def roles(grids, **keywords):
    world = max(grid.ranks.stop for grid in grids.values())
    modalities = [name for name in grids if name != "language"]
    return [RankRole.from_grid_map(grids, modalities, rank=rank, **keywords) for rank in range(world)]


def test_separate_modules():
    grids = place({"images": {"tp": 1, "dp": 2}, "language": {"tp": 2, "pp": 3, "dp": 1}}, world_size=8)
    of = roles(grids)
    assert {role.mode for role in of} == {ModuleLayout.NON_COLOCATED}
    assert [role.modules for role in of[:2]] == [{"images": ONLY}] * 2
    assert [role.modules["language"] for role in of[2:]] == [FIRST, FIRST, MIDDLE, MIDDLE, LAST, LAST]
    assert [role.reads_inputs for role in of] == [True] * 2 + [False] * 6
    assert [role.reads_labels for role in of] == [False] * 6 + [True] * 2
    assert of[0].has_modality_modules
    assert not of[0].has_language_module
    assert of[2].modality_module_names == []
    assert of[7].is_last_stage("language")
    assert not of[7].is_first_stage("language")
    assert not of[7].is_last_stage("images")
    assert not of[7].is_first_stage("no such module")


def test_equal_grids_are_colocated_with_any_pp():
    grids = place(
        {"images": {"tp": 2, "dp": 4}, "language": {"tp": 2, "pp": 2, "dp": 2}},
        world_size=8,
        together=[("images", "language")],
    )
    of = roles(grids)
    assert {role.mode for role in of} == {ModuleLayout.COLOCATED}
    assert of[2].modules == {"images": ONLY, "language": LAST}
    assert of[2].reads_inputs
    assert of[2].reads_labels
    assert of[0].reads_inputs
    assert not of[0].reads_labels


def test_nested_and_overlapping_grids_are_colocated_for_the_ranks_in_both():
    for images in (HyperCommGrid([2], ["dp"], 1, world_size=6), HyperCommGrid([3], ["dp"], 3, world_size=6)):
        grids = {"images": images, "language": HyperCommGrid([4], ["tp"], world_size=6)}
        for rank, role in enumerate(roles(grids)):
            both = rank in images.ranks and rank < 4
            assert role.mode is (ModuleLayout.COLOCATED if both else ModuleLayout.NON_COLOCATED)
            assert len(role.modules) == 1 + both


def test_mixed_relations_are_colocated_for_the_ranks_in_several():
    grids = place(
        {"images": {"dp": 2}, "audio": {"dp": 2}, "language": {"tp": 4}},
        world_size=6,
        together=[("images", "audio")],
    )
    assert [role.mode for role in roles(grids)] == [ModuleLayout.COLOCATED] * 2 + [ModuleLayout.NON_COLOCATED] * 4


def test_one_module_reads_inputs_itself():
    of = roles(place({"language": {"pp": 3}}, world_size=3))
    assert [role.mode for role in of] == [ModuleLayout.NON_COLOCATED] * 3
    assert [role.reads_inputs for role in of] == [True, False, False]
    assert [role.reads_labels for role in of] == [False, False, True]


def test_sources_and_sinks_may_be_named():
    grids = place({"images": {"dp": 1}, "generator": {"dp": 1}, "language": {"pp": 2}}, world_size=4)
    of = roles(grids, sources=["images", "language"], sinks=["generator", "language"])
    assert [role.reads_inputs for role in of] == [True, False, True, False]
    assert [role.reads_labels for role in of] == [False, True, False, True]
    text = r"sources \['video'\] and sinks .* must be some of \['generator', 'images'"
    with pytest.raises(PlacementError, match=text):
        roles(grids, sources=["video"])


def test_the_map_must_have_exactly_the_modules():
    grids = place({"images": {"dp": 1}, "language": {"dp": 1}}, world_size=2)
    text = r"modules \['audio', 'language'\]: missing \['audio'\], extra \['images'\]"
    with pytest.raises(PlacementError, match=text):
        RankRole.from_grid_map(grids, ["audio"], rank=0)
    with pytest.raises(PlacementError, match=r"missing \['language'\], extra \[\]"):
        RankRole.from_grid_map({"images": grids["images"]}, ["images"], rank=0)
    assert issubclass(PlacementError, ValueError)


def test_the_error_of_a_rank_in_no_grid_has_the_spans():
    grids = place({"images": {"dp": 1}, "language": {"dp": 2}}, world_size=3)
    with pytest.raises(WorldError, match=r"rank 3 is in no module's grid; the grids span {'images': '0..0'") as e:
        RankRole.from_grid_map(grids, ["images"], rank=3)
    assert isinstance(e.value, RuntimeError)


def test_the_launchers_rank_is_the_default(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    grids = place({"images": {"dp": 1}, "language": {"dp": 2}}, world_size=3)
    assert RankRole.from_grid_map(grids, ["images"]).has_language_module


def test_todays_constructor_of_megatron_dispatches_by_grids(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    role = RankRole.build(["images"])
    assert (list(role.modules), role.mode) == (["images", "language"], ModuleLayout.COLOCATED)
    assert role.is_first_stage("language")
    assert role.is_last_stage("images")
    grids = {"images": HyperCommGrid([2], ["pp"], ranks=[0, 2]), "language": HyperCommGrid([2], ["dp"], ranks=[1, 3])}
    role = RankRole.build(["images"], grids)
    assert (list(role.modules), role.mode) == (["images"], ModuleLayout.NON_COLOCATED)
    assert (role.is_first_stage("images"), role.is_last_stage("images")) == (False, True)
    monkeypatch.setenv("RANK", "3")
    assert RankRole.build(["images"], grids).has_language_module
    whole = HyperCommGrid([4], ["dp"])
    assert RankRole.build(["images"], {"images": whole, "language": whole}).mode is ModuleLayout.COLOCATED
    with pytest.raises(PlacementError, match="missing"):
        RankRole.build(["images", "audio"], grids)
