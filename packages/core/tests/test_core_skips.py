"""Graphs with edges that skip stages, and the way of a value to the stages that use it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph, ModuleGraphError, chain
from pipegrid.core.skips import Uses, hops_of_value, messages_naive, skips_among, values_by_edge


def text(edges):
    return [str(edge) for edge in edges]


def test_a_skip_is_an_edge_of_its_module():
    graph = ModuleGraph({"a": 2, "b": 3}, {"a": ["b"]}, skips=[Edge(2, 4)])
    assert text(graph.stage_edges) == ["0>1", "1>2", "2>3", "2>4", "3>4"]
    assert text(graph.edges_inside("a")) == ["0>1"]
    assert text(graph.edges_inside("b")) == ["2>3", "2>4", "3>4"]
    assert graph.distance_to_sink == (4, 3, 2, 1, 0)
    assert graph != ModuleGraph({"a": 2, "b": 3}, {"a": ["b"]})
    assert chain(3, [Edge(0, 2)]).skips == (Edge(0, 2),)


@pytest.mark.parametrize("skip", [Edge(0, 1), Edge(1, 1), Edge(2, 0), Edge(1, 3), Edge(0, 9)])
def test_a_skip_passes_a_stage_of_one_module(skip):
    with pytest.raises(ModuleGraphError):
        ModuleGraph({"a": 3, "b": 2}, {"a": ["b"]}, skips=[skip])


def test_a_skip_is_declared_once():
    with pytest.raises(ModuleGraphError, match="a skip is declared twice in"):
        chain(3, [Edge(0, 2), Edge(0, 2)])


def test_one_way_leads_to_each_position_and_the_rest_stays_there():
    placement = (0, 1, 2, 3, 3, 2, 1, 0)
    assert text(hops_of_value(Uses(1, tuple(range(2, 8))), placement)) == ["1>2", "1>3", "3>4", "2>5", "1>6", "1>7"]


def test_a_value_comes_to_each_host_once():
    hosts = (0, 0, 1, 1, 0, 1)
    edges = hops_of_value(Uses(0, (1, 2, 3, 4, 5)), range(6), hosts)
    assert sum(hosts[edge.source] != hosts[edge.destination] for edge in edges) == 1
    # On the host of the source straight from it; on the other, by the first stage there.
    assert text(edges) == ["0>1", "0>2", "2>3", "0>4", "2>5"]
    assert text(hops_of_value(Uses(0, (2, 3), held=(1,)), range(4), (0, 1, 1, 0))) == ["1>2", "0>3"]


@given(st.data())
def test_no_way_of_a_value_crosses_hosts_less_often_or_is_shorter(data):
    """Against all trees: each stage that uses the value takes it from any one before it that has it."""
    count = data.draw(st.integers(2, 5))
    positions = data.draw(st.integers(1, count))
    placement = [data.draw(st.integers(0, positions - 1)) for _ in range(count)]
    of_position = [data.draw(st.integers(0, 1)) for _ in range(positions)]
    hosts = [of_position[place] for place in placement]
    users = data.draw(st.lists(st.integers(1, count - 1), unique=True, min_size=1))
    uses = Uses(0, tuple(sorted(users)))

    def cost(edges):  # between hosts, then between positions
        return tuple(sum(key[one.source] != key[one.destination] for one in edges) for key in (hosts, placement))

    parents = [[0, *(other for other in uses.users if other < user)] for user in uses.users]
    trees = [list(map(Edge, chosen, uses.users)) for chosen in itertools.product(*parents)]
    found = hops_of_value(uses, placement, hosts)
    assert cost(found) == min(map(cost, trees))
    # Without hosts as few messages, of which none is forwarded.
    direct = hops_of_value(uses, placement)
    assert cost(direct)[1] == cost(found)[1]
    assert all(one.source == 0 for one in direct if placement[one.source] != placement[one.destination])


def test_values_share_the_edges_of_their_ways():
    found = values_by_edge({"x": Uses(0, (2, 3)), "y": Uses(0, (3,)), "z": Uses(1, (2,))}, range(4))
    assert {str(edge): values for edge, values in found.items()} == {
        "0>2": ("x",),
        "0>3": ("x", "y"),
        "1>2": ("z",),
    }


def test_what_the_stage_before_sends_comes_once():
    """A stage that has the value as its hidden states keeps it for those of its position, and is sent nothing."""
    assert text(hops_of_value(Uses(0, (2, 3, 4, 5), held=(1,)), (0, 1, 2, 0, 1, 2))) == ["0>2", "0>3", "1>4", "2>5"]
    assert messages_naive(Uses(0, (2, 3, 4, 5), held=(1,))) == 4
    assert text(skips_among([Edge(0, 1), Edge(0, 2)])) == ["0>2"]


def blocks(num_layers, block, num_stages):
    """The uses of the end of each block of layers, which all later stages use."""
    counts = [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    for end in range(block - 1, num_layers, block):
        stage, held = stages[end], stages[end + 1] != stages[end]
        behind = tuple(range(stage + 1, num_stages))
        yield Uses(stage, behind[held:], behind[:held])


@pytest.mark.parametrize(("positions", "most", "naive"), [(8, 70, 136), (16, 155, 315)])
def test_residuals_of_blocks_cost_half_of_what_each_boundary_would(positions, most, naive):
    """93 layers in blocks of 12, four stages on each position: what crosses between positions, in hidden states."""
    num_stages = 4 * positions
    placement = [stage % positions for stage in range(num_stages)]
    made = list(blocks(93, 12, num_stages))
    hops = [edge for uses in made for edge in hops_of_value(uses, placement)]
    messages = sum(placement[edge.source] != placement[edge.destination] for edge in hops)
    assert (num_stages - 1 + messages, num_stages - 1 + sum(map(messages_naive, made))) == (most, naive)
