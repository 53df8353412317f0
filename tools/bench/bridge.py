"""A bridge's strategies side by side: bytes and messages per rank, and time over links of a given bandwidth.

    python tools/bench/bridge.py [--rounds 5] [--bandwidth 5e5] [--message-seconds 0.002]

Ranks on this machine, over gloo. Every lane goes through emulated links: a token bucket per rank and direction (or one
for all ranks of a side: a shared uplink), which passes ``bandwidth`` bytes per second and takes ``message-seconds``
for each message, out of the sender's and into the receiver's at once. Direct and leader take turns in one run; times
are medians over the rounds, of the slowest rank, completion among copies included. After the first message no lane may
send a header, and what each lane has put on the wire must be what the plan says: one message of so many bytes, and the
time stamp that emulation adds.

The bound for direct is 1.1 times max(bytes per sender, bytes per receiver) / bandwidth. Links are so slow by default
that the bound is a second or two, since what the machine itself takes (tens of milliseconds, mostly the completion of
up to 8 copies on however many cores there are) is no part of what is measured: on a busy one, make them slower still.

``auto`` gets the links, and may not choose what turns out to be more than a tenth slower.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.bridges import BridgeCommunicator, Links, axis_names, boundary_side
from pipegrid.reshard import ReshardPlan, Sizes, Strategy, plan_reshard
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Lane, Lanes, LaneSpec, P2PConfig, open_lanes
from runtime_parts.processes import on_ranks

BOUND = 1.1
STRATEGIES: tuple[Strategy, ...] = ("direct", "leader")


@frozen
class Case:
    """One boundary: tp sizes of both sides, the tensor, and whether each side's ranks share one link."""

    name: str
    source_tp: int
    destination_tp: int
    shape: tuple[int, int, int]
    shared: bool = False

    @property
    def world(self) -> int:
        """Ranks of both sides."""
        return self.source_tp + self.destination_tp

    def link_of(self, rank: int) -> int:
        """The link of a rank, named after the first rank on it."""
        return (0 if rank < self.source_tp else self.source_tp) if self.shared else rank

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, in float32."""
        return 4 * self.shape[0] * self.shape[1] * self.shape[2]


LARGE, TINY = (8, 128, 512), (1, 8, 16)
CASES = (
    Case("tp 2 -> 4", 2, 4, LARGE),
    Case("tp 4 -> 8", 4, 8, LARGE),
    Case("tp 4 -> 2", 4, 2, LARGE),
    Case("tp 2 -> 4, one uplink", 2, 4, LARGE, shared=True),
    Case("tp 2 -> 4, tiny", 2, 4, TINY),
    Case("tp 4 -> 8, tiny, one uplink", 4, 8, TINY, shared=True),
)


class Buckets:
    """When each link is free again: seconds of the machine's monotonic clock, shared by all processes."""

    def __init__(self, count: int, bandwidth: float, message_seconds: float) -> None:
        self._free = multiprocessing.get_context("spawn").Array("d", count)
        self._bandwidth, self._message_seconds = bandwidth, message_seconds

    def reserve(self, out: int, into: int, nbytes: int) -> float:
        """Take the sender's and the receiver's link for a message, which enters both at once. When it is through."""
        with self._free.get_lock():
            start: float = max(time.monotonic(), self._free[out], self._free[into])
            end = start + nbytes / self._bandwidth + self._message_seconds
            self._free[out] = self._free[into] = end
        return end


class Paced:
    """A handle that is not done before the message is through its links."""

    def __init__(self, handle: Any, *, end: float | None = None) -> None:
        self._handle, self._end = handle, end
        self._payload: Any = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the transfer, then for the emulated links."""
        self._handle.wait(timeout)
        if self._end is None:
            self._payload, end = self._handle.result()
            self._end = float(end.detach())
        time.sleep(max(0.0, self._end - time.monotonic()))

    def is_completed(self) -> bool:
        """Whether the message is here and through the links."""
        if self._end is None and self._handle.is_completed():
            self.wait()
        return self._end is not None and time.monotonic() >= self._end

    def on_done(self, callback: Callable[[Any], None]) -> None:
        """See `Transfer.on_done`; on the lane's thread, which waits for the links."""

        def through(_: Any) -> None:
            self.wait()
            callback(self)

        self._handle.on_done(through)

    @property
    def note(self) -> str:
        """See `ReceiveTransfer.note`."""
        text: str = self._handle.note
        return text

    def result(self) -> Any:
        """Wait, then the payload."""
        self.wait()
        return self._payload


