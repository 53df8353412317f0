"""What the package offers, and that planning needs no torch."""

import inspect
import subprocess
import sys
import textwrap

import pytest

import pipegrid.transport

PUBLIC = [
    "Communicator",
    "Edge",
    "P2PCommunicator",
    "P2PConfig",
    "P2PError",
    "P2PTimeoutError",
    "PipelineCommunicator",
]
# Imported from the package as well; outside of __all__.
FURTHER = [
    "JobTopology",
    "CollectiveFailedError",
    "pipeline_lanes",
    "Lane",
    "LaneStats",
    "Lanes",
    "P2PLaneDeadError",
    "P2PMismatchError",
    "P2PPeerError",
    "P2PUsageError",
    "Port",
    "Payload",
    "ReusableReceive",
    "as_communicator",
    "is_single_shape",
    "Direction",
    "Handle",
    "ReceiveHandle",
    "LaneSpec",
    "open_lanes",
]


def test_the_public_names_are_these():
    assert pipegrid.transport.__all__ == sorted(PUBLIC)
    for name in PUBLIC + FURTHER:
        assert getattr(pipegrid.transport, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'P2PComunicator'"):
        _ = pipegrid.transport.P2PComunicator


SEED = {
    "recv_forward": ["tensor_shapes", "is_first_stage"],
    "recv_backward": ["tensor_shapes", "is_last_stage"],
    "send_forward": ["output_tensors", "is_last_stage"],
    "send_backward": ["input_tensor_grads", "is_first_stage"],
    "send_forward_recv_backward": ["output_tensors", "tensor_shapes", "is_last_stage"],
    "send_backward_recv_forward": ["input_tensor_grads", "tensor_shapes", "is_first_stage"],
    "send_forward_recv_forward": ["output_tensor", "recv_prev", "tensor_shape", "overlap_p2p_comm"],
    "send_backward_recv_backward": ["input_tensor_grad", "recv_next", "tensor_shape", "overlap_p2p_comm"],
    "send_forward_backward_recv_forward_backward": [
        "output_tensor", "input_tensor_grad", "recv_prev", "recv_next", "tensor_shape",
    ],
}  # fmt: skip


@pytest.mark.parametrize("verb", SEED)
def test_a_verb_takes_the_seeds_arguments_by_name_and_in_order(verb):
    communicator = pipegrid.transport.P2PCommunicator
    parameters = list(inspect.signature(getattr(communicator, verb)).parameters.values())[1:]
    assert [one.name for one in parameters] == SEED[verb]
    assert all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def test_a_communicator_and_a_shape_are_given_as_in_the_seed():
    assert list(inspect.signature(pipegrid.transport.P2PCommunicator).parameters)[:2] == ["pp_group", "config"]
    assert list(inspect.signature(pipegrid.transport.is_single_shape).parameters) == ["x"]


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
