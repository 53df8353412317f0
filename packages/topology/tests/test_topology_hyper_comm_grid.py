"""`HyperCommGrid` as arithmetic: the world around it, its groups' names, its views."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.topology import (
    GridError,
    GridKeyError,
    GroupRequest,
    HyperCommGrid,
    WorldError,
)


@pytest.fixture
def _no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def test_attributes():
    grid = HyperCommGrid([2, 3], ["tp", "dp"], 4, "gloo", world_size=12)
    assert (grid.shape, grid.dim_names, grid.rank_offset) == ((2, 3), ("tp", "dp"), 4)
    assert (grid.backend, grid.size, grid.ranks, grid.world_size) == ("gloo", 6, range(4, 10), 12)
    assert grid.dim_size("dp") == 3
    assert grid.coords(7) == {"tp": 1, "dp": 1}
    assert grid.rank_at(dp=1, tp=1) == 7
    assert grid.get_rank_enum("tp") == [[4, 5], [6, 7], [8, 9]]
    assert grid.group_ranks("dp", 9) == range(5, 10, 2)
    assert repr(grid) == "HyperCommGrid(tp=2 dp=3 at ranks 4..9)"


@pytest.mark.usefixtures("_no_launcher")
def test_the_world_size_comes_from_the_argument_or_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert HyperCommGrid([2], ["tp"]).world_size == 8
    assert HyperCommGrid([2], ["tp"], world_size=2).world_size == 2
    monkeypatch.setenv("RANK", "3")
    assert not HyperCommGrid([2], ["tp"]).is_current_rank_in_grid()
    assert HyperCommGrid([2], ["tp"], 2).is_current_rank_in_grid()
    assert HyperCommGrid([2, 2], ["tp", "dp"]).group_ranks("dp") == range(1, 4, 2)


@pytest.mark.usefixtures("_no_launcher")
def test_an_unknown_world_names_the_three_ways_to_tell(monkeypatch):
    with pytest.raises(WorldError, match=r"world_size is unknown: pass it, or .* WORLD_SIZE") as e:
        HyperCommGrid([2], ["tp"])
    assert isinstance(e.value, RuntimeError)
    with pytest.raises(WorldError, match=r"rank is unknown: pass it, or .* RANK"):
        HyperCommGrid([2], ["tp"], world_size=2).is_current_rank_in_grid()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="world_size is 'many'; it must be an integer of at least 1"):
        HyperCommGrid([2], ["tp"])
    with pytest.raises(ValueError, match="world_size is 0; it must be an integer of at least 1"):
        HyperCommGrid([2], ["tp"], world_size=0)


def test_a_span_past_the_world_says_shape_offset_and_world():
    with pytest.raises(WorldError, match=r"shape \[2, 3\] at rank_offset 4 needs 10 ranks, .*world_size is 8"):
        HyperCommGrid([2, 3], ["tp", "dp"], 4, world_size=8)
    assert issubclass(WorldError, RuntimeError)
    assert HyperCommGrid([2, 3], ["tp", "dp"], 2, world_size=8).ranks == range(2, 8)


def test_groups_that_were_not_created_are_missing():
    grid = HyperCommGrid([2, 3], ["tp", "dp"], world_size=6)
    with pytest.raises(GridKeyError, match=r"no group for dims \['tp', 'dp'\] has been made; call create_pg"):
        grid.get_pg(["dp", "tp"])
    grid.register_view("expert", [6], ["ep"])
    with pytest.raises(GridKeyError, match=r"\['ep'\] of view 'expert' has been made"):
        grid.get_pg("ep", view="expert")
    with pytest.raises(GridError, match=r"dims \['pp'\] must be some of"):
        grid.get_pg("pp")
    assert issubclass(GridKeyError, KeyError)
    assert not grid.has_pg("tp")
    assert grid.group_count == 0
    grid.destroy()


def expert_grid():
    grid = HyperCommGrid([2, 2, 2, 2], ["tp", "cp", "dp", "pp"], world_size=16)
    grid.register_view("expert", [1, 4, 2, 2], ["expt_tp", "ep", "expt_dp", "pp"], ["pp"])
    return grid


def test_a_view_is_a_second_factorization_of_the_same_ranks():
    grid = expert_grid()
    assert grid.views == ("expert",)
    assert grid.get_rank_enum("ep", view="expert") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grid.get_rank_enum("expt_dp", view="expert")[0] == [0, 4]
    assert grid.get_rank_enum("pp", view="expert") == grid.get_rank_enum("pp")
    assert grid.coords(6, view="expert") == {"expt_tp": 0, "ep": 2, "expt_dp": 1, "pp": 0}
    assert grid.dim_size("ep", view="expert") == 4
    assert grid.select_dims(view="expert") == ("expt_tp", "ep", "expt_dp", "pp")


def test_requests_have_one_spelling():
    grid = expert_grid()
    assert grid.canonical(["dp", "tp"]) == grid.canonical(("tp", "dp")) == GroupRequest(("tp", "dp"))
    assert grid.canonical("pp", view="expert") == GroupRequest("pp")
    assert grid.canonical(["pp", "ep"], view="expert") == GroupRequest(("ep", "pp"), "expert")


def test_an_unknown_view_names_the_registered_ones():
    with pytest.raises(GridKeyError, match=r"^unknown view 'experts'; the registered ones are \['expert'\]") as e:
        expert_grid().get_rank_enum("ep", view="experts")
    assert isinstance(e.value, KeyError)
    with pytest.raises(GridError, match=r"dims \['tp'\] must be some of \['expt_tp', 'ep'"):
        expert_grid().get_rank_enum("tp", view="expert")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("expert", [1], ["ep"]), "the view name 'expert' is taken"),
        (("", [16], ["ep"]), "the name of a view is ''; it must be a string that is not empty"),
        (("v", [4, 2], ["ep", "pp"]), r"has 8 ranks, the grid \(tp=2 cp=2 dp=2 pp=2 .*\) has 16"),
        (("v", [8, 2], ["ep", "pp"], ["dp"]), r"view 'v' \(ep=8 pp=2 .*\) cannot share 'dp' of the grid \(tp=2 .*\)"),
        (("v", [8, 2], ["ep", "pp"], ["ep"]), r"view 'v' .* cannot share 'ep' of the grid"),
        (("v", [2, 8], ["pp", "ep"], ["pp"]), r"view 'v' \(pp=2 ep=8 .*\) cannot share 'pp' of the grid \(tp=2"),
        (
            ("v", [4, 4], ["ep", "pp"], ["pp"]),
            r"cannot share 'pp' of the grid .*: both must have it, with the same groups",
        ),
    ],
)
def test_a_view_that_does_not_fit_shows_both_sides(arguments, text):
    with pytest.raises(GridError, match=text) as caught:
        expert_grid().register_view(*arguments)
    assert isinstance(caught.value, ValueError)


def test_a_shared_dimension_is_named_once():
    grid = HyperCommGrid([2, 2], ["tp", "pp"], world_size=4)
    for shared in (["pp", "pp"], ["pp", "tp", "pp"]):
        with pytest.raises(ValueError, match=r"view 'experts' has shared_dims \['pp', .*\]; each must be named once"):
            grid.register_view("experts", [2, 2], ["ep", "pp"], shared)
    grid.register_view("experts", [2, 2], ["ep", "pp"], ["pp"])


def test_a_shared_dimension_of_size_one_may_be_anywhere():
    grid = HyperCommGrid([2, 1, 2], ["tp", "pp", "dp"], world_size=4)
    grid.register_view("v", [1, 4], ["pp", "ep"], ["pp"])
    assert grid.canonical("pp", view="v") == GroupRequest("pp")


@given(st.permutations([2, 3, 1, 2]), st.permutations([2, 3, 1, 2]), st.data())
@settings(max_examples=80, deadline=None)
def test_shared_dimensions_are_accepted_exactly_when_they_enumerate_alike(shape, other, data):
    names, other_names = ["a", "b", "c", "d"], data.draw(st.permutations(["a", "b", "c", "d"]))
    shared = data.draw(st.lists(st.sampled_from(names), unique=True))
    grid = HyperCommGrid(shape, names, 5, world_size=17)
    grid.register_view("plain", other, other_names)
    joint = [dims for count in range(1, len(shared) + 1) for dims in itertools.combinations(shared, count)]
    alike = all(grid.get_rank_enum(dims) == grid.get_rank_enum(dims, view="plain") for dims in joint)
    try:
        grid.register_view("shared", other, other_names, shared)
    except GridError:
        assert not alike
    else:
        assert alike
