"""Where ranks of a job that survives deaths are killed: the cases, and the places that a rank comes to."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

from attrs import define, evolve, field, frozen

from pipegrid.survive import Survivors, handover

ANY = -2  # of steps: where a new process comes is the matter of the machine


@frozen
class Kill:
    """``rank`` is killed as it comes to ``place`` for the ``nth`` time (from 0) in ``step``; or it raises ``error``.

    ``process``: which of the processes of the rank, from 0; -1 is the step before a new process has the state.
    """

    rank: int
    place: str
    step: int = 1
    nth: int = 0
    error: Exception | None = None
    process: int = 0

    def __str__(self) -> str:
        return f"{self.rank} at {self.place.replace(' ', '_')} {self.nth} of {self.step}"


@frozen
class Case:
    """A job of ``positions`` x ``replicas`` ranks, and the kills in it.

    ``pairs``: ranks compute only two by two, so the other one of a dead rank retires. ``back``: steps that
    wait for a new process that asks to come in. ``backend``: gloo, or a mode of the fake NCCL, of which no connection
    ends when a process does.
    """

    job: str
    positions: int
    replicas: int
    kills: tuple[Kill, ...] = ()
    schedule: str = "1f1b"
    pairs: bool = False
    back: tuple[int, ...] = ()
    heartbeat: float = 5.0
    deadline: float = 20.0
    backend: str = "gloo"

    @property
    def steps(self) -> int:
        """One before the first kill as a rule, and one after the last."""
        return 2 + max((*(kill.step for kill in self.kills), *self.back), default=0)

    @property
    def world_size(self) -> int:
        return self.positions * self.replicas

    @property
    def retiring(self) -> tuple[int, ...]:
        """The ranks that retire when others die: with ``pairs`` the other ones of each pair."""
        dead = {kill.rank for kill in self.kills if self.pairs and kill.place != "never"}
        return tuple([rank for rank in (one ^ 1 for one in dead) if rank not in dead])


@define
class Places:
    """Kills this process where its case says so."""

    case: Case
    rank: int
    folder: Path
    process: int = 0
    step: int = -1
    seen: Counter[str] = field(factory=Counter)

    def begin(self, step: int) -> None:
        self.step, self.seen = step, Counter()

    def reach(self, place: str) -> None:
        here = self.rank, place, self.seen[place], self.process
        self.seen[place] += 1
        for kill in self.case.kills:
            if kill.step in (self.step, ANY) and (kill.rank, kill.place, kill.nth, kill.process) == here:
                if kill.error is not None:
                    raise kill.error
                (self.folder / f"killed.{self.rank}").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

    # A hook of a runtime.

    def before(self, action: object) -> None:
        self.reach(action.kind.name)

    def after(self, action: object) -> None:
        self.reach(f"after {action.kind.name}")

    def around(self, survivors: Survivors) -> Survivors:
        """Places in what the survivors do between functions."""
        for name in ("vote", "done"):
            setattr(survivors.epochs, name, self.within(name, getattr(survivors.epochs, name)))
        survivors._build = self.within("build", survivors._build)
        for name in ("send", "receive"):
            setattr(handover._Wire, name, self.within(f"{name} state", getattr(handover._Wire, name)))
        return survivors

    def within(self, name, function):
        def wrapped(*arguments, **options):
            self.reach(name)
            result = function(*arguments, **options)
            self.reach(f"after {name}")
            return result

        return wrapped


PLACES = {
    "sums": (
        "between",
        "compute",
        "after sum",
        "done",
        "after done",
        "in between",
        "largest",
        "after largest",
        "update",
    ),
    # Of every rank; the messages are those of its position.
    "pipeline": (
        "between",
        "forward",
        "F",
        "after F",
        "B",
        "after B",
        "REDUCE",
        "after REDUCE",
        "after step",
        "done",
        "after done",
        "in between",
        "norm",
        "after norm",
        "optimizer",
        "after optimizer",
    ),
}
TO_THE_NEXT = ("SEND_F", "after SEND_F", "RECV_B", "after RECV_B")
TO_THE_ONE_BEFORE = ("RECV_F", "after RECV_F", "SEND_B", "after SEND_B")
HALVES = ("I", "after I", "W", "after W")  # of the backwards of a schedule that splits them


def whole_matrix(case: Case) -> list[Case]:
    """Every rank at every place of its own."""
    places = [place for place in PLACES["pipeline"] if case.schedule == "1f1b" or place not in ("B", "after B")]
    places += () if case.schedule == "1f1b" else HALVES
    left = {}
    for rank in range(case.world_size):
        position = rank // case.replicas
        before, after = position > 0, position < case.positions - 1
        left[rank] = [*places, *(TO_THE_NEXT if after else ()), *(TO_THE_ONE_BEFORE if before else ())]
    return all_kills(case, left)


def all_kills(case: Case, left: dict[int, list[str]]) -> list[Case]:
    """Every rank at every place that is ``left`` of it, in as few runs as leave one replica of each position."""
    cases = []
    while any(left.values()):
        chosen = []
        for position in range(case.positions):
            ranks = sorted(range(position * case.replicas, (position + 1) * case.replicas), key=lambda r: -len(left[r]))
            chosen += [rank for rank in ranks[: case.replicas - 1] if left[rank]]
        kills = [Kill(rank, left[rank].pop(), step) for step, rank in enumerate(chosen, start=1)]
        cases.append(evolve(case, kills=tuple(kills)))
    return cases
