"""What every public name says to what it cannot use: an error of the package, before anything is sent."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import (
    Box,
    BridgeCommunicator,
    BridgeDirection,
    BridgeError,
    ColocatedBridgeCommunicator,
    EdgeOptions,
    Links,
    Message,
    MissingTensorError,
    ModuleGraph,
    ModuleGraphError,
    MultiModulePipelineCommunicator,
    Partial,
    Replicate,
    ShapeError,
    Shard,
    Side,
    Sizes,
    SliceInfo,
    VTPCommunicator,
    VTPTopology,
    axis_names,
    boundary_side,
    plan_reshard,
    positions_of,
)
from pipegrid.core.edge import Direction, Edge
from pipegrid.transport.errors import P2PUsageError
from reshard_kit.grids import grid


@pytest.fixture(scope="module", autouse=True)
def _world():
    """A world of this process, in which a bridge leads from a rank to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ONE = grid(dp=1)
SRC, DST = boundary_side(grid(dp=2), "source"), boundary_side(grid(2, tp=2), "destination")
AXES = axis_names(3)
SIZES = Sizes((4, 2, 2), axes=AXES)
PLAN = plan_reshard(SRC, DST, SIZES)
BOX = Box((0, 0), (2, 2))
GRAPH = ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]})
LINKS = Links(1e9, 1e-6)
VTP = VTPTopology([1, 2])
X = torch.zeros(2, 2, 2)

NO_INTEGER = ["x", [], {}, True, 1.5, math.nan]
NO_COUNT = [*NO_INTEGER, None, -1]
NO_SIZE = [*NO_COUNT, 0]
NO_NUMBER = [None, "x", [], True, math.nan, math.inf, -1]
NO_TEXT = [None, "", 5, True, ["b"], {}]
NO_INTEGERS = [None, "x", 5, {1, 2}, [None], ["x"], [True], [1.5], [[1]]]
NO_MAPPING = [
    "b",
    {"s": 1},
    {"b": None},
    {"b": "0"},
    {"b": -1},
    {"b": True},
    {"b": 3},
    {"b": 0.0},
    {"b": 0, "s": 1, "h": 1},
]
NO_GRID = [None, "x", 5, {}, [ONE]]
NO_STRATEGY = [None, "x", "", 5]
NO_TENSOR = [None, "x", 5, [X], {"a": X}]
NOT_DENSE = [
    X.to_sparse(),
    torch.nested.nested_tensor([X[0], X[0, :1]], layout=torch.jagged),
    X.as_subclass(type("DTensor", (torch.Tensor,), {"to_local": torch.Tensor.detach})),
]
NO_EDGE = [None, "0>1", (0, 1), Edge(1, 2)]
NO_PLACEMENTS = [{"dp": None}, {"dp": "b"}, {"dp": Shard}, {"x": Shard("b")}]


def used(make, **given):
    """A communicator's method, on a communicator of its own."""

    def method(name):
        def call(**arguments):
            communicator = make(**given)
            try:
                return getattr(communicator, name)(**arguments)
            finally:
                communicator.destroy()

        return call

    return method


def a_bridge_with_an_activation():
    """Its gradient is due."""
    bridge = BridgeCommunicator(ONE, ONE)
    bridge.send_forward(X)
    bridge.recv_forward()
    return bridge


a_side = partial(boundary_side, grid=grid(dp=2, pp=2), end="source")
a_plan = partial(plan_reshard, src=SRC, dst=DST, sizes=SIZES)
a_topology = partial(VTPTopology, tp_sizes=[1, 2])
a_bridge = partial(BridgeCommunicator, src_grid=ONE, dest_grid=ONE)
a_colocated = partial(ColocatedBridgeCommunicator, src_grid=ONE, dest_grid=ONE)
a_network = partial(
    MultiModulePipelineCommunicator, module_to_grid_map={"a": ONE, "b": ONE}, topology={"a": ["b"]}, config=None
)
positions = partial(positions_of, graph=GRAPH, grids={"a": ONE, "b": ONE}, stage_placement={"a": [0], "b": [0]})
total = partial(
    MultiModulePipelineCommunicator.compute_total_pipeline_stages,
    topology={"a": ["b"]},
    module_to_grid_map={"a": ONE, "b": ONE},
)
of_bridge = used(BridgeCommunicator, src_grid=ONE, dest_grid=ONE)
received = used(a_bridge_with_an_activation)
of_colocated = used(ColocatedBridgeCommunicator, src_grid=ONE, dest_grid=ONE)
of_network = used(a_network)
of_module = used(MultiModulePipelineCommunicator, module_to_grid_map={"a": ONE}, topology={"a": []}, config=None)

