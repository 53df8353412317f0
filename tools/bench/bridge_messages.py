"""A bridge's messages against bare isend/irecv of the same pieces, over the same groups.

    python tools/bench/bridge_messages.py [--rounds 40]

An activation [sequence, batch, hidden] there and its gradient back, one microbatch after another: through a
`BridgeCommunicator` (shapes agreed), and by hand: `dist.isend` and `dist.irecv` of the same pieces, cut out and put
together where lanes split the batch, waits and nothing else.
Both run in the same processes on the same groups, one microbatch each by turns, so that both see the machine in one
mood. A round is 24 such pairs, and its ratio that of the two medians; the figure is the median of the rounds' ratios,
with their quartiles. Bound: 1.25.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.bridges import BridgeCommunicator
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, P2PConfig
from runtime_parts.processes import on_ranks

BOUND = 1.25
PAIRS = 24  # microbatches of a round, each way


@frozen
class Case:
    """Replicas of both sides, and the bytes of one message."""

    source: int
    destination: int
    nbytes: int

    @property
    def world(self) -> int:
        """Ranks of both sides."""
        return self.source + self.destination


CASES = [Case(a, b, nbytes) for nbytes in (16 * 1024, 256 * 1024, 2 * 1024 * 1024) for a, b in ((1, 1), (2, 1), (1, 2))]


class ByBridge:
    """A microbatch there and back by the bridge's verbs."""

    def __init__(self, bridge: BridgeCommunicator, mine: torch.Tensor) -> None:
        self._bridge, self._mine = bridge, mine

    def __call__(self) -> None:
        """Once."""
        bridge = self._bridge
        if bridge.is_source:
            sending = bridge.isend_forward(self._mine)
            receiving = bridge.irecv_backward()
        else:
            bridge.irecv_forward().result()  # type: ignore[union-attr]
            sending, receiving = bridge.isend_backward(self._mine), None
        if receiving is not None:
            receiving.result()
        sending.wait()  # type: ignore[union-attr]


class ByHand:
    """The same messages by `dist.isend` and `dist.irecv`."""

    def __init__(self, bridge: BridgeCommunicator, mine: torch.Tensor) -> None:
        self._mine, rank = mine, bridge.rank
        self._first = bridge.is_source
        peers = bridge.dst.ranks if self._first else bridge.src.ranks
        self._count, self._shape = len(peers), mine.chunk(len(peers), dim=1)[0].shape
        there, back = (Direction.FORWARD, Direction.BACKWARD)[:: 1 if self._first else -1]
        self._to = [(bridge.lane(rank, peer, there).group, peer) for peer in peers]
        self._from = [(bridge.lane(peer, rank, back).group, peer) for peer in peers]

    def __call__(self) -> None:
        """Once."""
        sent = self._send() if self._first else []
        parts = [torch.empty(self._shape) for _ in self._from]
        receiving = [
            dist.irecv(part, src=peer, group=group) for part, (group, peer) in zip(parts, self._from, strict=True)
        ]
        for work in receiving:
            work.wait()  # type: ignore[union-attr]
        if self._count > 1:
            torch.cat(parts, dim=1)
        for work in sent or self._send():
            work.wait()

    def _send(self) -> list[Any]:
        parts = self._mine.chunk(self._count, dim=1)
        return [
            dist.isend(part.contiguous(), dst=peer, group=group)
            for part, (group, peer) in zip(parts, self._to, strict=True)
        ]


def _round(by_bridge: Callable[[], None], by_hand: Callable[[], None]) -> tuple[float, float]:
    """The median seconds of a microbatch by the bridge and by hand."""
    seconds: dict[Callable[[], None], list[float]] = {by_bridge: [], by_hand: []}
    dist.barrier()
    for turn in range(PAIRS):
        for action in (by_bridge, by_hand) if turn % 2 else (by_hand, by_bridge):
            start = time.perf_counter()
            action()
            seconds[action].append(time.perf_counter() - start)
    return statistics.median(seconds[by_bridge]), statistics.median(seconds[by_hand])


def _rank(report: Callable[[Any], None], case: Case, rounds: int) -> None:
    bridge = BridgeCommunicator(
        HyperCommGrid([case.source], ["dp"], world_size=case.world),
        HyperCommGrid([case.destination], ["dp"], rank_offset=case.source, world_size=case.world),
        {"s": 0, "b": 1, "h": 2},
        config=P2PConfig(deadline=120.0),
    )
    lanes = max(case.source, case.destination)
    rows = lanes // (case.source if bridge.is_source else case.destination)
    mine = torch.ones(case.nbytes // 4 // 1024, rows, 1024)
    by_bridge, by_hand = ByBridge(bridge, mine), ByHand(bridge, mine)
    for _ in range(3):
        by_bridge()
        by_hand()
    pairs = [_round(by_bridge, by_hand) for _ in range(rounds)]
    if dist.get_rank() == 0:
        report(pairs)
    dist.barrier()
    bridge.destroy()


def _measure(case: Case, rounds: int) -> list[tuple[float, float]]:
    with on_ranks(case.world, _rank, case, rounds) as reports:
        pairs: list[tuple[float, float]] = reports.first()
    return pairs


def main() -> int:
    """Measure and print; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'lanes':<12}{'KB/message':>11}{'bridge us':>11}{'bare us':>10}{'ratio':>8}   quartiles, bound {BOUND}")
    good = True
    for case in CASES:
        pairs = _measure(case, options.rounds)
        ratios = [ours / bare for ours, bare in pairs]
        lower, ratio, upper = statistics.quantiles(ratios, n=4)
        good &= ratio <= BOUND
        ours, bare = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{f'{case.source} -> {case.destination}':<12}{case.nbytes / 1024:>11.0f}{ours:>11.0f}{bare:>10.0f}"
            f"{ratio:>8.2f}   [{lower:.2f}, {upper:.2f}]{'' if ratio <= BOUND else '  missed'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
