"""Deaths that a job survives: a rival from the definition, the examples of the words, and the planner's report."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.planner import JobError, count_survivable, plan, survivable, survivable_table
from pipegrid.planner.report import _rooms, summary, survival
from pipegrid.topology.grid import Grid
from planner_kit.jobs import small_job

DIMS = ("tp", "cp", "dp", "pp")
shardings = st.sampled_from(["none", "optimizer", "parameters"])


@st.composite
def jobs(draw):
    """Grids of one or two modules, apart, on the same ranks or in part; dims in any order."""
    grids, first = {}, 0
    for name in draw(st.sampled_from([("a",), ("a", "b")])):
        dims = draw(st.permutations(DIMS))
        grid = Grid(draw(st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 2))), dims, first)
        grids[name] = grid
        first = draw(st.integers(0, grid.size))
    return grids


def expected(grids, dead, sharding, buddy):
    """From the definition: a place needs a replica without dead ranks, each piece a rank that has it and lives."""
    dead = set(dead)
    for grid in grids.values():
        at = {rank: grid.coords(rank) for rank in grid.ranks}
        for pp in range(grid.size_of("pp")):
            whole = [
                dp
                for dp in range(grid.size_of("dp"))
                if not any(at[rank]["dp"] == dp and at[rank]["pp"] == pp for rank in dead if rank in at)
            ]
            if not whole:
                return False
        for rank in dead & set(grid.ranks):
            mine = at[rank]
            same = [one for one in at if at[one]["tp"] == mine["tp"] and at[one]["pp"] == mine["pp"] and one != rank]
            buddies = [
                one
                for one in same
                if at[one]["cp"] == mine["cp"] and at[one]["dp"] == (mine["dp"] + 1) % grid.size_of("dp")
            ]
            if sharding == "none" and not set(same) - dead:
                return False
            if sharding != "none" and not (buddy and set(buddies) - dead):
                return False
    return True


@given(jobs(), shardings, st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_what_survives_is_as_defined(grids, sharding, buddy, data):
    ranks = sorted(set().union(*(grid.ranks for grid in grids.values())))
    dead = tuple(data.draw(st.sets(st.sampled_from(ranks), max_size=4)))
    found = survivable(grids, dead, sharding=sharding, buddy=buddy)
    assert found.survives == expected(grids, dead, sharding, buddy)
    for piece in found.pieces:
        grid = grids[piece.module]
        assert piece.rank in dead
        assert piece.holder not in dead
        assert (piece.holder is None) == (piece.source == "checkpoint")
        if piece.holder is not None:
            assert all(grid.place(piece.holder, dim) == grid.place(piece.rank, dim) for dim in ("tp", "cp", "pp"))
            ahead = (grid.place(piece.holder, "dp") - grid.place(piece.rank, "dp")) % grid.size_of("dp")
            assert ahead == 1 if piece.source == "buddy" else ahead > 0


@given(jobs(), shardings, st.booleans(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_counts_are_those_of_each_death_and_each_pair(grids, sharding, buddy, unit):
    ranks = sorted(set().union(*(grid.ranks for grid in grids.values())))
    units = [[rank for rank in ranks if rank // unit == node] for node in sorted({rank // unit for rank in ranks})]
    counts = count_survivable(grids, unit=unit, sharding=sharding, buddy=buddy)
    assert (counts.survived, counts.units) == (
        sum(expected(grids, members, sharding, buddy) for members in units),
        len(units),
    )
    pairs = [expected(grids, [*a, *b], sharding, buddy) for a, b in combinations(units, 2)]
    assert (counts.pairs, counts.of_pairs) == (sum(pairs), len(pairs))


def test_a_stage_with_two_replicas_survives_all_deaths_but_those_of_both():
    counts = count_survivable({"m": Grid((2, 16), ("dp", "pp"))})
    assert str(counts) == "32 of 32 single deaths, 480 of 496 pairs"
    assert str(count_survivable({"m": Grid((2, 16), ("dp", "pp"))}, unit=2)) == "0 of 16 single deaths, 0 of 120 pairs"


def test_a_death_in_words():
    grids = {"m": Grid((1, 2, 2), ("tp", "dp", "pp"))}
    assert str(survivable(grids, (1,))) == "without rank 1: goes on, parameters and optimizer from a peer"
    assert str(survivable(grids, (0, 1))) == (
        "without ranks 0, 1: restart, no whole replica is left of position 0 of m"
    )
    shared = survivable(grids, (1,), sharding="optimizer")
    assert str(shared) == "without rank 1: restart, parameters from a peer; optimizer from a checkpoint"
    assert [(piece.what, piece.holder) for piece in shared.pieces] == [("parameters", 0), ("optimizer", None)]
    buddied = survivable(grids, (1,), sharding="parameters", buddy=True)
    assert str(buddied) == "without rank 1: goes on, parameters and optimizer from a buddy"
    assert survivable(grids, ()).survives


def test_the_table_has_a_row_for_positions_that_are_alike():
    grids = {"encoder": Grid((4, 1), ("dp", "pp")), "language": Grid((2, 1, 3), ("tp", "dp", "pp"), 4)}
    assert survivable_table(grids, sharding="optimizer").splitlines() == [
        "module    position  replicas  stop together  parameters from  optimizer from  the others",
        "--------  --------  --------  -------------  ---------------  --------------  ----------",
        "encoder   0                4              1  a peer           a checkpoint    restart",
        "language  0 to 2           1              2  a checkpoint     a checkpoint    restart",
    ]


@given(jobs(), shardings, st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_row_says_what_becomes_of_any_death_at_its_positions(grids, sharding, buddy):
    rows = [line.split("  ") for line in survivable_table(grids, sharding=sharding, buddy=buddy).splitlines()[2:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    for name, grid in grids.items():
        for rank in grid.ranks:
            position = grid.place(rank, "pp")
            (said,) = [
                one[-1]
                for one in cells
                if one[0] == name and int(one[1].split(" to ")[0]) <= position <= int(one[1].split(" to ")[-1])
            ]
            assert (said == "go on") == survivable({name: grid}, (rank,), sharding=sharding, buddy=buddy).survives


def test_more_pairs_than_are_examined_are_not_counted():
    grid = {"m": Grid((16, 2, 40), ("tp", "dp", "pp"))}
    assert count_survivable(grid).pairs == 1280 * 1279 // 2 - 40 * 16 * 16
    assert str(count_survivable({"m": Grid((64, 32), ("tp", "dp"))})) == "2048 of 2048 single deaths"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dead": (4,)}, r"dead is \(4,\) .*no grid has rank 4"),
        ({"dead": 1}, "dead is 1; it must be a list or tuple"),
        ({"dead": (-1,)}, r"dead\[0\] is -1"),
        ({"dead": (1,), "sharding": "all"}, "sharding is 'all'; it must be 'none' or 'optimizer' or 'parameters'"),
    ],
)
def test_a_mistake_is_a_typed_error(options, text):
    with pytest.raises(JobError, match=text):
        survivable({"m": Grid((2, 2), ("dp", "pp"))}, **options)


@pytest.mark.parametrize(("batch", "replicas"), [(4, {2, 4}), (1, {1})])
@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_the_report_of_a_plan_says_which_deaths_it_survives(batch, replicas, sharding):
    job = small_job(decoder=3, encoder=2, batch=batch, schedules=("1f1b",))
    planned = plan(evolve(job, training=evolve(job.training, sharding=sharding)), gpus=8)
    assert survival(planned.winner, planned.memory) in summary(planned)
    assert {min(part.dp for part in choice.arrangement.parts) for choice in planned.choices} == replicas
    for choice in planned.choices:
        text, gpus = survival(choice, planned.memory), choice.arrangement.gpus
        counted = f"{gpus} of {gpus} single deaths, "
        if batch == 1:
            assert text == "survivable: no death of a GPU, its work or its state is on no other"
        elif sharding == "none":
            assert text.startswith(f"survivable: {counted}")
            assert text.endswith("others restart from a checkpoint")
        else:
            assert text.startswith(
                "survivable: no death of a GPU, whose optimizer states are sharded over replicas and "
            )
            assert f"which pipegrid.survive does not keep, {counted}" in text


def test_the_room_for_a_death_is_what_the_dead_held_shared_by_the_others():
    planned = plan(small_job(alone=True, batch=8, schedules=("1f1b",)), gpus=8)
    seen = set()
    for choice in planned.choices:
        (part,) = choice.arrangement.parts
        rows = list(_rooms(choice))
        for position, (more, at, room) in enumerate(rows):
            held = min(choice.num_microbatches, part.pp - position)  # of 1F1B
            assert (more, at) == (math.ceil(held / (part.dp - 1)) if part.dp > 1 else 0, position)
            assert room == pytest.approx(more * choice.simulation.peaks()[position] / held)
            seen.add((part.dp, held))
    assert {(1, 6), (2, 4), (4, 2)} <= seen
