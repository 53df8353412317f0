"""The matrix of two hosts: a wire is cut or slowed, a rank or a host dies, in every operation of a job.

    python integration_tests/hosts_matrix.py                  # the covering part, as a table
    python integration_tests/hosts_matrix.py --whole --jobs 4
    python integration_tests/hosts_matrix.py --only save cut  # the cases with these words

Four ranks, two on each of two hosts (`pipegrid.testing.hosts`), forked from a process that has imported torch. Right
is: every rank that can run raises a typed error before the deadline + 2 s, and its process has ended 5 s later; or all
ranks have the result of the same operations without a fault. Survivors go on where the living ranks have all stages,
with that result; those cut off from the store raise, and write nothing after that.
On a busy machine an error may come late for no fault of the library: see ``--slack``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # an optimizer does: once, before the ranks are forked
from attrs import define, field

sys.path.insert(0, str(Path(__file__).parent))

from hosts_ranks import HEARTBEAT, OPERATIONS, WORLD, Case, rank_main, survivable
from kit.processes import logs
from pipegrid.testing import CUT, Wire
from pipegrid.testing.hosts import serve_hosts, set_wire
from pipegrid.testing.messages import Channel, HostsOpen

FAULTS = ("cut", "one direction", "back before", "back after", "slow", "lossy", "stop", "kill", "kill host")
APART = ("stages", "replicas")
PROMISED, GONE = 2.0, 5.0  # seconds beyond the deadline to the error, and from the error to the end of the process
TYPED = {
    "PipelineError",
    "JobFailedError",
    "P2PTimeoutError",
    "P2PPeerError",
    "P2PLaneDeadError",
    "CollectiveFailedError",
    "CheckpointError",
    "GenerationError",
    "GroupStoreError",
    "GroupConnectionError",
    "GroupCreationTimeoutError",
    "DisagreementError",
    "RankRetiredError",
}
START = 120.0  # seconds to the fault, at most


def all_cases(deadline: float) -> list[Case]:
    """Every operation x fault; what the wire is between changes from one to the next."""
    return [
        Case(operation, fault, APART[(row + column) % 2], deadline)
        for row, operation in enumerate(OPERATIONS)
        for column, fault in enumerate(FAULTS)
    ]


def covers(case: Case) -> bool:
    """Whether a case is of the covering part: each operation and each fault once."""
    return [*OPERATIONS].index(case.operation) == FAULTS.index(case.fault)


@define
class Run:
    """A case under way. ``ended``: when the process of each rank had, in `time.monotonic` seconds."""

    case: Case
    folder: Path
    hosts: HostsOpen
    holder: int
    ranks: list[int] = field(factory=list)
    began: float = field(factory=time.monotonic)
    at: float | None = None
    ended: dict[int, float] = field(factory=dict)
    stuck: list[int] = field(factory=list)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that cannot run."""
        return {"stop": (3,), "kill": (3,), "kill host": (2, 3)}.get(self.case.fault, ())

    def look(self, slack: float) -> bool:
        """Fire the fault when it is time, note what has ended; whether all has."""
        now = time.monotonic()
        for rank, process in enumerate(self.ranks):
            if rank not in self.ended and os.waitpid(process, os.WNOHANG)[0]:
                self.ended[rank] = now
        if self.at is None and (self.folder / "ready").exists():
            self.at = now
            self.fire()
            (self.folder / "fault").touch()
        limit = self.began + START + slack
        if self.at is not None:
            rest = 60.0 if survivable(self.case.fault) or self.case.operation == "survivors" else GONE + PROMISED
            limit = self.at + 2 * self.case.deadline + rest + slack
        waited = [
            rank for rank in range(WORLD) if rank not in self.ended and not (self.case.fault == "stop" and rank == 3)
        ]
        if waited and now < limit:
            return False
        self.stuck = waited
        return True

    def fire(self) -> None:
        deadline = self.case.deadline
        match self.case.fault:
            case "cut":
                self.wire(CUT)
            case "one direction":
                self.wire(Wire(to_a=self.case.apart != "stages", to_b=self.case.apart == "stages"))
            case "back before" | "back after":
                self.wire(CUT)
                long = 0.4 * min(deadline, HEARTBEAT) if self.case.fault == "back before" else deadline + 1.5
                self.wire(Wire(), after=long)
            case "slow":
                self.wire(Wire(delay=0.02, rate=5e6))
            case "lossy":
                self.wire(Wire(loss=0.02))
            case "stop":
                os.kill(self.ranks[3], signal.SIGSTOP)
            case "kill host":
                self.wire(CUT)
        if self.case.fault.startswith("kill"):
            for rank in self.lost:
                os.kill(self.ranks[rank], signal.SIGKILL)

    def wire(self, wire: Wire, after: float = 0.0) -> None:
        set_wire(self.folder, wire, after)

    def end(self) -> None:
        """End what is left, each with its stacks in its log."""
        for rank in self.stuck:
            os.kill(self.ranks[rank], signal.SIGUSR1)
        time.sleep(0.3 if self.stuck else 0.0)
        for process in [*(self.ranks[rank] for rank in range(WORLD) if rank not in self.ended), self.holder]:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)

    def outcomes(self) -> dict[int, dict[str, object]]:
        """What each rank found; of survivors also when it wrote last."""
        found = {rank: self.folder / f"outcome.{rank}" for rank in range(WORLD)}
        said = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
        for rank, outcome in said.items():
            if (path := self.folder / f"written.{rank}").exists():
                outcome["written"] = float(path.read_text())
        return said


