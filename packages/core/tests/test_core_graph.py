"""The graph of modules: numbering, edges, distances, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph, ModuleGraphError

OMNI = ModuleGraph(
    {"image": 2, "audio": 1, "llm": 2, "generator": 1},
    {"image": ["llm"], "audio": ["llm"], "llm": ["generator"], "generator": []},
)


def test_stages_are_numbered_through_the_modules_in_order():
    assert OMNI.order == ("image", "audio", "llm", "generator")
    assert [OMNI.module_of(stage) for stage in range(OMNI.num_stages)] == [
        ("image", 0),
        ("image", 1),
        ("audio", 0),
        ("llm", 0),
        ("llm", 1),
        ("generator", 0),
    ]
    assert OMNI.stage("llm", -1) == 4
    assert OMNI.depth("image") == 2


def test_edges_join_last_stages_to_first_ones():
    assert OMNI.stage_edges == (Edge(0, 1), Edge(1, 3), Edge(2, 3), Edge(3, 4), Edge(4, 5))
    assert OMNI.sources == ("image", "audio")
    assert OMNI.sinks == ("generator",)


def test_distance_counts_the_longest_way_to_a_sink():
    assert OMNI.distance_to_sink == (4, 3, 3, 2, 1, 0)
    assert max(OMNI.distance_to_sink) == 4
    diamond = ModuleGraph({"enc": 1, "mid": 3, "llm": 1}, {"enc": ["mid", "llm"], "mid": ["llm"]})
    assert diamond.distance_to_sink == (4, 3, 2, 1, 0)


def test_a_module_declared_before_what_feeds_it_comes_after_it():
    graph = ModuleGraph({"llm": 1, "enc": 1}, [("enc", "llm")])
    assert graph.order == ("enc", "llm")
    assert graph == ModuleGraph([("llm", 1), ("enc", 1)], {"enc": ["llm"]})


@pytest.mark.parametrize(
    ("modules", "edges", "text"),
    [
        ({}, {}, "no modules"),
        ([("a", 1), ("a", 2)], {}, "declared twice"),
        ({"a": 0}, {}, "the depth of module 'a' is 0; it must be an integer of at least 1"),
        ({"a": 1}, {"a": ["b"]}, "unknown module 'b'"),
        ({"a": 1, "b": 1}, [("a", "b"), ("a", "b")], "edge is declared twice"),
        ({"a": 1, "b": 1}, {"a": ["b"], "b": ["a"]}, r"cycle: . -> . -> ."),
        ({"a": 1}, {"a": ["a"]}, "cycle: a -> a"),
        (None, {}, r"modules is None; it must be a list or tuple"),
        ("ab", {}, r"modules is 'ab'; it must be a list or tuple"),
        ([("a", 1), "b"], {}, r"modules\[1\] is 'b'; it must be a pair, where no mapping is given"),
        ({"a": 1}, 3, "edges is 3; it must be a list or tuple"),
        ({"a": 1, "b": 1}, [("a", "b", "b")], r"edges\[0\] is \('a', 'b', 'b'\) \(tuple\); it must be a pair"),
        ({"a": 1, "b": 1}, [("a", ["b"])], r"the modules of an edge\[1\] is \['b'\] \(list\); it must be a string"),
    ],
)
def test_what_is_no_graph_is_refused(modules, edges, text):
    with pytest.raises(ModuleGraphError, match=text):
        ModuleGraph(modules, edges)


def test_stages_that_do_not_exist():
    with pytest.raises(ModuleGraphError, match="no stage 2"):
        OMNI.stage("llm", 2)
    with pytest.raises(ModuleGraphError, match=r"no stage 6; the graph has stages 0\.\.5"):
        OMNI.module_of(6)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_acyclic_graph(data):
    names = [f"m{k}" for k in range(data.draw(st.integers(1, 6)))]
    forward = [pair for pair in itertools.combinations(names, 2) if data.draw(st.booleans())]
    depths = {name: data.draw(st.integers(1, 3)) for name in data.draw(st.permutations(names))}
    graph = ModuleGraph(depths, forward)
    assert sorted(graph.order) == sorted(names)
    assert all(edge.source < edge.destination for edge in graph.stage_edges)
    assert len(graph.stage_edges) == len(forward) + sum(depth - 1 for depth in depths.values())

    def longest(stage):
        return max((1 + longest(e.destination) for e in graph.stage_edges if e.source == stage), default=0)

    assert list(graph.distance_to_sink) == [longest(stage) for stage in range(graph.num_stages)]
    for stage in range(graph.num_stages):
        assert graph.stage(*graph.module_of(stage)) == stage