def _nbytes(payload: Any) -> int:
    tensor = next(iter(payload.values())) if isinstance(payload, dict) else payload
    return int(tensor.numel() * tensor.element_size())


class PacedLane:
    """A lane through the links of its two ranks."""

    def __init__(self, lane: Lane, links: Buckets, *, out: int, into: int) -> None:
        self._lane, self._links, self._out, self._into = lane, links, out, into

    def isend(self, payload: Any, *, note: str | None = None) -> Paced:
        """Send, with the time at which the message is through the links."""
        end = self._links.reserve(self._out, self._into, _nbytes(payload))
        return Paced(self._lane.isend([payload, torch.tensor(end, dtype=torch.float64)], note=note), end=end)

    def irecv(self) -> Paced:
        """Receive."""
        return Paced(self._lane.irecv())


class PacedLanes(dict[LaneSpec, PacedLane]):
    """Lanes through links; a rank's sends and its receives use one link each."""

    def __init__(self, lanes: Lanes, links: Buckets, *, case: Case, rank: int) -> None:
        self._lanes, self._rank = lanes, rank
        super().__init__({
            spec: PacedLane(lane, links, out=2 * case.link_of(spec.source), into=2 * case.link_of(spec.destination) + 1)
            for spec, lane in lanes.items()
        })  # fmt: skip

    @property
    def failed(self) -> bool:
        """See `Lanes.failed`."""
        return self._lanes.failed

    @property
    def batches(self) -> bool:
        """See `Lanes.batches`."""
        return self._lanes.batches

    @property
    def headers(self) -> int:
        """Announcements that this rank has sent or received beside payloads."""
        return sum(lane.stats.headers for lane in self._lanes.values())

    def sent(self) -> dict[int, tuple[int, int]]:
        """Messages and bytes that have left on each lane since it was opened, by receiver, without time stamps."""
        counted = {spec.destination: lane.stats for spec, lane in self._lanes.items() if spec.source == self._rank}
        return {peer: (stats.messages, stats.bytes - 8 * stats.messages) for peer, stats in counted.items()}

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """See `Lanes.batch`."""
        with self._lanes.batch():
            yield


def _bridge(case: Case, strategy: Strategy, links: Buckets, rank: int) -> tuple[BridgeCommunicator, PacedLanes]:
    bridge = BridgeCommunicator(
        HyperCommGrid([case.source_tp], ["tp"], rank_offset=0),
        HyperCommGrid([case.destination_tp], ["tp"], rank_offset=case.source_tp),
        strategy=strategy,
        label=f"{case.name}/{strategy}",
        config=P2PConfig(deadline=120.0),
        open=False,
    )
    lanes = PacedLanes(open_lanes(bridge.lane_specs, config=bridge.lane_config), links, case=case, rank=rank)
    bridge.attach(cast("Lanes", lanes))
    return bridge, lanes


