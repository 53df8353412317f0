"""The fault matrix: a rank fails in every way, at every kind of place, under every schedule; the others must say so.

    python integration_tests/fault_matrix.py            # the matrix, as a table of counts (an hour)
    python integration_tests/fault_matrix.py --part 40  # a sample of 40 cases

Each case forks four ranks from a process that has imported torch, runs three steps, and injects one fault. Every
surviving rank must raise a typed error before its deadline + 2 s, name no innocent rank, and end; nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen

from pipegrid.bridges import MultiModulePipelineCommunicator, VTPCommunicator, VTPTopology
from pipegrid.schedules import (
    Forwarded,
    Monitor,
    PipelineRuntime,
    clip_grad_norm_,
    dualpipe_v,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    reduce_gradients,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator, P2PConfig

WORLD, STEPS, MICROBATCHES, FAULTY = 4, 3, 4, "injected failure 4711"
PROMISED = 2.0  # seconds beyond the deadline

CHAINS = {
    "1f1b": lambda: one_f_one_b(4, MICROBATCHES),
    "interleaved": lambda: interleaved_1f1b(4, MICROBATCHES, num_chunks=2),
    "zero_bubble_h1": lambda: zero_bubble_h1(4, MICROBATCHES),
    "zero_bubble_v": lambda: zero_bubble_v(4, MICROBATCHES),
    "dualpipe_v": lambda: dualpipe_v(4, 2 * MICROBATCHES),
}
SCHEDULES = (*CHAINS, "vtp", "modules", "colocated")
FAULTS = ("kill", "exit", "raise", "memory", "interrupt", "stop", "stop and continue", "delay")
PLACES = ("before", "after", "forward", "backward", "between", "reduce", "clip", "create", "close")
STORES = ("launcher", "rank", "file")
SEEN = {"kill", "exit", "raise", "memory", "interrupt"}  # what others learn at once, by its name
# Where only the backend knows that a rank is gone, not which one: the error is of the rank that noticed.
NOTICED = {"create", "close", "reduce", "clip", "backward", "after"}
SILENT = {"kill", "exit", "stop"}  # the faulty rank itself reports nothing


@frozen
class Case:
    """One fault. ``point``: the how manieth action, forward or backward of that place; ``step`` in which it happens."""

    schedule: str
    fault: str
    place: str
    rank: int
    point: int
    step: int
    monitor: bool
    store: str
    deadline: float = 3.0


def all_cases(seed: int = 0) -> list[Case]:
    """Every schedule x fault x place x monitor x store; rank, point and step vary with a fixed seed."""
    draw = random.Random(seed)
    return [
        Case(schedule, fault, place, draw.randrange(WORLD), draw.randrange(4), draw.randrange(STEPS), monitor, store)
        for schedule, fault, place, monitor, store in itertools.product(
            SCHEDULES, FAULTS, PLACES, (True, False), STORES
        )
    ]


# ---- On a rank.


@define
class Injector:
    """A runtime hook, and a function for the places outside of actions: fails once, where its case says."""

    case: Case
    rank: int
    folder: Path
    step: int = 0
    seen: Counter[str] = field(factory=Counter)
    fired: bool = False

    def reach(self, place: str) -> None:
        case = self.case
        if self.fired or (self.rank, self.step, place) != (case.rank, case.step, case.place):
            return
        self.seen[place] += 1
        if self.seen[place] > case.point or place in ("between", "reduce", "clip", "create", "close"):
            self.fired = True
            self.fail()

    def before(self, action: object) -> None:
        del action
        self.reach("before")

    def after(self, action: object) -> None:
        del action
        self.reach("after")

    def fail(self) -> None:
        (self.folder / "fault").write_text(repr(time.monotonic()))
        match self.case.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stop" | "stop and continue":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":  # in C, with the interpreter's lock: no thread of this rank runs
                ctypes.PyDLL(None).usleep(int((self.case.deadline + 3) * 1e6))
            case "raise":
                raise RuntimeError(FAULTY)
            case "memory":
                raise MemoryError(FAULTY)
            case "interrupt":
                raise KeyboardInterrupt(FAULTY)


class _Bomb(torch.autograd.Function):
    """The identity, whose backward reaches a place of its own, inside of autograd."""

    @staticmethod
    def forward(ctx, x, injector):
        ctx.injector = injector
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.injector.reach("backward")
        return gradient, None


class _Stage:
    def __init__(self, number: int, plan, injector: Injector) -> None:
        self.out = [edge for edge in plan.graph.stage_edges if edge.source == number]
        self.model, self.injector = torch.nn.Linear(8, 8), injector

    def forward(self, microbatch, inputs):
        del microbatch
        self.injector.reach("forward")
        x = sum(inputs.values()) if inputs else torch.randn(4, 2, 8)
        y = _Bomb.apply(torch.tanh(self.model(x)), self.injector)
        return Forwarded(dict.fromkeys(self.out, y)) if self.out else Forwarded({}, y.square().mean())


def _job(case: Case, config: P2PConfig):
    """Plan, communicator, stages of this rank, and grids by module."""
    if case.schedule in CHAINS:
        plan = lower(CHAINS[case.schedule]())
        placement = [positions[0] for positions in plan.placement]
        communicator = P2PCommunicator(dist.group.WORLD, config, placement=placement)
        return plan, communicator, plan.stages_at[dist.get_rank()], {"model": HyperCommGrid([WORLD], ["pp"])}
    if case.schedule == "vtp":
        vtp = VTPCommunicator(VTPTopology([1, 2, 1]), config)
        return lower(one_f_one_b(3, MICROBATCHES)), vtp, vtp.stages, {"model": HyperCommGrid([WORLD], ["pp"])}
    if case.schedule == "modules":
        grids = {"encoder": HyperCommGrid([2], ["dp"]), "language": HyperCommGrid([2], ["pp"], rank_offset=2)}
    else:
        grids = {"encoder": HyperCommGrid([4], ["dp"]), "language": HyperCommGrid([2, 2], ["dp", "pp"])}
    modules = MultiModulePipelineCommunicator(grids, {"encoder": ["language"]}, config)
    computes = multi_module_1f1b(modules.graph, MICROBATCHES, placement=modules.positions.placement)
    carriers = {edge: f"bridge-{edge.source}-{edge.destination}" for edge in modules.collective_edges}
    return lower(computes, collectives=carriers), modules, modules.stages, grids


def _store(case: Case, rank: int, folder: Path, port: int) -> dist.Store:
    if case.store == "file":
        return dist.FileStore(str(folder / "store"), WORLD)
    if case.store == "rank":
        if rank == 0:
            hosted = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
            (folder / "port.new").write_text(str(hosted.port))
            (folder / "port.new").rename(folder / "port")
            return hosted
        while not (folder / "port").exists():
            time.sleep(0.01)
        port = int((folder / "port").read_text())
    return dist.TCPStore("127.0.0.1", port, WORLD, is_master=False, wait_for_workers=False)


def rank_main(case: Case, rank: int, folder: Path, port: int) -> None:
    """Run the steps of one rank; its outcome is left in ``folder``."""
    injector = Injector(case, rank, folder)
    outcome: dict[str, object] = {}
    try:
        dist.init_process_group(
            "gloo", store=_store(case, rank, folder, port), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        config = P2PConfig(pipeline_dtype=torch.float32, deadline=case.deadline, open_deadline=case.deadline + 10)
        if case.step == 0:
            injector.reach("create")
        plan, communicator, numbers, grids = _job(case, config)
        names = [name for name, grid in grids.items() if grid.is_current_rank_in_grid()]
        groups = {}
        for name, grid in grids.items():
            if "dp" in grid.dim_names:
                grid.create_pg("dp")
            if name in names:
                groups[name] = ProcessGroupCollection.from_grid(grid)
        monitor = None
        if case.monitor:
            watch = control_store("training")
            monitor = Monitor(
                watch, rank=rank, ranks=range(WORLD), deadline=case.deadline, first_deadline=case.deadline
            )
        stages = {number: _Stage(number, plan, injector) for number in numbers}
        runtime = PipelineRuntime(plan, stages, communicator, hooks=[injector], monitor=monitor)
        by_name = {name: torch.nn.ModuleList() for name in names}
        for number, stage in stages.items():
            name = names[0] if len(grids) == 1 else plan.graph.module_of(number)[0]
            by_name[name].append(stage.model)

        def finish() -> None:
            injector.reach("reduce")
            reduce_gradients(by_name, groups, loss_lanes=1, deadline=case.deadline)
            injector.reach("clip")
            clip_grad_norm_(by_name, groups, 1.0, deadline=case.deadline)

        dist.barrier()
        for step in range(STEPS):
            injector.step = step
            injector.reach("between")
            runtime.step(finish=finish)
        injector.step = case.step
        injector.reach("close")
        communicator.destroy() if hasattr(communicator, "destroy") else communicator.close()
        outcome["done"] = True
    except BaseException as error:
        outcome |= {"type": type(error).__name__, "text": str(error)[:4000]}
        raise
    finally:
        outcome["at"] = time.monotonic()
        (folder / f"new.{rank}").write_text(json.dumps(outcome))
        (folder / f"new.{rank}").rename(folder / f"outcome.{rank}")


# ---- Beside the ranks.


@contextlib.contextmanager
def _launcher_store() -> Iterator[int]:
    """A store in a process of its own, as a launcher keeps it; its port."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        hosted = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
        os.write(write, str(hosted.port).encode())
        signal.pause()
    os.close(write)
    try:
        yield int(os.read(read, 16))
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _forked(work: Callable[[], None], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 the outcome is written; the traceback is for a person who looks
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_case(case: Case, *, slack: float = 0.0) -> list[str]:
    """Run one case; what was wrong, a line each. ``slack``: seconds allowed beyond the promise, for a busy machine."""
    with tempfile.TemporaryDirectory(prefix="pipegrid-faults-") as name, _launcher_store() as port:
        folder = Path(name)
        children = {
            _forked(lambda rank=rank: rank_main(case, rank, folder, port), folder / f"log.{rank}"): rank
            for rank in range(WORLD)
        }
        alive, resumed = dict(children), False
        limit = time.monotonic() + 60 + 4 * case.deadline
        while alive and time.monotonic() < limit:
            child, _ = os.waitpid(-1, os.WNOHANG)
            alive.pop(child, None)
            fault = folder / "fault"
            at = float(fault.read_text() or "inf") if fault.exists() else None
            if at is not None:
                limit = min(limit, at + 2 * case.deadline + 12 + slack)
                if case.fault == "stop and continue" and not resumed and time.monotonic() > at + case.deadline + 1:
                    resumed = True
                    for pid, rank in alive.items():
                        if rank == case.rank:
                            os.kill(pid, signal.SIGCONT)
            if case.fault == "stop" and set(alive.values()) == {case.rank}:
                break
            time.sleep(0.01)
        stuck = {rank for rank in alive.values() if not (case.fault == "stop" and rank == case.rank)}
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        outcomes = {
            rank: json.loads(path.read_text()) for rank in range(WORLD) if (path := folder / f"outcome.{rank}").exists()
        }
        if at is None:  # a place that this rank does not come to so often; the steps must then just end
            failed = [
                f"rank {rank}: {outcome.get('text')}" for rank, outcome in outcomes.items() if "done" not in outcome
            ]
            return [*(f"rank {rank} did not end" for rank in stuck), *failed]
        return _judged(case, at, outcomes, stuck, slack)


TYPED = {
    "PipelineError",
    "JobFailedError",
    "P2PTimeoutError",
    "P2PPeerError",
    "P2PLaneDeadError",
    "ReductionTimeoutError",
    "ReductionPeerError",
    "GroupCreationTimeoutError",
    "CompletionError",
    "MonitorError",
    "P2PError",
    "DisagreementError",
}


def _judged(case: Case, at: float, outcomes: dict[int, dict[str, object]], stuck: set[int], slack: float) -> list[str]:
    problems = [f"rank {rank} did not end" for rank in sorted(stuck)]
    last = case.place == "close" or (case.place in ("after", "clip", "reduce", "backward") and case.step == STEPS - 1)
    for rank in range(WORLD):
        outcome, faulty = outcomes.get(rank), rank == case.rank
        if outcome is None:
            if not (faulty and case.fault in SILENT) and rank not in stuck:
                problems.append(f"rank {rank} ended without an outcome")
            continue
        if "done" in outcome:
            # A rank that had nothing left to exchange with the faulty one may well be done.
            if not faulty and not last and case.fault != "delay":
                problems.append(f"rank {rank} finished all steps")
            continue
        began = at + (case.deadline + 3 if faulty and case.fault in ("delay", "stop and continue") else 0)
        took, allowed = float(str(outcome["at"])) - began, case.deadline + PROMISED + slack
        if case.place == "create":
            allowed += 10  # open_deadline
        if took > allowed:
            problems.append(f"rank {rank} raised {took:.1f} s after the fault; the promise is {allowed:.1f} s")
        wanted = {"KeyboardInterrupt"} if faulty and case.fault == "interrupt" else TYPED
        if (case.place not in ("create", "between", "close") or not faulty) and outcome["type"] not in wanted:
            problems.append(f"rank {rank} raised {outcome['type']}: {str(outcome['text'])[:200]}")
        if case.monitor and case.fault in SEEN and not faulty and case.place not in NOTICED:
            first = str(outcome["text"]).splitlines()[0] if outcome["text"] else ""
            named = {int(number) for number in re.findall(r"\branks? \[?(\d)", first)}
            if named and case.rank not in named:
                problems.append(f"rank {rank} names innocent ranks only: {first[:200]}")
    return problems


def main() -> None:
    """Run the cases and print a table of counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, help="a sample of so many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack", type=float, default=0.0, help="seconds beyond the promise, on a busy machine")
    parser.add_argument("--case", help="one case as JSON, or - to read cases from standard input, a line each")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    cases = all_cases(options.seed)
    if options.case:
        cases = [Case(**json.loads(line)) for line in (sys.stdin if options.case == "-" else [options.case])]
    elif options.part:
        cases = random.Random(options.seed).sample(cases, options.part)
    counts: dict[str, Counter[str]] = {}
    failures = 0
    for case in cases:
        began = time.monotonic()
        problems = run_case(case, slack=options.slack)
        verdict = "held" if not problems else "broken"
        failures += bool(problems)
        for key in (case.schedule, case.fault, case.place, f"store: {case.store}", f"monitor: {case.monitor}"):
            counts.setdefault(key, Counter())[verdict] += 1
        if problems:
            print(json.dumps(asdict(case)), f"({time.monotonic() - began:.1f} s)", *problems, sep="\n  ", flush=True)
    print(f"{'':<22}{'held':>8}{'broken':>8}")
    for key, row in counts.items():
        print(f"{key:<22}{row['held']:>8}{row['broken']:>8}")
    print(f"{len(cases) - failures} passed, {failures} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
