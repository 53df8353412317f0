"""What the package offers, and that planning needs no torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import pipegrid.bridges
import pipegrid.transport

PUBLIC = [
    "Axes",
    "BridgeCommunicator",
    "BridgeError",
    "ColocatedBridgeCommunicator",
    "EdgeOptions",
    "Links",
    "ModuleGraph",
    "MultiModulePipelineCommunicator",
    "Packed",
    "Partial",
    "Replicate",
    "Shard",
    "VTPCommunicator",
    "VTPTopology",
    "Whole",
]
# Imported from the package as well; outside of __all__.
FURTHER = [
    "axis_names",
    "boundary_side",
    "check_plan",
    "Side",
    "positions_of",
    "Box",
    "BridgeDirection",
    "Completion",
    "Message",
    "MissingTensorError",
    "ModuleGraphError",
    "Positions",
    "RankModuleInfo",
    "ReshardPlan",
    "ShapeError",
    "Sizes",
    "SliceInfo",
    "plan_reshard",
    "routes",
]


def test_the_public_names_are_these():
    assert pipegrid.bridges.__all__ == sorted(PUBLIC)
    for name in PUBLIC + FURTHER:
        assert getattr(pipegrid.bridges, name).__name__ == name
    assert (pipegrid.bridges.Sharded, pipegrid.bridges.Replicated) == (
        pipegrid.bridges.Shard,
        pipegrid.bridges.Replicate,
    )
    with pytest.raises(AttributeError, match="no attribute 'Brigde'"):
        _ = pipegrid.bridges.Brigde


def test_planning_works_where_torch_is_absent():
    program = """
        import sys
        sys.modules["torch"] = None  # an import of torch raises
        from pipegrid.bridges import *  # the names without torch
        print("ModuleGraph" in globals(), "BridgeCommunicator" in globals())
        from pipegrid.bridges import BridgeCommunicator
    """
    plan = """
        import sys
        sys.modules["torch"] = None
        from types import SimpleNamespace as Grid
        from pipegrid.bridges import Sizes, axis_names, boundary_side, check_plan, plan_reshard
        from pipegrid.bridges.bridge.wiring import BridgeWiring
        from pipegrid.core.edge import Direction
        source = boundary_side(Grid(shape=(2,), dim_names=("dp",), rank_offset=0), "source")
        destination = boundary_side(Grid(shape=(2,), dim_names=("tp",), rank_offset=2), "destination")
        plan = plan_reshard(source, destination, Sizes((4, 2, 2), axes=axis_names(3)))
        check_plan(plan)
        print(len(plan.messages), len(plan.adjoint().messages))
        wiring = BridgeWiring("a>b", source, destination, axis_names(3), "direct", (Direction.FORWARD,), 0)
        print(*wiring.lane_specs)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(plan)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["4", "4", "0>2[a>b/F]", "0>3[a>b/F]"]
    failed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=60
    )
    assert failed.stdout.split() == ["True", "False"]
    assert "torch" in failed.stderr  # the torch half says what it lacks, and only when it is asked for
