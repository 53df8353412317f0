"""What the package offers, that planning needs no torch, and that the example of the README runs."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pipegrid.transport

PUBLIC = [
    "Direction",
    "Edge",
    "Handle",
    "Lane",
    "LaneSpec",
    "LaneSpecError",
    "LaneStats",
    "Lanes",
    "P2PCommunicator",
    "P2PConfig",
    "P2PConfigError",
    "P2PError",
    "P2PLaneDeadError",
    "P2PMismatchError",
    "P2PPayloadError",
    "P2PPeerError",
    "P2PTimeoutError",
    "P2PUsageError",
    "Payload",
    "PipelineCommunicator",
    "ReceiveHandle",
    "ReusableReceive",
    "is_single_shape",
    "open_lanes",
    "pipeline_lanes",
]


def test_the_public_names_are_these():
    assert pipegrid.transport.__all__ == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(pipegrid.transport, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'P2PComunicator'"):
        _ = pipegrid.transport.P2PComunicator


def in_another_process(program: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=60
    )


def test_lanes_are_planned_where_torch_is_absent():
    done = in_another_process("""
        import sys
        sys.modules["torch"] = None  # an import of torch raises
        from pipegrid.transport import Direction, Edge, LaneSpec, P2PConfig, P2PTimeoutError, pipeline_lanes
        print(*pipeline_lanes([0, 1, 2]), P2PConfig().shape_mode, Edge(0, 1), Direction.FORWARD.name, LaneSpec(0, 1))
        from pipegrid.transport import P2PCommunicator
    """)
    forward = "0>1[forward] 0>2[backward] 1>0[backward] 1>2[forward] 2>0[forward] 2>1[backward]"
    assert done.stdout.strip() == f"{forward} agreed 0>1 FORWARD 0>1"
    assert "torch" in done.stderr  # the torch half says what it lacks, and only when it is asked for


def test_the_example_of_the_readme_runs():
    example = (Path(__file__).parent.parent / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = in_another_process(example)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [line.split("# ")[1] for line in example.splitlines() if "print(" in line]
