"""The fault matrix: a rank fails in every way, at every kind of place, under every schedule; the others must say so.

    python integration_tests/fault_matrix.py                   # the covering part, as a table of counts
    python integration_tests/fault_matrix.py --random 200      # and 200 random cases of the others
    python integration_tests/fault_matrix.py --whole --jobs 8  # every case
    python integration_tests/fault_matrix.py --backend fake_nccl_serial

Each case forks four ranks from a process that has imported torch, runs three steps, and injects one fault. Every
surviving rank must raise a typed error before its deadline + 2 s (with a monitor, within 1 s of a death inside of a
step), name no innocent rank, and end; nothing is left.
Most of a case is waiting, so several run side by side (``--jobs``). On a busy machine an error may come late for no
fault of the library: ``--slack`` seconds beyond the promise count as ``late``, more as ``broken``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import itertools
import json
import math
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
from attrs import asdict, astuple, define, evolve, field, frozen

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
from pipegrid.testing.fake_nccl import FakeDevice, register
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator, P2PConfig

WORLD, STEPS, MICROBATCHES, FAULTY = 4, 3, 4, "injected failure 4711"
BACKENDS = ("gloo", "fake_nccl", "fake_nccl_serial")
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
WATCHES = tuple(itertools.product((True, False), STORES))  # with or without a monitor, and where the store is
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
    backend: str = "gloo"  # of BACKENDS


def all_cases(seed: int = 0, deadline: float = 3.0, backend: str = "gloo") -> list[Case]:
    """Every schedule x fault x place x monitor x store; rank, point and step vary with a fixed seed."""
    draw = random.Random(seed)
    return [
        Case(schedule, fault, place, *_where(draw), monitor, store, deadline, backend)
        for schedule, fault, place, (monitor, store) in itertools.product(SCHEDULES, FAULTS, PLACES, WATCHES)
    ]


def _where(draw: random.Random) -> tuple[int, int, int]:
    """Rank, point and step."""
    return draw.randrange(WORLD), draw.randrange(4), draw.randrange(STEPS)


def covers(case: Case) -> bool:
    """Whether a case is of the covering part: one in six, every schedule x fault x place among them.

    Monitor and store turn with the sum of the three, and each of the three has at least six values: any two of them,
    fixed, meet every monitor x store as the third one varies. So every three values of different factors meet.
    """
    turn = SCHEDULES.index(case.schedule) + FAULTS.index(case.fault) + PLACES.index(case.place)
    return WATCHES[turn % len(WATCHES)] == (case.monitor, case.store)


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


def _together(rank: int, folder: Path) -> None:
    """Return when all ranks are here."""
    (folder / f"here.{rank}").touch()
    while not all((folder / f"here.{other}").exists() for other in range(WORLD)):
        time.sleep(0.01)


def rank_main(case: Case, rank: int, folder: Path, port: int) -> None:
    """Run the steps of one rank; its outcome is left in ``folder``."""
    faulthandler.register(signal.SIGUSR1)
    injector = Injector(case, rank, folder)
    outcome: dict[str, object] = {}
    try:
        backend = "gloo"
        if case.backend != "gloo":
            backend = f"cpu:{register(FakeDevice(serial=case.backend.endswith('serial')))}"
        dist.init_process_group(
            backend, store=_store(case, rank, folder, port), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
        )
        config = P2PConfig(pipeline_dtype=torch.float32, deadline=case.deadline, open_deadline=case.deadline + 10)
        _together(rank, folder)  # so that no fault meets a rank inside of torch's own beginning
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
            # A first step also connects, which a busy machine delays: only faults in it need its deadline.
            first = case.deadline if case.step == 0 else None
            monitor = Monitor(watch, rank=rank, ranks=range(WORLD), deadline=case.deadline, first_deadline=first)
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

        if case.place != "create":  # a barrier of torch's own would raise torch's own errors
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


@frozen
class Verdict:
    """How a case ended. ``problems``: what was wrong, a line each; ``beyond``: seconds from promise to last error."""

    problems: list[str]
    beyond: float = -math.inf
    logs: str = ""

    @property
    def word(self) -> str:
        return "broken" if self.problems else "late" if self.beyond > 0 else "held"


def run_case(case: Case, *, slack: float = 0.0) -> Verdict:
    """Run one case. ``slack``: seconds beyond the promise that are late, not broken."""
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
        for pid, rank in alive.items():
            if rank in stuck:  # its stacks go to its log
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        outcomes = {
            rank: json.loads(path.read_text()) for rank in range(WORLD) if (path := folder / f"outcome.{rank}").exists()
        }
        if at is None:  # a place that this rank does not come to so often; the steps must then just end
            failed = [
                f"rank {rank}: {outcome.get('text')}" for rank, outcome in outcomes.items() if "done" not in outcome
            ]
            verdict = Verdict([*(f"rank {rank} did not end" for rank in stuck), *failed])
        else:
            verdict = _judged(case, at, outcomes, stuck, slack)
        logs = {rank: (folder / f"log.{rank}").read_text(errors="replace")[-6000:] for rank in children.values()}
        text = "\n".join(f"--- log of rank {rank}\n{log}" for rank, log in logs.items()) if verdict.problems else ""
        return evolve(verdict, logs=text)


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


def _promised(case: Case) -> float:
    """Seconds from the fault to the last error of another rank."""
    if case.place == "create":
        return case.deadline + 10 + PROMISED  # open_deadline
    if case.monitor and case.fault in ("kill", "exit") and case.place in ("before", "forward"):
        return 1.0
    return case.deadline + PROMISED


def _judged(case: Case, at: float, outcomes: dict[int, dict[str, object]], stuck: set[int], slack: float) -> Verdict:
    problems = [f"rank {rank} did not end" for rank in sorted(stuck)]
    beyond = -math.inf
    last = case.place == "close" or (case.place in ("after", "clip", "reduce", "backward") and case.step == STEPS - 1)
    for rank in range(WORLD):
        outcome, faulty = outcomes.get(rank), rank == case.rank
        if outcome is None:
            if not (faulty and case.fault in SILENT) and rank not in stuck:
                problems.append(f"rank {rank} ended without an outcome")
            continue
        if "done" in outcome:
            # A rank that had nothing left to exchange with the faulty one may well be done.
            in_time = case.place == "create" and case.fault in ("delay", "stop and continue")
            if not faulty and not last and not in_time:
                problems.append(f"rank {rank} finished all steps")
            continue
        began = at + (case.deadline + 3 if faulty and case.fault in ("delay", "stop and continue") else 0)
        took, promised = float(str(outcome["at"])) - began, _promised(case)
        beyond = max(beyond, took - promised)
        if took > promised + slack:
            problems.append(f"rank {rank} raised {took:.1f} s after the fault; the promise is {promised:.1f} s")
        wanted = {"KeyboardInterrupt"} if faulty and case.fault == "interrupt" else TYPED
        if (case.place not in ("create", "between", "close") or not faulty) and outcome["type"] not in wanted:
            problems.append(f"rank {rank} raised {outcome['type']}: {str(outcome['text'])[:200]}")
        if case.monitor and case.fault in SEEN and not faulty and case.place not in NOTICED:
            first = str(outcome["text"]).splitlines()[0] if outcome["text"] else ""
            named = {int(number) for number in re.findall(r"\branks? \[?(\d)", first)}
            if "does not answer: its process has" in first:  # the rank that found the store silent is not blamed
                named.clear()
            if named and case.rank not in named:
                problems.append(f"rank {rank} names innocent ranks only: {first[:200]}")
    return Verdict(problems, beyond)


def _run_all(cases: list[Case], jobs: int, slack: float) -> Iterator[tuple[Case, Verdict]]:
    """The verdicts of ``cases`` as they come; ``jobs`` processes take every so many-th case each."""
    if jobs == 1:
        for case in cases:
            yield case, run_case(case, slack=slack)
        return
    read, write = os.pipe()
    children = []
    for job in range(jobs):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "w", buffering=1) as lines:
                for number in range(job, len(cases), jobs):
                    lines.write(json.dumps([number, *astuple(run_case(cases[number], slack=slack))]) + "\n")
            os._exit(0)
        children.append(child)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            number, *verdict = json.loads(line)
            yield cases[number], Verdict(*verdict)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    """Run the cases and print a table of counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="every case, in place of the covering part")
    parser.add_argument("--random", type=int, default=0, help="so many of the other cases beside the covering part")
    parser.add_argument("--seed", type=int, default=0, help="of rank, point and step, and of the random cases")
    parser.add_argument("--backend", choices=BACKENDS, default="gloo", help="of the default group")
    parser.add_argument("--case", help="one case as JSON, or - to read cases from standard input, a line each")
    parser.add_argument("--logs", action="store_true", help="print what the ranks of broken cases wrote")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    parser.add_argument("--deadline", type=float, default=3.0, help="of each case; longer on a busy machine")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds beyond the promise that are late, not broken")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    cases = all_cases(options.seed, options.deadline, options.backend)
    if options.case:
        cases = [Case(**json.loads(line)) for line in (sys.stdin if options.case == "-" else [options.case])]
    elif not options.whole:
        rest = [case for case in cases if not covers(case)]
        cases = [case for case in cases if covers(case)] + draw.sample(rest, options.random)
    draw.shuffle(cases)  # so that slow kinds do not run all at once
    counts: dict[str, Counter[str]] = {}
    began = time.monotonic()
    ended = 0
    for case, verdict in _run_all(cases, options.jobs, options.slack):
        ended += 1
        for key in (case.schedule, case.fault, case.place, f"store: {case.store}", f"monitor: {case.monitor}", "all"):
            counts.setdefault(key, Counter())[verdict.word] += 1
        if verdict.word != "held":
            late = f"({verdict.beyond:.1f} s beyond the promise)" if verdict.beyond > 0 else ""
            print(json.dumps(asdict(case)), f"{verdict.word} {late}", *verdict.problems, sep="\n  ", flush=True)
            print(verdict.logs if options.logs else "", end="", flush=True)
    print(f"{'':<22}{'held':>8}{'late':>8}{'broken':>8}")
    rows = [*SCHEDULES, *FAULTS, *PLACES, *(f"store: {store}" for store in STORES), "monitor: True", "monitor: False"]
    for key in (*rows, "all"):
        if key in counts:
            print(f"{key:<22}" + "".join(f"{counts[key][word]:>8}" for word in ("held", "late", "broken")))
    failed = counts["all"]["broken"] + len(cases) - ended
    print(f"{time.monotonic() - began:.0f} s, {options.jobs} side by side")
    print(f"{len(cases) - failed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