def start(case: Case) -> Run | None:
    """Fork hosts and ranks of a case. None in a rank, once it has done its work: its interpreter is to end."""
    folder = Path(tempfile.mkdtemp(prefix="pipegrid-hosts-"))
    here, there = socket.socketpair()
    holder = os.fork()
    if holder == 0:
        here.close()
        try:
            serve_hosts(Channel(there), folder, Wire())
        finally:
            os._exit(1)
    there.close()
    hosts = Channel(here).receive()
    here.close()
    if not isinstance(hosts, HostsOpen):
        raise SystemExit(f"not allowed here: {hosts.text}")
    run = Run(case, folder, hosts, holder)
    for rank in range(WORLD):
        process = os.fork()
        if process == 0:
            rank_main(case, rank, folder, hosts)
            return None
        run.ranks.append(process)
    return run


def problems(run: Run, outcomes: dict[int, dict[str, object]], right: Sequence[object], slack: float) -> list[str]:
    """What is wrong with a run, a line each; ``right`` are the results by rank of a run without a fault."""
    case, found = run.case, [f"rank {rank} did not end" for rank in run.stuck]
    if run.at is None:
        return [*found, "the ranks never came to the fault"]
    can_run = [rank for rank in range(WORLD) if rank not in run.lost]
    goes_on = survivable(case.fault)
    for rank in can_run:
        outcome = outcomes.get(rank)
        if outcome is None:
            found += [] if rank in run.stuck else [f"rank {rank} ended without an outcome"]
            continue
        of_survivors = case.operation == "survivors"
        # Survivors: who has the store's host on its side goes on, and who is cut off from it for long does not.
        fenced = case.fault in ("cut", "one direction", "back after") and rank >= WORLD // 2
        same = "text" not in outcome and _close(outcome["result"], right, rank)
        if goes_on or (of_survivors and not fenced):
            if "text" in outcome:
                found.append(f"rank {rank} raised {outcome['type']}: {str(outcome['text'])[:300]}")
            elif not same:
                found.append(f"rank {rank} has {outcome['result']}, not {right[rank]}")
            continue
        if "text" not in outcome:  # tokens of a replica on one host need no other one
            found += [] if same else [f"rank {rank} did all operations, with {outcome['result']}"]
            continue
        if of_survivors and float(str(outcome["written"])) - run.at > 1.0 + slack:
            found.append(f"rank {rank} wrote {float(str(outcome['written'])) - run.at:.1f} s after it was cut off")
        took = float(str(outcome["at"])) - run.at
        limit = case.deadline + PROMISED + (HEARTBEAT if of_survivors else 0.0)
        if took > limit + slack:
            found.append(f"rank {rank} raised {took:.1f} s after the fault; the promise is {limit:.1f} s")
        if outcome["type"] not in TYPED:
            found.append(f"rank {rank} raised {outcome['type']}: {str(outcome['text'])[:300]}")
    for rank, ended in run.ended.items():
        if rank in outcomes and ended - float(str(outcomes[rank]["at"])) > GONE + slack:
            found.append(f"rank {rank} ended {ended - float(str(outcomes[rank]['at'])):.1f} s after its error")
    return found