def _forward(bridge: BridgeCommunicator, whole: torch.Tensor) -> float:
    """Seconds of one activation's way, of the slowest rank."""
    dist.barrier()
    start = time.monotonic()
    if bridge.is_source:
        bridge.send_forward(whole)
    else:
        got = bridge.recv_forward()
        if got is None or not torch.equal(got, whole):
            raise RuntimeError(f"rank {bridge.rank} got something else than was sent")
    seconds = torch.tensor(time.monotonic() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _rank(report: Callable[[Any], None], case: Case, links: Buckets, rounds: int) -> None:
    rank = dist.get_rank()
    bridges = {strategy: _bridge(case, strategy, links, rank) for strategy in STRATEGIES}
    whole = torch.arange(case.nbytes // 4, dtype=torch.float32).view(case.shape)
    times: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    on_wire: dict[str, dict[int, tuple[int, int]]] = {}
    for number in range(rounds + 1):
        headers = {name: lanes.headers for name, (_, lanes) in bridges.items()}
        for strategy in STRATEGIES if number % 2 else STRATEGIES[::-1]:
            bridge, lanes = bridges[strategy]
            before = lanes.sent()
            seconds = _forward(bridge, whole)
            on_wire[strategy] = {
                peer: (messages - before[peer][0], nbytes - before[peer][1])
                for peer, (messages, nbytes) in lanes.sent().items()
                if messages > before[peer][0]
            }
            if number:  # the first one agrees on sizes
                times[strategy].append(seconds)
                if lanes.headers != headers[strategy]:
                    raise RuntimeError(f"{case.name}, {strategy}: a header was sent in the steady state")
    for strategy, (bridge, lanes) in bridges.items():
        plan = plan_reshard(bridge.src, bridge.dst, Sizes(case.shape, axes=bridge.axes), strategy=strategy)
        planned = {
            peer: (1, plan.itemsize * sum(message.source_box.numel for message in messages))
            for peer, messages in plan.sends(rank).items()
        }
        if on_wire[strategy] != planned:
            raise RuntimeError(f"{case.name}, {strategy}: {on_wire[strategy]} on rank {rank}'s lanes, not {planned}")
        bridge.destroy()
        lanes._lanes.close()  # noqa: SLF001 -- the bench's own class
    if rank == 0:
        report({name: statistics.median(v) for name, v in times.items()})
    dist.barrier()


def _run(case: Case, options: argparse.Namespace) -> Mapping[str, float]:
    links = Buckets(2 * case.world, options.bandwidth, options.message_seconds)
    with on_ranks(case.world, _rank, case, links, options.rounds) as reports:
        times: dict[str, float] = reports.first()
    return times


def _plan(case: Case, strategy: Strategy, links: Links | None = None) -> ReshardPlan:
    return plan_reshard(
        boundary_side(HyperCommGrid([case.source_tp], ["tp"], world_size=case.world), "source"),
        boundary_side(
            HyperCommGrid([case.destination_tp], ["tp"], rank_offset=case.source_tp, world_size=case.world),
            "destination",
        ),
        Sizes(case.shape, axes=axis_names(3)),
        strategy=strategy,
        links=links,
    )


def _chosen(case: Case, options: argparse.Namespace) -> Strategy:
    """What "auto" takes when it has the links."""
    sides = range(case.source_tp), range(case.source_tp, case.world)
    links = Links(options.bandwidth, options.message_seconds, shared=sides if case.shared else ())
    taken = _plan(case, "auto", links).transfers
    return next(strategy for strategy in STRATEGIES if _plan(case, strategy).transfers == taken)


def main() -> None:
    """Measure every case and print one row for each strategy."""
    parser = argparse.ArgumentParser(description="A bridge's strategies over emulated links.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=5e5, help="bytes per second of a link")
    parser.add_argument("--message-seconds", type=float, default=0.002, help="what a message costs beside its bytes")
    options = parser.parse_args()
    print(f"links of {options.bandwidth / 1e6:g} MB/s, {options.message_seconds * 1e3:g} ms per message\n")
    print(f"{'case':<30}{'strategy':<10}{'messages':>9}{'most/rank':>10}{'KB/lane':>9}{'KB/sender':>11}"
          f"{'KB/receiver':>12}{'bound s':>9}{'time s':>9}{'ratio':>7}")  # fmt: skip
    slow, misled = [], []
    for case in CASES:
        times = _run(case, options)
        for strategy in STRATEGIES:
            plan = _plan(case, strategy)
            sent = [plan.bytes_sent(rank) for rank in plan.src.ranks]
            received = [plan.bytes_received(rank) for rank in plan.dst.ranks]
            most = max(len(plan.sends(rank)) for rank in plan.src.ranks)
            lane = max(m.source_box.numel for m in plan.messages) * plan.itemsize
            # A shared uplink passes the bytes of all senders.
            link = (
                max(sum(sent), sum(received))
                if case.shared
                else max(case.nbytes / case.source_tp, case.nbytes / case.destination_tp)
            )
            bound = link / options.bandwidth
            ratio = times[strategy] / bound
            print(f"{case.name:<30}{strategy:<10}{len(plan.transfers):>9}{most:>10}{lane / 1e3:>9.1f}"
                  f"{max(sent) / 1e3:>11.1f}{max(received) / 1e3:>12.1f}{bound:>9.4f}{times[strategy]:>9.4f}"
                  f"{ratio:>7.2f}")  # fmt: skip
            if strategy == "direct" and case.shape != TINY and not case.shared and ratio > BOUND:
                slow.append(case.name)
        chosen, fastest = _chosen(case, options), min(times, key=lambda name: times[name])
        print(f"{'':<30}auto takes {chosen}; faster here: {fastest}\n")
        if times[chosen] > BOUND * times[fastest]:
            misled.append(case.name)
    print(f"direct within {BOUND} of the bound where ranks have links of their own: {_verdict(slow)}")
    print(f"auto within {BOUND} of the faster strategy everywhere: {_verdict(misled)}")
    raise SystemExit(1 if slow or misled else 0)


def _verdict(failures: list[str]) -> str:
    return f"no: {', '.join(failures)}" if failures else "yes"


if __name__ == "__main__":
    main()
