"""Two lanes between two ranks, and what tests of them share."""

import os
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten

from pipegrid.transport import LaneSpec, P2PConfig

THERE, BACK = LaneSpec(0, 1, "there"), LaneSpec(1, 0, "back")
DEADLINE = 20.0
config = partial(P2PConfig, deadline=DEADLINE, open_deadline=DEADLINE)
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
TWO_RANKS = GPUS >= 2 or (GPUS == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")
needs_two_ranks = pytest.mark.skipif(not TWO_RANKS, reason="needs two GPUs, or NCCL 2.31.2 with several ranks on one")
# On a CPU, and on GPUs where there are some.
on_device_groups = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("fake_nccl", marks=pytest.mark.ranks(2, backend="fake_nccl")),
        pytest.param("nccl", marks=[pytest.mark.ranks(2, backend="nccl"), needs_two_ranks]),
    ],
)


def say(neighbours, what, batch=None):
    """Tell them what this rank runs."""
    for one in neighbours:
        one.say(what, batch)


def heard(neighbours):
    """What those of them run that run something else, by rank."""
    found = {one.peer: one.hear(DEADLINE) for one in neighbours}
    return {peer: what for peer, what in found.items() if what is not None}


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def equal(a, b):
    """Whether two payloads are the same, structure, dtypes and bytes."""
    (ours, structure), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and [*map(_content, ours)] == [*map(_content, theirs)]


def _content(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.dtype, leaf.shape, leaf.detach().contiguous().view(-1).view(torch.uint8).tolist()


def values(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def count(lane, seen):
    """Note in ``seen`` what the lane asks of its backend from now on."""
    backend = Counted(lane.mover._send.__self__, seen)
    lane.mover._send, lane.mover._recv = backend.send, backend.recv
    lane._bind()
    lane.wire.group = Counted(lane.wire.group, seen)


class Counted:
    """A backend, and what was asked of it and of its works: ``(verb, bytes)``, and ``("wait", bytes)``."""

    def __init__(self, backend, seen):
        self.backend, self.seen = backend, seen

    def send(self, tensors, *where):
        return self._started("send", tensors, where)

    def recv(self, tensors, *where):
        return self._started("recv", tensors, where)

    def _started(self, verb, tensors, where):
        size = sum(tensor.nbytes for tensor in tensors)
        self.seen.append((verb, size))
        work = getattr(self.backend, verb)(tensors, *where)

        def wait(timeout):
            self.seen.append((f"wait for {verb}", size))
            return work.wait(timeout)

        return SimpleNamespace(wait=wait, is_completed=work.is_completed)