def _close(result: object, right: Sequence[object], rank: int) -> bool:
    return bool(right) and math.isclose(float(str(result)), float(str(right[rank])), rel_tol=1e-6, abs_tol=1e-9)


def main() -> int:
    """Run the cases and print a table; in a rank, its work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="every case, in place of the covering part")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with these operations and faults")
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side")
    parser.add_argument("--deadline", type=float, default=5.0, help="of each case; longer on a busy machine")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds beyond each promise that are not wrong")
    parser.add_argument(
        "--logs", action="store_true", help="print what the ranks of wrong cases wrote, and first errors"
    )
    options = parser.parse_args()
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as in conftest.py
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    cases = [case for case in all_cases(options.deadline) if options.whole or options.only or covers(case)]
    words = {*options.only}
    cases = [
        case
        for case in cases
        if (not words & {*OPERATIONS} or case.operation in words) and (not words & {*FAULTS} or case.fault in words)
    ]
    if any(case.operation == "generate" for case in cases):
        import transformers.models.llama.modeling_llama  # noqa: F401 (once, before the ranks are forked)
    gc.freeze()  # what is imported is not taken apart at the end of each rank: a second of its processor
    goes_on = ("survivors", "generate")  # or may, on a part of the ranks
    compared = {case.operation: case.apart for case in cases if survivable(case.fault) or case.operation in goes_on}
    waiting = [*(Case(name, "none", apart, options.deadline) for name, apart in compared.items()), *cases]
    running: list[Run] = []
    done: list[tuple[Run, dict[int, dict[str, object]], str]] = []
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            run = start(waiting.pop(0))
            if run is None:
                return 0
            running.append(run)
        for run in [run for run in running if run.look(options.slack)]:
            running.remove(run)
            run.end()
            done.append((run, run.outcomes(), logs(run.folder)))
            shutil.rmtree(run.folder, ignore_errors=True)
        time.sleep(0.01)
    return _report(done, options, time.monotonic() - began)


def _report(
    done: list[tuple[Run, dict[int, dict[str, object]], str]], options: argparse.Namespace, seconds: float
) -> int:
    right = {
        run.case.operation: [outcomes.get(rank, {}).get("result", math.nan) for rank in range(WORLD)]
        for run, outcomes, _ in done
        if run.case.fault == "none"
    }
    words: dict[tuple[str, str], str] = {}
    for run, outcomes, log in done:
        wrong = problems(run, outcomes, right.get(run.case.operation, []), options.slack)
        late = [float(str(each["at"])) - run.at for each in outcomes.values() if run.at and "text" in each]
        words[run.case.operation, run.case.fault] = "WRONG" if wrong else f"{max(late):.1f} s" if late else "goes on"
        if wrong:
            print(f"{run.case.operation}, {run.case.fault}, {run.case.apart} apart:", *wrong, sep="\n  ")
        if options.logs:
            errors = [f"  rank {rank}: {each.get('type')}: {each.get('text')}" for rank, each in outcomes.items()]
            print(f"{run.case.operation}, {run.case.fault}:", *errors, log if wrong else "", sep="\n")
    columns = [fault for fault in FAULTS if any(fault == one for _, one in words)]
    print(f"{'':<12}" + "".join(f"{fault:>15}" for fault in columns))
    for name in OPERATIONS:
        if any(name == one for one, _ in words):
            print(f"{name:<12}" + "".join(f"{words.get((name, fault), ''):>15}" for fault in columns))
    failed = sum(word == "WRONG" for word in words.values())
    print(f"{seconds:.0f} s; numbers: from the fault to the last error, with a deadline of {options.deadline:g} s")
    print(f"{len(words) - failed} right, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
