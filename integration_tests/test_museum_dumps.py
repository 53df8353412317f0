"""The museum's hangs over the fake NCCL, explained from the dumps of their ranks: the cycle that the proof names."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans.orders.prove import play_orders
from pipegrid.timeline.dumps import explain, read_dumps

from .kit.museum import orders_of, play

HANGS = ["pytorch-172668-a", "pytorch-172668-b", "vllm-ascend-14945", "diffusion-pipe-409"]
SETTLED, LONGEST = 0.3, 20.0  # seconds without anything new, and for all


def proved(name):
    """The cycles that the proof names: of each wait in them, its rank and the message that is first there."""
    played = play_orders(orders_of(name), ORDER_MODELS["nccl2"])
    found = []
    for cycle in played.cycles:
        places = [(played.tracks[wait.position], wait.step) for wait, _ in cycle]
        launches = [(track.rank, played.orders.ranks[track.rank][track.launches[step]]) for track, step in places]
        found.append({(rank, message.way[:4], message.peer) for rank, one in launches for message in one.messages})
    return found


def explained(found):
    """The same of an explanation."""
    kinds = {"send": "send", "recv": "rece"}
    return [{(wait.rank, kinds[wait.entry.kind], wait.entry.peer) for wait in cycle} for cycle in found.cycles]


def dumped(ranks, name):
    """Play the orders until nothing goes on; the dump of this rank."""
    device = ranks.fake_device

    def run():
        with contextlib.suppress(Exception):  # ended with the test
            play(ranks, name, "nccl2")

    threading.Thread(target=run, daemon=True).start()
    moments, since, begun = 0, time.monotonic(), time.monotonic()
    while time.monotonic() - since < SETTLED and time.monotonic() - begun < LONGEST:
        if len(device.timeline) != moments or not device.unfinished():
            moments, since = len(device.timeline), time.monotonic()
        time.sleep(0.02)
    return device.dump(ranks.shared_path / "nccl_trace_rank_")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ranks(len(orders_of(name).ranks), backend="fake_nccl", fake_nccl="nccl2"))
        for name in HANGS
    ],
)
def test_the_dumps_of_a_hang_tell_its_cycle(name, ranks):
    dumped(ranks, name)
    ranks.barrier()
    assert proved(name)
    if ranks.rank == 0:
        found = explain(*read_dumps([ranks.shared_path]))
        assert explained(found) == proved(name)
        assert not found.roots
