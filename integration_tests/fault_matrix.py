"""The fault matrix: a rank fails in every way, at every kind of place, under every schedule; the others must say so.

    python integration_tests/fault_matrix.py                   # the covering part, as a table of counts
    python integration_tests/fault_matrix.py --random 200      # and 200 random cases of the others
    python integration_tests/fault_matrix.py --whole --jobs 8  # every case
    python integration_tests/fault_matrix.py --backend fake_nccl_serial

Each case forks four ranks from a process that has imported torch, runs three steps, and injects one fault: while they
open their groups, in a step, between steps, as they close, or as they start over the store of a launcher, which then
starts them again, and all steps run. In some, forty days of a moved clock pass after the first step.
Every surviving rank must raise a typed error before its deadline + 2 s (with a monitor, within 1 s of a death inside of
a step), name no innocent rank, and end; nothing is left.
Most of a case is waiting, so several run side by side (``--jobs``). On a busy machine an error may come late for no
fault of the library: ``--slack`` seconds beyond the promise count as ``late``, more as ``broken``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen

sys.path.insert(0, str(Path(__file__).parent))

from fault_ranks import SCHEDULES, STARTS, STEPS, WORLD, Case, rank_main
from kit.processes import end, logs

BACKENDS = ("gloo", "fake_nccl", "fake_nccl_serial")
PROMISED = 2.0  # seconds beyond the deadline
DAYS = 40.0

FAULTS = ("kill", "exit", "raise", "memory", "interrupt", "stop", "stop and continue", "delay")
PLACES = ("before", "after", "forward", "backward", "between", "reduce", "clip", "create", "close", "open", "restart")
STORES = ("launcher", "rank", "file")
WATCHES = tuple(itertools.product((True, False), STORES))  # with or without a monitor, and where the store is
SEEN = {"kill", "exit", "raise", "memory", "interrupt"}  # what others learn at once, by its name
# Where only the backend knows that a rank is gone, not which one: the error is of the rank that noticed.
NOTICED = {*STARTS, "close", "reduce", "clip", "backward", "after"}
SILENT = {"kill", "exit", "stop"}  # the faulty rank itself reports nothing


def all_cases(seed: int = 0, deadline: float = 3.0, backend: str = "gloo") -> list[Case]:
    """Every schedule x fault x place x days x monitor x store; rank, point and step vary with a fixed seed.

    Days pass after the first step, so not for places before it. At a restart the store is the launcher's, whatever the
    case says.
    """
    draw = random.Random(seed)
    cases = []
    for schedule, fault, place, (monitor, store) in itertools.product(SCHEDULES, FAULTS, PLACES, WATCHES):
        rank, point, step = draw.randrange(WORLD), draw.randrange(4), draw.randrange(STEPS)
        step = 0 if place in STARTS else step
        case = Case(schedule, fault, place, rank, point, step, monitor, store, deadline, backend)
        cases.append(case)
        if place not in STARTS:
            cases.append(evolve(case, days=DAYS, step=draw.randrange(1, STEPS)))
    return cases


def covers(case: Case) -> bool:
    """Whether a case is of the covering part: one in six to twelve, every schedule x fault x place among them.

    Monitor and store turn with the sum of the three, and each of the three has at least six values: any two of them,
    fixed, meet every monitor x store as the third one varies. So every three values of different factors meet. Days
    turn after each round, so they meet every two.
    """
    turn = SCHEDULES.index(case.schedule) + FAULTS.index(case.fault) + PLACES.index(case.place)
    rounds, watch = divmod(turn, len(WATCHES))
    days = DAYS if rounds % 2 and case.place not in STARTS else 0.0
    return (*WATCHES[watch], days) == (case.monitor, case.store, case.days)


# ---- Beside the ranks.


FORK = multiprocessing.get_context("fork")


def _serve(connection: Connection) -> None:
    hosted = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    connection.send(hosted.port)
    signal.pause()


@contextlib.contextmanager
def _launcher_store() -> Iterator[int]:
    """A store in a process of its own, as a launcher keeps it; its port."""
    here, there = FORK.Pipe()
    server = FORK.Process(target=_serve, args=(there,))
    server.start()
    try:
        yield here.recv()
    finally:
        server.kill()
        server.join()


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
        at, outcomes, stuck = _attempt(case, folder, port, slack)
        # Without a fault, at a place that this rank does not come to so often, the steps must just end.
        verdict = Verdict(_undone(outcomes, stuck)) if at is None else _judged(case, at, outcomes, stuck, slack)
        if case.place == "restart" and not verdict.problems:
            (folder / "again").mkdir()
            _, outcomes, stuck = _attempt(case, folder / "again", port, slack, again=True)
            verdict = evolve(verdict, problems=[f"started again: {problem}" for problem in _undone(outcomes, stuck)])
        return evolve(verdict, logs=logs(folder) if verdict.problems else "")


Outcomes = dict[int, dict[str, object]]


def _attempt(
    case: Case, folder: Path, port: int, slack: float, *, again: bool = False
) -> tuple[float | None, Outcomes, set[int]]:
    """Run all ranks until they end: when the fault was, if it was; outcomes; the ranks that did not end."""
    ranks = [FORK.Process(target=rank_main, args=(case, rank, folder, port, again)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    faulty, fault = ranks[case.rank], folder / "fault"

    def fault_time() -> float | None:
        return float(fault.read_text() or "inf") if fault.exists() else None

    limit = time.monotonic() + 60 + 4 * case.deadline + (slack if again else 0)
    while (alive := [rank for rank in ranks if rank.is_alive()]) and time.monotonic() < limit:
        if (at := fault_time()) is not None:
            limit = min(limit, at + _promised(case) + case.deadline + 10 + slack)
            if case.fault == "stop and continue" and faulty in alive and time.monotonic() > at + case.deadline + 1:
                os.kill(faulty.pid, signal.SIGCONT)
            if case.fault == "stop" and alive == [faulty]:
                faulty.kill()
        time.sleep(0.01)
    stuck = set(end(ranks, seconds=0.0))
    at = fault_time()
    if case.fault == "stop" and at is not None:
        stuck.discard(case.rank)
    found = {rank: folder / f"outcome.{rank}" for rank in range(WORLD)}
    return at, {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}, stuck


def _undone(outcomes: Outcomes, stuck: set[int]) -> list[str]:
    """What is wrong where every rank should have done all steps."""
    failed = [f"rank {rank}: {outcome.get('text')}" for rank, outcome in outcomes.items() if "done" not in outcome]
    lost = [f"rank {rank} ended without an outcome" for rank in range(WORLD) if rank not in {*outcomes, *stuck}]
    return [*(f"rank {rank} did not end" for rank in stuck), *failed, *lost]


TYPED = {
    "PipelineError",
    "JobFailedError",
    "P2PTimeoutError",
    "P2PPeerError",
    "P2PLaneDeadError",
    "CollectiveFailedError",
    "GroupStoreError",
    "GroupConnectionError",
    "GroupCreationTimeoutError",
    "StepArgumentError",
    "P2PError",
    "DisagreementError",
}
# Of torch's own start, at which a rank is gone that had come to the attempt.
OF_TORCH = {"DistStoreError", "DistNetworkError", "DistBackendError", "RuntimeError"}


def _promised(case: Case) -> float:
    """Seconds from the fault to the last error of another rank."""
    if case.place in STARTS:
        return case.deadline + 10 + PROMISED  # open_deadline
    if case.monitor and case.fault in ("kill", "exit") and case.place in ("before", "forward"):
        return 1.0
    return case.deadline + PROMISED


def _judged(case: Case, at: float, outcomes: Outcomes, stuck: set[int], slack: float) -> Verdict:
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
            in_time = case.place in STARTS and case.fault in ("delay", "stop and continue")
            if not faulty and not last and not in_time:
                problems.append(f"rank {rank} finished all steps")
            continue
        began = at + (case.deadline + 3 if faulty and case.fault in ("delay", "stop and continue") else 0)
        took, promised = float(str(outcome["at"])) - began, _promised(case)
        beyond = max(beyond, took - promised)
        if took > promised + slack:
            problems.append(f"rank {rank} raised {took:.1f} s after the fault; the promise is {promised:.1f} s")
        wanted = {"KeyboardInterrupt"} if faulty and case.fault == "interrupt" else TYPED
        if case.place == "restart" and case.point < 2:
            wanted = OF_TORCH if case.point else {"TimeoutError"}
            if case.point == 0 and not faulty and not re.search(rf"ranks? \[?{case.rank}\b", str(outcome["text"])):
                problems.append(f"rank {rank} does not name rank {case.rank}: {str(outcome['text'])[:200]}")
        if (case.place not in (*STARTS, "between", "close") or not faulty) and outcome["type"] not in wanted:
            problems.append(f"rank {rank} raised {outcome['type']}: {str(outcome['text'])[:200]}")
        if case.monitor and case.fault in SEEN and not faulty and case.place not in NOTICED:
            first = str(outcome["text"]).splitlines()[0] if outcome["text"] else ""
            named = {int(number) for number in re.findall(r"\branks? \[?(\d)", first)}
            if "the control store does not answer" in first:  # the rank that found the store silent is not blamed
                named.clear()
            if named and case.rank not in named:
                problems.append(f"rank {rank} names innocent ranks only: {first[:200]}")
    return Verdict(problems, beyond)


def _run_all(cases: list[Case], jobs: int, slack: float) -> Iterator[tuple[Case, Verdict]]:
    """The verdicts of ``cases`` as they come, from ``jobs`` processes."""
    with ProcessPoolExecutor(jobs, mp_context=FORK) as pool:
        running = {pool.submit(run_case, case, slack=slack): case for case in cases}
        for done in as_completed(running):
            yield running[done], done.result()


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
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as in conftest.py
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
    for case, verdict in _run_all(cases, options.jobs, options.slack):
        watch = f"store: {case.store}", f"monitor: {case.monitor}", f"days: {case.days:g}"
        for key in (case.schedule, case.fault, case.place, *watch, "all"):
            counts.setdefault(key, Counter())[verdict.word] += 1
        if verdict.word != "held":
            late = f"({verdict.beyond:.1f} s beyond the promise)" if verdict.beyond > 0 else ""
            print(json.dumps(asdict(case)), f"{verdict.word} {late}", *verdict.problems, sep="\n  ", flush=True)
            print(verdict.logs if options.logs else "", end="", flush=True)
    print(f"{'':<22}{'held':>8}{'late':>8}{'broken':>8}")
    rows = [*SCHEDULES, *FAULTS, *PLACES, *(f"store: {store}" for store in STORES), "monitor: True", "monitor: False"]
    rows += ["days: 0", "days: 40"]
    for key in (*rows, "all"):
        if key in counts:
            print(f"{key:<22}" + "".join(f"{counts[key][word]:>8}" for word in ("held", "late", "broken")))
    failed = counts["all"]["broken"]
    print(f"{time.monotonic() - began:.0f} s, {options.jobs} side by side")
    print(f"{len(cases) - failed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
