"""Lanes against a bare isend/irecv pair: latency and bandwidth, messages and host waits.

    python tools/bench/p2p.py [--runs 5] [--pairs N] [--backend nccl] [--seconds N]

Two ranks on this machine. Latency is a ping-pong of one message; bandwidth streams messages of which several are under
way, one way, and is over when the last one is acknowledged. Each figure is a ratio, lane to bare, and the bound for it
is 1.15.

How it is measured, since identical runs on a shared machine vary by half: both sides run in the same two processes, on
the same groups, in blocks of a few milliseconds, bare and lane first in turn. Of a block counts the median of its
rounds (what a round takes that nothing interrupts); of a pair of neighbouring blocks the ratio of the two; of all
pairs the median. Where the system puts a process and its threads lasts as long as they do and moves a ratio by 0.05,
so the pairs come from several runs, each in processes of its own. The quartiles beside the median say how sure it is,
and the same ratio of means what interruptions add: it has no bound, as it depends on the machine.

Both sides do the same work. Both wait for sends as well as for receives, with a timeout, as training does; on a GPU
both order the stream after them, as a wait with a timeout would poll there, a millisecond a hop. Both receive into
buffers that are there already (the lane: into slots that were released), or both into fresh ones (the lane: without
releases; the blocking verbs of `P2PCommunicator`: always). The lane checks what it is given, keeps its order and
deadlines, and hands out the payload. What new memory costs by itself, mostly page faults, is the bare side
with fresh buffers against the bare side without: that depends on the machine, and has no bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist

from pipegrid.transport import Direction, Edge, Lane, LaneSpec, P2PCommunicator, P2PConfig, open_lanes
from runtime_parts.processes import on_ranks

BOUND = 1.15
SIZES = (4 * 1024, 256 * 1024, 16 * 1024 * 1024)
WINDOW = 4
# Messages per block: some 5 ms each, and more where a message takes longer.
MESSAGES = {SIZES[0]: 96, SIZES[1]: 24, SIZES[2]: 8}
FEWEST_PAIRS = 31  # of all runs
PAIRS = {SIZES[0]: 31, SIZES[1]: 31, SIZES[2]: 9}  # of a run: the largest take ten times as long, and spread less
TIMEOUT = 120.0
FLOAT_BYTES = 4


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rounds(action: Callable[[], None], rounds: int, device: torch.device) -> list[float]:
    """Seconds of each round of a block."""
    dist.barrier()
    _settle(device)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        _settle(device)
        times.append(time.perf_counter() - start)
    return times


class Bare:
    """The same traffic by `torch.distributed` alone, into buffers that are there already, or into fresh ones."""

    def __init__(self, rank: int, out: Any, back: Any, data: torch.Tensor, *, fresh: bool = False) -> None:
        self.rank, self.out, self.back, self.data, self.fresh = rank, out, back, data, fresh
        self.name = "bare fresh" if fresh else "bare"
        self.buffers = [torch.empty_like(data) for _ in range(WINDOW)]
        self.token = torch.zeros(1, device=data.device)
        # On a GPU a wait with a timeout holds the host.
        self.timeouts = () if data.device.type == "cuda" else (timedelta(seconds=TIMEOUT),)

    def _send(self, tensor: torch.Tensor, group: Any) -> Any:
        return dist.isend(tensor, group=group, group_dst=1 - self.rank)

    def _receive(self, buffer: torch.Tensor, group: Any) -> Any:
        tensor = torch.empty_like(buffer) if self.fresh else buffer
        return dist.irecv(tensor, group=group, group_src=1 - self.rank)

    def ping_pong(self) -> None:
        """One message there and one back."""
        if self.rank == 0:
            self._send(self.data, self.out).wait(*self.timeouts)
            self._receive(self.buffers[0], self.back).wait(*self.timeouts)
        else:
            self._receive(self.buffers[0], self.out).wait(*self.timeouts)
            self._send(self.data, self.back).wait(*self.timeouts)

    def stream(self) -> None:
        """A window of messages there, and a token back."""
        if self.rank == 0:
            works = [self._send(self.data, self.out) for _ in range(WINDOW)]
            works.append(self._receive(self.token, self.back))
        else:
            works = [self._receive(buffer, self.out) for buffer in self.buffers]
        for work in works:
            work.wait(*self.timeouts)
        if self.rank != 0:
            self._send(self.token, self.back).wait(*self.timeouts)


class Ours:
    """The same traffic over lanes. Receives reuse slots that were released, or give fresh buffers."""

    def __init__(self, rank: int, lanes: Sequence[Lane], data: torch.Tensor, *, release: bool) -> None:
        self.rank, self.data, self.release = rank, data, release
        self.name = "lane" if release else "lane fresh"
        self.out, self.back, self.acknowledge = lanes
        self.token = torch.zeros(1, device=data.device)

    def _take(self, handle: Any) -> None:
        handle.result()
        if self.release:
            handle.release()

    def ping_pong(self) -> None:
        """One message there and one back."""
        if self.rank == 0:
            self.out.isend(self.data).wait()
            self._take(self.back.irecv())
        else:
            self._take(self.out.irecv())
            self.back.isend(self.data).wait()

    def stream(self) -> None:
        """A window of messages there, and a token back."""
        if self.rank == 0:
            sends = [self.out.isend(self.data) for _ in range(WINDOW)]
            token = self.acknowledge.irecv()
            for send in sends:
                send.wait()
            self._take(token)
        else:
            receives = [self.out.irecv() for _ in range(WINDOW)]
            for receive in receives:
                self._take(receive)
            self.acknowledge.isend(self.token).wait()


class Verbs:
    """The ping-pong by the blocking verbs of a pipeline stage, whose receives give fresh buffers."""

    name = "verbs"

    def __init__(self, rank: int, stage: P2PCommunicator, data: torch.Tensor) -> None:
        self.rank, self.stage, self.data, self.shape = rank, stage, data, tuple(data.shape)

    def ping_pong(self) -> None:
        """One message there and one back."""
        if self.rank == 0:
            self.stage.send_forward(self.data, is_last_stage=False)
            self.stage.recv_backward(self.shape, is_last_stage=False)
        else:
            self.stage.recv_forward(self.shape, is_first_stage=False)
            self.stage.send_backward(self.data, is_first_stage=False)


@attrs.frozen
class Figure:
    """What was seen of one comparison in one run.

    Attributes:
        verb: the traffic.
        size: bytes of a message.
        floor: name of the side that the other is held against.
        name: of the other side.
        bounded: whether the ratio has a bound.
        messages: of a round.
        blocks: for each side, of each block the seconds of its rounds.
    """

    verb: str
    size: int
    floor: str
    name: str
    bounded: bool
    messages: int
    blocks: tuple[list[list[float]], list[list[float]]]

    def ratios(self, measure: Callable[[Sequence[float]], float]) -> list[float]:
        """Of each pair of blocks, the ratio of what ``measure`` says of their rounds."""
        return [measure(theirs) / measure(floor) for floor, theirs in zip(*self.blocks, strict=True)]


def _compare(floor: Bare, other: Bare | Ours | Verbs, verb: str, options: argparse.Namespace) -> Figure:
    size, device = floor.data.nbytes, floor.data.device
    messages = 2 if verb == "ping_pong" else WINDOW
    rounds = max(1, MESSAGES[size] // messages)
    actions: tuple[Callable[[], None], Callable[[], None]] = (getattr(floor, verb), getattr(other, verb))
    for action in actions:
        _rounds(action, rounds, device)
    blocks: tuple[list[list[float]], list[list[float]]] = ([], [])
    for pair in range(options.pairs or PAIRS[size]):
        for side in (0, 1) if pair % 2 else (1, 0):
            blocks[side].append(_rounds(actions[side], rounds, device))
    return Figure(verb, size, floor.name, other.name, not isinstance(other, Bare), messages, blocks)


def _report(figures: Sequence[Figure]) -> bool:
    """Print one comparison, of all runs together; whether it keeps its bound."""
    first = figures[0]
    ratios = [ratio for figure in figures for ratio in figure.ratios(statistics.median)]
    of_means = [ratio for figure in figures for ratio in figure.ratios(statistics.fmean)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    floor, theirs = (
        statistics.median(statistics.median(block) for figure in figures for block in figure.blocks[side])
        / first.messages
        for side in (0, 1)
    )
    good = not first.bounded or ratio <= BOUND
    verdict = ("ok" if good else f"over {BOUND}") if first.bounded else ""
    print(
        f"{first.verb:<9} {first.size:>8} B  {first.floor:<10} {floor * 1e6:>7.1f} us {first.size / floor / 1e9:>5.2f} "
        f"GB/s   {first.name:<10} {theirs * 1e6:>7.1f} us {first.size / theirs / 1e9:>5.2f} GB/s   "
        f"ratio {ratio:.3f} [{low:.3f}, {high:.3f}] {verdict:<9} of means {statistics.median(of_means):.3f}",
        flush=True,
    )
    return good


def _count(ours: Ours, exchanges: int) -> list[str]:
    """What a number of steady exchanges take, in words; a line per lane."""
    before = [attrs.evolve(lane.stats) for lane in (ours.out, ours.back)]
    for _ in range(exchanges):
        ours.ping_pong()
    lines = []
    for name, old, lane in zip(("there", "back"), before, (ours.out, ours.back), strict=True):
        difference = {key: value - getattr(old, key) for key, value in attrs.asdict(lane.stats).items()}
        counts = ", ".join(f"{difference[key]} {key}" for key in ("messages", "transfers", "headers", "host_syncs"))
        lines.append(f"{exchanges} exchanges of {ours.data.nbytes} B, {name}: {counts}")
    return lines


def _measure(rank: int, device: torch.device, size: int, options: argparse.Namespace) -> tuple[list[Figure], list[str]]:
    specs = [LaneSpec(0, 1, "out"), LaneSpec(1, 0, "back"), LaneSpec(1, 0, "acknowledge")]
    data = torch.ones(size // FLOAT_BYTES, device=device)
    config = P2PConfig(deadline=TIMEOUT)
    with open_lanes(specs, config=config, device=device) as lanes:
        ends = [lanes[spec] for spec in specs]
        bare, bare_fresh = (Bare(rank, ends[0].group, ends[1].group, data, fresh=fresh) for fresh in (False, True))
        ours, fresh = Ours(rank, ends, data, release=True), Ours(rank, ends, data, release=False)
        sides: list[tuple[Bare, Bare | Ours | Verbs]] = [(bare, ours), (bare_fresh, fresh), (bare, bare_fresh)]
        with closing(P2PCommunicator(None, attrs.evolve(config, pipeline_dtype=data.dtype), device=device)) as stage:
            there, back = (stage.lane(Edge(0, 1), direction).group for direction in Direction)
            floor = Bare(rank, there, back, data, fresh=True)
            figures = [_compare(floor, Verbs(rank, stage, data), "ping_pong", options)]
        _progress(figures[-1])
        for verb, pair in itertools.product(("ping_pong", "stream"), sides):
            if not _has_time(options, device):
                break
            figures.append(_compare(*pair, verb, options))
            _progress(figures[-1])
        return figures, _count(ours, exchanges=10)


def _has_time(options: argparse.Namespace, device: torch.device) -> bool:
    """Whether another comparison may begin; the same on both ranks."""
    left = torch.tensor([time.monotonic() < options.until], dtype=torch.uint8, device=device)
    dist.broadcast(left, 0)
    return bool(left.item())


def _progress(figure: Figure) -> None:
    """One line on what was just compared: a run that is cut short has said something."""
    if dist.get_rank() == 0:
        ratio = statistics.median(figure.ratios(statistics.median))
        print(f"  {figure.verb} {figure.size} B, {figure.name} to {figure.floor}: {ratio:.3f} in this run", flush=True)


@contextmanager
def _over(backend: str, rank: int, ranks: int, store: Any) -> Iterator[None]:
    """The default process group is of ``backend`` inside the block."""
    if backend == "nccl":  # ranks share GPUs where there are fewer
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


def _run(report: Callable[[Any], None], options: argparse.Namespace) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if options.backend == "nccl" else torch.device("cpu")
    measured: list[tuple[list[Figure], list[str]]] = []
    for size in options.sizes:
        if not measured or _has_time(options, device):
            measured.append(_measure(dist.get_rank(), device, size, options))
    if dist.get_rank() == 0:
        report(measured)


def _one_run(options: argparse.Namespace) -> list[tuple[list[Figure], list[str]]]:
    """Measure everything once, in two processes of its own."""
    with on_ranks(2, _run, options, join=partial(_over, options.backend)) as reports:
        measured: list[tuple[list[Figure], list[str]]] = reports.first()
    return measured


def main() -> int:
    """Measure and print; 1 where a ratio is over the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small messages; its figures say little: no bound")
    parser.add_argument("--runs", type=int, default=5, help="runs, each in new processes")
    parser.add_argument("--pairs", type=int, help="pairs per figure and run; default 31, and 9 at 16 MB")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES, help="bytes")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="nccl needs two GPUs, or one and NCCL 2.31.2"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no comparison begins later")
    options = parser.parse_args()
    options.until = time.monotonic() + options.seconds
    if options.quick:
        options.runs, options.pairs, options.sizes = 1, 2, SIZES[:1]
    fewest = min(options.pairs or PAIRS[size] for size in options.sizes)
    if not options.quick and options.runs * fewest < FEWEST_PAIRS:
        parser.error(
            f"{options.runs} runs of {fewest} pairs; a median over fewer than {FEWEST_PAIRS} says nothing here"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        f"torch {torch.__version__}, {options.backend}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"median [quartiles] of all pairs of {options.runs} runs",
        flush=True,
    )
    runs = [_one_run(options) for number in range(options.runs) if number == 0 or time.monotonic() < options.until]
    good = True
    for sizes in itertools.zip_longest(*runs):  # those that ran out of time have fewer
        there = [size for size in sizes if size is not None]
        for figures in itertools.zip_longest(*(figures for figures, _ in there)):
            good &= _report([figure for figure in figures if figure is not None])
        for line in there[0][1]:
            print(f"  {line}")
    return 0 if good or options.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
