"""Routes against a table of every unit and stage, and their forms."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.errors import PlanError, PlanSyntaxError
from pipegrid.plans.plan import (
    Actor,
    Move,
    Routes,
    chain,
    check_routes,
    routes_from_json,
    routes_from_text,
    routes_to_json,
)

NAMES = st.sampled_from(["images", "model", "a b", 'quo"te', "x@1>2", "é", "#"])


@st.composite
def some_routes(draw, stages=3):
    units = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    unit, replica = st.integers(0, sum(units) - 1), st.integers(0, len(units) - 1)
    moves = draw(st.dictionaries(st.tuples(unit, st.integers(0, stages - 1)), replica, max_size=6))
    skips = draw(st.dictionaries(NAMES, st.sets(unit, max_size=3), max_size=2))
    every = draw(st.dictionaries(NAMES, st.integers(1, 3), max_size=2))
    dead = draw(st.sets(st.builds(Actor, st.integers(0, 2), replica), max_size=2))
    return Routes(units, moves=moves, skips=skips, every=every, dead=dead)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), st.data())
def test_of_is_the_table_of_homes_with_moves_written_over_it(units, data):
    homes = [replica for replica, count in enumerate(units) for _ in range(count)]
    table = {(unit, stage): home for unit, home in enumerate(homes) for stage in range(3)}
    moves = data.draw(st.dictionaries(st.sampled_from(sorted(table)), st.integers(0, len(units) - 1), max_size=8))
    routes = Routes(units, moves=moves)
    table |= moves
    assert {key: routes.of(*key) for key in table} == table
    assert {(move.unit, move.stage): move.replica for move in routes.moves} == {
        key: replica for key, replica in table.items() if replica != homes[key[0]]
    }
    names = [f"{m}@{replica}" for replica, count in enumerate(units) for m in range(count)]
    assert [routes.name(unit) for unit in range(routes.num_units)] == names
    assert [routes.unit(int(r), int(m)) for m, r in (name.split("@") for name in names)] == [*range(routes.num_units)]
    assert [list(routes.units_of(replica)) for replica in range(len(units))] == [
        [unit for unit, home in enumerate(homes) if home == replica] for replica in range(len(units))
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any), st.integers(1, 4), st.data())
def test_calls_serve_each_unit_that_does_not_skip_the_module_once(units, every, data):
    skipped = data.draw(st.sets(st.integers(0, sum(units) - 1)))
    routes = Routes(units, skips={"m": skipped}, every={"m": every})
    calls = routes.calls("m")
    served = [unit for call in calls for unit in routes.served(call, "m")]
    assert served == [unit for unit in range(sum(units)) if unit not in skipped]
    for call in calls:
        for unit in routes.served(call, "m"):
            assert routes.call(unit, "m") == call
            assert routes.home(unit) == routes.home(call)
            assert routes.microbatch(unit) // every == routes.microbatch(call) / every
    assert routes.calls("other") == tuple(range(sum(units)))


@given(some_routes())
def test_what_is_written_reads_back_equal_with_its_digest(routes):
    for again in (routes_from_text(str(routes)), routes_from_json(routes_to_json(routes))):
        assert again == routes
        assert hash(again) == hash(routes)
        assert again.digest == routes.digest


@given(some_routes(), some_routes())
def test_digests_differ_where_routes_do(one, other):
    assert (one == other) == (one.digest == other.digest) == (str(one) == str(other))


def test_one_form_for_equal_routes():
    plain = Routes.identity(2, 3)
    assert plain.is_identity
    assert Routes([3, 3], moves={(0, 0): 0}, skips={"m": []}, every={"m": 1}) == plain
    assert Routes([3, 3], moves=[Move(0, 5, 0), Move(0, 4, 0)]) == Routes([3, 3], moves={(4, 0): 0, (5, 0): 0})
    for other in (
        Routes([3, 4]),
        Routes([3, 3], moves={(0, 0): 1}),
        Routes([3], skips={"m": [1]}),
        Routes([3], every={"m": 2}),
        Routes([3, 3], dead=[Actor(0, 1)]),
    ):
        assert not other.is_identity


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Routes([0, 0]), "routes.units"),
        (lambda: Routes([2, 2], moves={(4, 0): 0}), "routes.moves"),
        (lambda: Routes([2, 2], moves={(0, 0): 2}), "routes.moves"),
        (lambda: Routes([2, 2], moves=[Move(0, 0, 1), Move(0, 0, 0)]), "routes.moves"),
        (lambda: Routes([2, 2], skips={"m": [4]}), "routes.skips"),
        (lambda: Routes([2, 2], dead=[Actor(0, 2)]), "routes.dead"),
    ],
)
def test_parts_that_contradict_each_other(make, path):
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.path == path


@pytest.mark.parametrize("values", [{"units": [-1]}, {"units": [2], "every": {"m": 0}}, {"units": [True]}])
def test_numbers_out_of_range(values):
    with pytest.raises(PlanError):
        Routes(**values)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, 1),
        ("units 2 2\nroads 1", 2, 1),
        ("units 2 x", 1, 9),
        ("units 2\nunits 2", 2, 1),
        ("units 2 2\nmove 0", 2, 5),
        ("units 2 2\nmove 0 1@0", 2, 8),
        ("units 2 2\ndead", 2, 5),
        ("units 2 2\nevery m 2 3", 2, 11),
        ("units 2 2\nskip m 0", 2, 8),
    ],
)
def test_text_that_is_not_routes(text, line, column):
    with pytest.raises(PlanSyntaxError) as caught:
        routes_from_text(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"units": [2.0]},
        {"units": [2], "more": 1},
        {"units": [2, 2], "moves": {"x": {"0@0": 1}}},
        {"units": [2, 2], "moves": {"0": {"0": 1}}},
        {"units": [2, 2], "moves": {"0": {"2@0": 1}}},
        {"units": [2, 2], "moves": []},
        {"units": [2, 2], "dead": ["1"]},
        {"units": [2, 2], "dead": ""},
        {"units": [2, 2], "every": {"m": True}},
    ],
)
def test_json_that_is_not_routes(document):
    with pytest.raises(PlanError):
        routes_from_json(json.dumps(document))


def test_no_move_is_lost_where_json_writes_a_number_in_two_ways():
    document = {"units": [2, 2], "moves": {"1": {"0@1": 0}, "01": {"1@1": 0}}}
    assert routes_from_json(json.dumps(document)) == Routes([2, 2], moves=[Move(1, 2, 0), Move(1, 3, 0)])
    with pytest.raises(PlanError, match="give one"):
        routes_from_json(json.dumps({"units": [2, 2], "moves": {"1": {"0@1": 0, "00@1": 1}}}))


def test_text_by_hand():
    text = """
    units 4 4            # of two replicas
    dead 1@1
    move 1 0@1>0 1@1>0
    move 1 2@1>0 3@1>0
    skip "images" 2@0
    every images 2
    """
    routes = routes_from_text(text)
    moves = {(unit, 1): 0 for unit in range(4, 8)}
    assert routes == Routes([4, 4], moves=moves, skips={"images": [2]}, every={"images": 2}, dead=[Actor(1, 1)])
    assert routes.living(1) == (0,)
    assert routes.living(0) == (0, 1)


GRAPH = ModuleGraph({"images": 2, "sound": 1, "model": 2}, {"images": ["model"], "sound": ["model"]})
PLACES = [(0,), (1,), (2,), (3,), (4,)]


def test_routes_that_fit():
    routes = Routes([4, 4], moves={(4, 1): 0, (6, 1): 0}, skips={"images": [0, 1], "sound": [3]}, every={"images": 2})
    check_routes(routes, GRAPH, PLACES)
    check_routes(Routes([2, 2], moves={(2, 3): 0, (3, 3): 0}, dead=[Actor(3, 1)]), GRAPH, PLACES)


@pytest.mark.parametrize(
    ("routes", "path"),
    [
        (Routes([2], skips={"video": [0]}), "routes.skips"),
        (Routes([2], every={"video": 2}), "routes.every"),
        (Routes([2], every={"model": 2}), "routes.every"),
        (Routes([6], every={"model": 2, "images": 3, "sound": 2}), "routes.every"),
        (Routes([2], skips={"model": [0]}), "routes.skips"),
        (Routes([2], skips={"model": [0], "images": [0], "sound": [0]}), "routes.skips"),
        (Routes([2, 2], moves={(0, 5): 1}), "routes.moves"),
        (Routes([2, 2], moves={(1, 0): 1}, every={"images": 2}), "routes.moves"),
        (Routes([2, 2], moves={(1, 0): 1}, skips={"images": [1]}), "routes.moves"),
        (Routes([2, 2], dead=[Actor(3, 1)]), "routes.moves"),
        (Routes([2, 2], dead=[Actor(5, 1)]), "routes.dead"),
    ],
)
def test_routes_that_do_not_fit(routes, path):
    with pytest.raises(PlanError) as caught:
        check_routes(routes, GRAPH, PLACES)
    assert caught.value.path == path


def test_a_unit_that_would_train_a_module_without_a_gradient():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"a": ["b", "c"]})
    routes = Routes([2], skips={"b": [0]})
    check_routes(routes, graph, [(0,), (1,), (2,)])
    with pytest.raises(PlanError, match="no gradient back"):
        check_routes(routes, graph, [(0,), (1,), (2,)], forward_only=[2])


def test_routes_around_random_dead_actors_fit_exactly_when_no_unit_comes_to_one():
    rng = random.Random(0)
    verdicts = set()
    for _ in range(200):
        count = rng.randint(1, 3)
        units = [rng.randint(1, 3) for _ in range(count)]
        keys = [(unit, stage) for unit in range(sum(units)) for stage in range(3)]
        routes = Routes(
            units,
            moves={key: rng.randrange(count) for key in rng.sample(keys, rng.randint(0, len(keys)))},
            dead=[Actor(rng.randrange(3), rng.randrange(count))],
        )
        reached = {(stage, routes.of(unit, stage)) for unit, stage in keys}
        fits = not any((actor.position, actor.replica) in reached for actor in routes.dead)
        verdicts.add(fits)
        if fits:
            check_routes(routes, chain(3), [(0,), (1,), (2,)])
        else:
            with pytest.raises(PlanError, match="is dead"):
                check_routes(routes, chain(3), [(0,), (1,), (2,)])
    assert verdicts == {True, False}