REFUSED = [
    ("box", partial(Box, shape=(2, 2)), "start", [*NO_INTEGERS, (0,), (0, -1)], BridgeError),
    ("box", partial(Box, start=(0, 0)), "shape", [*NO_INTEGERS, (1,), (0, -1)], BridgeError),
    ("message", partial(Message, destination=1, source_box=BOX, destination_box=BOX), "source", NO_COUNT, BridgeError),
    ("links", partial(Links, latency=0), "bandwidth", [*NO_NUMBER, 0], BridgeError),
    ("links", partial(Links, bandwidth=1), "latency", NO_NUMBER, BridgeError),
    ("links", partial(Links, bandwidth=1, latency=0), "shared", [["x"], [[None]], [[-1]], [[0, 0]]], BridgeError),
    ("graph", ModuleGraph, "modules", [[], {}, {5: 1}, {"a": None}, {"a": 0}, {"a": True}], ModuleGraphError),
    (
        "graph",
        partial(ModuleGraph, modules={"a": 1}),
        "edges",
        [[("a", "b")], {"a": "a"}, {"a": 5}, {"a": ["x"]}, {"a": ["a"]}],
        ModuleGraphError,
    ),
    ("graph", GRAPH.depth, "module", ["x", None], ModuleGraphError),
    ("graph", partial(GRAPH.stage, module="a"), "index", [1, -2], ModuleGraphError),
    ("graph", GRAPH.module_of, "stage", [-1, 2], ModuleGraphError),
    (
        "positions",
        positions,
        "stage_placement",
        [{"a": [0]}, {"a": [0], "b": [1]}, {"a": [0], "b": [0, 0]}],
        BridgeError,
    ),
    ("positions", positions, "grids", [{}, {"a": ONE}], BridgeError),
    ("sharded", Shard, "axis", NO_TEXT, BridgeError),
    ("sharded", partial(Shard, axis="b"), "order", [*NO_TEXT, "x", "zigzag"], BridgeError),
    (
        "side",
        partial(Side, name="s", base=0, dims=SRC.dims),
        "lane_weights",
        [*NO_INTEGERS[1:], (1,), (0, 0), (1, -1)],
        BridgeError,
    ),
    ("side", SRC.lane_of, "rank", [-1, 2], BridgeError),
    ("side", DST.class_of, "rank", [-1, 0], BridgeError),
    ("boundary_side", a_side, "grid", NO_GRID, BridgeError),
    ("boundary_side", a_side, "end", ["src", None], BridgeError),
    ("boundary_side", a_side, "placements", NO_PLACEMENTS, BridgeError),
    ("boundary_side", a_side, "stage", [-1, 2], BridgeError),
    ("boundary_side", a_side, "lane_weights", [["x"], [1.5], [1], [0, 0], [1, -1]], BridgeError),
    ("axis_names", axis_names, "ndim", [*NO_SIZE, 10**30], BridgeError),
    ("axis_names", partial(axis_names, ndim=3), "dim_mapping", NO_MAPPING, BridgeError),
    ("sizes", partial(Sizes, axes=AXES), "shape", [*NO_INTEGERS, [], [4, 2], [4, 2, -1]], ShapeError),
    (
        "sizes",
        partial(Sizes, shape=(4, 2, 2)),
        "axes",
        [None, "bsh", [None], [["s"], ["h"], []], [["b", 5], [], []], [["b"], ["b"], []], [["s", "b"], [], []]],
        BridgeError,
    ),
    ("sizes", partial(Sizes, shape=(4, 2, 2), axes=AXES), "src_lanes", [*NO_INTEGERS[1:], [1], [5, -1]], BridgeError),
    ("sizes", partial(Sizes, shape=(4, 2, 2), axes=AXES), "dst_lanes", [*NO_INTEGERS[1:], [1], [5, -1]], BridgeError),
    ("sizes", partial(Sizes, shape=(4, 2, 2), axes=AXES), "samples", [*NO_INTEGERS[1:], [1], [5, -1]], BridgeError),
    ("plan_reshard", a_plan, "strategy", NO_STRATEGY, BridgeError),
    ("plan_reshard", a_plan, "itemsize", NO_SIZE, BridgeError),
    ("plan_reshard", a_plan, "leader_below", NO_COUNT, BridgeError),
    ("plan", PLAN.source_shape, "rank", [-1, 2], BridgeError),
    ("plan", PLAN.destination_spans, "rank", [-1, 0], BridgeError),
    ("edge options", EdgeOptions, "strategy", NO_STRATEGY, BridgeError),
    ("edge options", EdgeOptions, "leader_below", NO_COUNT, BridgeError),
    ("edge options", EdgeOptions, "tensor_ndim", NO_INTEGER, BridgeError),
    ("edge options", EdgeOptions, "dim_mapping", NO_MAPPING[:5], BridgeError),
    ("edge options", EdgeOptions, "src_lanes", [*NO_INTEGERS[1:], (1, -1)], BridgeError),
    ("edge options", EdgeOptions, "dest_lanes", [*NO_INTEGERS[1:], (1, -1)], BridgeError),
    ("slice", partial(SliceInfo, size=1), "start", NO_COUNT, BridgeError),
    ("slice", partial(SliceInfo, start=0), "size", NO_COUNT, BridgeError),
    ("vtp topology", VTPTopology, "tp_sizes", [*NO_INTEGERS, [], [0], [-1]], BridgeError),
    ("vtp topology", a_topology, "dp", NO_SIZE, BridgeError),
    (
        "vtp topology",
        a_topology,
        "ranks",
        [5, "x", [[0]], [[0], [1]], [[0], [1, 0]], [[0], [1, True]], [[0], [1, -1]]],
        BridgeError,
    ),
    ("vtp topology", a_topology, "world_size", [*NO_INTEGER, -1, 0, 2, 4], BridgeError),
    ("vtp topology", a_topology, "layout", [5, [], "x"], BridgeError),
    ("vtp topology", a_topology, "sequence_parallel", ["x", [True]], BridgeError),
    ("vtp topology", partial(a_topology, sequence_parallel=True), "sequence_length", [*NO_INTEGER, 0, 3], BridgeError),
    ("vtp topology", a_topology, "sequence_axis", NO_COUNT, BridgeError),
    ("vtp topology", VTP.check_world, "world_size", [0, 2, 4], BridgeError),
    ("vtp topology", VTP.place_of, "rank", [-1, 3], BridgeError),
    ("vtp", VTPCommunicator, "topology", [None, [1], VTP], BridgeError),
    ("vtp", partial(VTPCommunicator, topology=VTPTopology([1])), "config", [5, "x", {}, [1]], P2PUsageError),
    ("bridge", a_bridge, "src_grid", NO_GRID, BridgeError),
    ("bridge", a_bridge, "dest_grid", NO_GRID, BridgeError),
    ("bridge", a_bridge, "dim_mapping", NO_MAPPING, BridgeError),
    ("bridge", a_bridge, "comm_dtype", ["float32", 5, torch.int32], BridgeError),
    ("bridge", a_bridge, "tensor_ndim", [*NO_SIZE, 1, 10**30], BridgeError),
    ("bridge", a_bridge, "src_placements", NO_PLACEMENTS[3:], BridgeError),
    ("bridge", a_bridge, "src_lanes", [[1, 1], [0], [-1], [1.5]], BridgeError),
    ("bridge", a_bridge, "dest_lanes", [[1, 1], [0], [-1], [1.5]], BridgeError),
    ("bridge", a_bridge, "strategy", NO_STRATEGY, BridgeError),
    ("bridge", a_bridge, "leader_below", NO_COUNT, BridgeError),
    ("bridge", a_bridge, "shapes", ["x", True], BridgeError),
    ("bridge", a_bridge, "src_stage", [-1, 1], BridgeError),
    ("bridge", a_bridge, "config", [5, "x", {}, [1]], P2PUsageError),
    ("bridge send", of_bridge("send_forward"), "tensor", [*NO_TENSOR, torch.zeros(2, 2), *NOT_DENSE], ShapeError),
    ("bridge send", partial(of_bridge("isend_forward"), tensor=X), "samples", [["x"], [1.5], [-2], [1]], BridgeError),
    ("bridge send", of_bridge("send_forward_recv_backward"), "tensor", NO_TENSOR, ShapeError),
    ("bridge send", received("send_backward"), "grad", [*NO_TENSOR[1:], X[0], X.double()], ShapeError),
    ("bridge send", received("send_backward_recv_forward"), "grad", NO_TENSOR[1:], ShapeError),
    ("bridge receive", of_bridge("irecv_forward"), "shape", NO_INTEGERS[1:], ShapeError),
    ("bridge receive", received("irecv_backward"), "shape", NO_INTEGERS[1:], ShapeError),
    ("bridge attach", of_bridge("attach"), "lanes", [{}], BridgeError),
    ("colocated", a_colocated, "src_grid", NO_GRID, BridgeError),
    ("colocated", a_colocated, "dest_grid", NO_GRID, BridgeError),
    ("colocated", a_colocated, "dim_mapping", NO_MAPPING[:6], BridgeError),
    ("colocated", a_colocated, "check_every", NO_COUNT, BridgeError),
    ("colocated send", of_colocated("communicate"), "tensor", [*NO_TENSOR, torch.tensor(1.0)], ShapeError),
    ("network", a_network, "module_to_grid_map", [{}, {"a": ONE}], ModuleGraphError),
    ("network", a_network, "module_to_grid_map", [{"a": ONE, "b": None}, {"a": ONE, "b": 5}], BridgeError),
    (
        "network",
        a_network,
        "topology",
        [{}, {"a": "language"}, {"a": ["x"]}, {"a": ["b"], "b": ["a"]}],
        ModuleGraphError,
    ),
    ("network", a_network, "dim_mapping", NO_MAPPING[:6], BridgeError),
    ("network", a_network, "module_output_ndim", [{"x": 3}, {"a": 0}, {"a": 1}], BridgeError),
    ("network", a_network, "edges", [{"a": EdgeOptions()}, {("b", "a"): EdgeOptions()}, {("a", "b"): {}}], BridgeError),
    ("network", a_network, "placements", [{"x": {}}, {"a": {"x": Shard("b")}}], BridgeError),
    ("network", a_network, "stage_placement", [{"x": [0]}, {"a": [1]}], BridgeError),
    ("network", a_network, "stage_placement", [{"a": []}], ModuleGraphError),
    ("network", a_network, "config", [5, "x", {}, [1]], P2PUsageError),
    ("network stages", total, "topology", [{}, {"a": ["x"]}], ModuleGraphError),
    ("network stages", total, "module_to_grid_map", [{}, {"a": ONE}], ModuleGraphError),
    ("network stages", total, "rank", [-1, 1], BridgeError),
    ("network stages", partial(total, rank=0), "module_name", ["x", 5], BridgeError),
    (
        "network send",
        partial(of_network("isend"), edge=Edge(0, 1), direction=Direction.FORWARD),
        "payload",
        NO_TENSOR,
        ShapeError,
    ),
    (
        "network send",
        partial(of_network("isend"), payload=X, direction=Direction.FORWARD),
        "edge",
        NO_EDGE,
        BridgeError,
    ),
    ("network receive", partial(of_network("irecv"), direction=Direction.FORWARD), "edge", NO_EDGE, BridgeError),
    (
        "network receive",
        partial(of_network("irecv"), edge=Edge(0, 1), direction=Direction.FORWARD),
        "shapes",
        NO_INTEGERS[1:],
        ShapeError,
    ),
    (
        "network both",
        partial(of_network("collective"), payload=X, direction=Direction.FORWARD),
        "edge",
        NO_EDGE,
        BridgeError,
    ),
    ("network ranks", of_network("neighbours"), "edges", [[None], [(0, 1)], [Edge(1, 2)]], BridgeError),
    ("network verb", of_module("send_forward"), "output_dict", [None, X, [X], 5], ShapeError),
    ("network verb", of_module("send_forward"), "output_dict", [{"x": X}, {5: X}], MissingTensorError),
    ("network verb", of_module("send_backward"), "grad_dict", [None, X, [X], 5], ShapeError),
]


