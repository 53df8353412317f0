"""The control store of a job: each rank's place in the plan, the step it runs, and the job's first failure.

A store, never a process group: it works while lanes hang, and the last entry of a rank outlives it. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Protocol, cast

from attrs import define, frozen

from pipegrid.topology.bounded_calls import BoundedCalls

_POLL_SECONDS = 0.02
_UNHEARD = "nothing was heard of it"


class ControlStore(Protocol):
    """The part of a `torch.distributed.Store` that a job's control needs."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter (absent ones are 0) and return the sum, atomically."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected`` (empty: absent); return the value after that."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a value."""
        ...


STORE_VERBS = ("set", "get", "add", "check", "compare_set", "delete_key")
"""The methods of a `ControlStore`."""


def bounded_store(store: ControlStore, calls: BoundedCalls, seconds: float) -> ControlStore:
    """``store``, of which every call ends within ``seconds``, with an answer or a `SilentStoreError`."""
    verbs = {verb: partial(calls.run, getattr(store, verb), seconds=seconds) for verb in STORE_VERBS}
    return cast("ControlStore", SimpleNamespace(**verbs))


class DisagreementError(ValueError):
    """Ranks were about to run different steps. Nothing was sent."""


@frozen
class Failure:
    """The first failure of the job: whose, what it said, and whether it is that ranks run different steps."""

    rank: int
    text: str
    disagreement: bool = False


@define
class Control:
    """One rank's end of the ``store``, whose keys are for ``ranks`` alone, all of the job."""

    store: ControlStore
    rank: int
    ranks: tuple[int, ...]

    # Positions

    def publish(self, position: str, *, last: bool = False) -> None:
        """Publish this rank's place; ``last`` if it goes no further."""
        self.store.set(f"{'last' if last else 'position'}/{self.rank}", json.dumps([position, time.time()]))

    def positions(self, *, seconds: float) -> dict[int, str]:
        """The place of each rank, after waiting up to ``seconds`` for the last entries of all."""
        end = time.monotonic() + seconds
        missing = set(self.ranks)
        while missing:
            missing -= {rank for rank in missing if self.store.check([f"last/{rank}"])}
            if not missing or time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        return {rank: self._position(rank, silent=rank in missing) for rank in self.ranks}

    def _position(self, rank: int, *, silent: bool) -> str:
        key = f"{'position' if silent else 'last'}/{rank}"
        if not self.store.check([key]):
            return _UNHEARD
        text, said_at = json.loads(self.store.get(key))
        # Clocks of several hosts differ, so an age is only worth telling where it is long.
        return f"{text} (last heard {max(0.0, time.time() - said_at):.1f} s ago)" if silent else str(text)

    # Failures

    def record(self, text: str, *, disagreement: bool = False, rank: int | None = None) -> Failure:
        """Record a failure of this rank, or of ``rank``; the first one of the job, which another may have recorded."""
        mine = json.dumps([self.rank if rank is None else rank, text, disagreement])
        return Failure(*json.loads(self.store.compare_set("failure", "", mine)))

    def failure(self) -> Failure | None:
        """The job's first failure, if there is one."""
        return Failure(*json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    # Agreement

    def announce(self, step: int, what: str) -> None:
        """Publish what this rank runs as its ``step``-th step; the last rank to come compares, and records."""
        self.store.set(f"step/{step}/{self.rank}", what)
        if self.store.add(f"step/{step}/count", 1) < len(self.ranks):
            return
        said = {rank: self.store.get(f"step/{step}/{rank}").decode() for rank in self.ranks}
        if len(set(said.values())) > 1:
            self.record(_difference(step, said), disagreement=True)
        self.store.set(f"step/{step}/compared", "1")
        # All ranks have come to this step, so none looks at the one before any more.
        for key in (*map(str, self.ranks), "count", "compared"):
            self.store.delete_key(f"step/{step - 1}/{key}")

    def agree(self, step: int, what: str, *, seconds: float) -> Failure | None:
        """Announce, and wait until all ranks have: the job's first failure, if there is one by then.

        Raises:
            DisagreementError: a rank did not come in time.
        """
        self.announce(step, what)
        end = time.monotonic() + seconds
        while not self.store.check([f"step/{step}/compared"]):
            failure = self.failure()
            if failure is not None:
                return failure
            if time.monotonic() > end:
                missing = [rank for rank in self.ranks if not self.store.check([f"step/{step}/{rank}"])]
                raise DisagreementError(
                    f"rank {self.rank} runs {what} as its step {step}, and waited {seconds:.3g} s for all ranks to say "
                    f"what they run; nothing was heard of {_listed(missing)}. Call step() equally often on every rank"
                )
            time.sleep(_POLL_SECONDS / 10)
        return self.failure()


def _difference(step: int, said: dict[int, str]) -> str:
    """In words: who runs what."""
    table = "; ".join(_grouped(said))
    return (
        f"the ranks do not run the same step {step}: {table}. Give every rank the same plan, so the same microbatches"
    )


def where_all_stand(positions: dict[int, str]) -> str:
    """One line for each position, with the ranks that stand there."""
    return "\n".join(f"  {line}" for line in _grouped(positions))


def _grouped(said: dict[int, str]) -> list[str]:
    """``ranks 0-2: text`` for each text."""
    groups: dict[str, list[int]] = {}
    for rank, text in said.items():
        groups.setdefault(text, []).append(rank)
    return [f"{_listed(ranks)}: {text}" for text, ranks in groups.items()]


def _listed(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them shortened: ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
