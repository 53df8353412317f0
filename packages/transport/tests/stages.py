"""What the stages of a pipeline send each other in tests, and how they are configured."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_flatten

from pipegrid.transport import Direction, P2PConfig

DEADLINE = 30.0
SHAPE = (2, 3)
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
config = partial(P2PConfig, pipeline_dtype=torch.float32, deadline=DEADLINE, open_deadline=DEADLINE)


def on_one_stream(ranks):
    """Whether one serial stream plays all kernels of a rank."""
    return ranks.fake_device is not None and ranks.fake_device.serial


def in_turn(ranks, communicator):
    """A context in which programs whose ranks all send first get by on one serial stream, too, from the first message.

    Elsewhere transfers start as they do outside of a step.
    """
    return communicator.in_order() if on_one_stream(ranks) else nullcontext()


MODES = pytest.mark.parametrize(
    "communicator",
    [
        {"batch_p2p_comm": True},
        {"batch_p2p_comm": False},
        {"communicators": "shared"},
        {"communicators": "shared", "batch_p2p_comm": False},
        {"strict": True},
        {"strict": True, "batch_p2p_comm": False},
        {"variable_seq_lengths": True, "pipeline_dtype": None},
        {"batch_p2p_sync": True, "shapes": "given"},
    ],
    ids=["batched", "unbatched", "shared", "shared-unbatched", "strict", "strict-unbatched", "variable", "given"],
    indirect=True,
)


def activation(stage, microbatch=0, shape=SHAPE, dtype=torch.float32):
    """What stage ``stage`` sends on: every value tells where it is from."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (values + 100 * stage + 10 * microbatch).to(dtype)


def gradient(stage, microbatch=0, shape=SHAPE, dtype=torch.float32):
    return -activation(stage, microbatch, shape, dtype) - 1


def assert_received(received, expected):
    """A payload, or None, is as it was sent; floating-point tensors are leaves that take a gradient."""
    (tensors, structure), (sent, declared) = tree_flatten(received), tree_flatten(expected)
    assert structure == declared
    for tensor, other in zip(tensors, sent, strict=True):
        if other is None:
            assert tensor is None
            continue
        assert tensor.dtype is other.dtype
        assert tensor.shape == other.shape
        assert torch.equal(tensor.detach(), other)
        assert tensor.requires_grad == other.dtype.is_floating_point
        assert tensor.is_leaf