@pytest.mark.parametrize(
    ("call", "argument", "values", "error"),
    [
        pytest.param(call, argument, values, error, id=f"{name}-{argument}")
        for name, call, argument, values, error in REFUSED
    ],
)
def test_what_an_argument_cannot_be_is_refused_in_words(call, argument, values, error):
    for value in values:
        with pytest.raises(error) as refused:
            call(**{argument: value})
        assert type(refused.value).__module__.startswith("pipegrid."), value
        assert len(str(refused.value)) > 30, value  # what was given, and what may be


def test_placements_are_values_and_directions_are_named():
    assert (Replicate(), Partial()) == (Replicate(), Partial())
    with pytest.raises(ValueError, match="'x' is not a valid BridgeDirection"):
        BridgeDirection("x")


def test_integers_of_other_libraries_are_integers():
    one, two = torch.tensor(1), torch.tensor(2)
    assert Box((0, one), (two, 2)) == Box((0, 1), (2, 2))
    assert (
        plan_reshard(SRC, DST, SIZES, itemsize=two, rank=1).messages == plan_reshard(SRC, DST, SIZES, rank=1).messages
    )
    assert ModuleGraph({"a": two}).num_stages == 2
    assert VTPTopology([one, two]) == VTP
    assert axis_names(torch.tensor(3)) == AXES
