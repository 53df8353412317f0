"""The control store of a job: each rank's place in the plan, the step it runs, and the job's first failure.

A store, never a process group: it works while lanes hang, and the last entry of a rank outlives it. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast

from attrs import define, field, frozen

from pipegrid.topology.bounded_calls import BoundedCalls
from pipegrid.transport.collectives.differences import by_text, listed

_POLL_SECONDS = 0.02
_UNHEARD = "nothing was heard of it"
# In the count of ranks that have arrived at a step: one that runs something else than the first to arrive.
_DIFFERENT = 1 << 32


class ControlStore(Protocol):
    """The part of a `torch.distributed.Store` that a job's control needs.

    Examples:
        >>> from torch.distributed import HashStore
        >>> store: ControlStore = HashStore()  # or a FileStore, a TCPStore, or control_store of topology
        >>> Control(store, rank=0, ranks=(0,)).record("the data has ended").rank
        0
    """

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter (absent ones are 0) and return the sum, atomically."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write ``desired`` if the value is ``expected`` (empty: absent); return the value after that."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a value."""


STORE_VERBS = ("set", "get", "add", "check", "compare_set", "delete_key")
"""The methods of a `ControlStore`."""
_READ_ALL = "multi_get"  # of torch's stores: many values in one call


def bounded_store(
    store: ControlStore, calls: BoundedCalls, seconds: float, *, stuck: float | None = None
) -> ControlStore:
    """``store``, of which every call ends within ``seconds``, with an answer or a `SilentStoreError`.

    ``stuck``: the same while an earlier call has not returned: a silent store is waited for once.
    """
    names = (*STORE_VERBS, _READ_ALL) if hasattr(store, _READ_ALL) else STORE_VERBS

    def call(verb: Callable[..., Any], *arguments: Any) -> Any:
        return calls.run(verb, *arguments, seconds=stuck if stuck is not None and calls.stuck else seconds)

    return cast("ControlStore", SimpleNamespace(**{name: partial(call, getattr(store, name)) for name in names}))


class DisagreementError(ValueError):
    """Ranks were about to run different steps. Nothing was sent.

    Examples:
        >>> from torch.distributed import HashStore
        >>> control = Control(HashStore(), rank=0, ranks=(0,))
        >>> failure = control.record("ranks 0 and 1 run plans of 6 and 8 steps", disagreement=True)
        >>> raise DisagreementError(failure.text)
        Traceback (most recent call last):
            ...
        pipegrid.monitor.control.DisagreementError: ranks 0 and 1 run plans of 6 and 8 steps
    """


@frozen
class Failure:
    """The first failure of the job.

    Attributes:
        rank: the one that failed.
        text: the failure, as that rank recorded it.
        disagreement: whether it is that ranks run different steps.

    Examples:
        >>> Failure(rank=3, text="rank 3, stage 2: the data has ended").disagreement
        False
    """

    rank: int
    text: str
    disagreement: bool = False


@define
class Control:
    """One rank's access to the control store: places, failures and agreement on each step.

    Attributes:
        store: shared by all ranks of the job, and by no other job.
        rank: this rank.
        ranks: all ranks of the job.

    Examples:
        >>> from torch.distributed import HashStore
        >>> control = Control(HashStore(), rank=0, ranks=(0,))
        >>> control.record("the data has ended").rank
        0
    """

    store: ControlStore
    rank: int
    ranks: tuple[int, ...]
    _runs: str = field(default="", init=False)  # what this rank last announced
    _passed: int | None = field(default=None, init=False)  # a step at which no rank looks any more

    def publish(self, position: str, *, last: bool = False) -> None:
        """Publish this rank's place; ``last`` if it goes no further."""
        self.store.set(f"{'last' if last else 'position'}/{self.rank}", json.dumps([position, time.time()]))

    def positions(self, *, seconds: float) -> dict[int, str]:
        """The place of each rank, after waiting up to ``seconds`` for the last entries of all."""
        end = time.monotonic() + seconds
        while not self.store.check([f"last/{rank}" for rank in self.ranks]) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        last = self.read("last")
        silent = self.read("position", [rank for rank in self.ranks if rank not in last])
        places = {rank: str(json.loads(said)[0]) for rank, said in last.items()}
        for rank, said in silent.items():
            text, said_at = json.loads(said)
            # Clocks of several hosts differ, so an age is only worth telling where it is long.
            places[rank] = f"{text} (last heard {max(0.0, time.time() - said_at):.1f} s ago)"
        return {rank: places.get(rank, _UNHEARD) for rank in self.ranks}

    def read(self, what: str, ranks: Sequence[int] | None = None) -> dict[int, bytes]:
        """The values of the keys ``what/rank`` that are there, of all ranks or ``ranks``.

        A few calls, unless many are not there.
        """
        ranks = self.ranks if ranks is None else ranks
        keys = [f"{what}/{rank}" for rank in ranks]
        if keys and self.store.check(keys):
            read: Callable[[list[str]], list[bytes]] | None = getattr(self.store, _READ_ALL, None)
            return dict(zip(ranks, [self.store.get(key) for key in keys] if read is None else read(keys), strict=True))
        half = len(ranks) // 2
        return self.read(what, ranks[:half]) | self.read(what, ranks[half:]) if half else {}

    def record(self, text: str, *, disagreement: bool = False, rank: int | None = None) -> Failure:
        """Record a failure of this rank, or of ``rank``; the first one of the job, which another may have recorded."""
        mine = json.dumps([self.rank if rank is None else rank, text, disagreement])
        return Failure(*json.loads(self.store.compare_set("failure", "", mine)))

    def failure(self) -> Failure | None:
        """The job's first failure, if there is one."""
        return Failure(*json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def announce(self, step: int, what: str) -> bool:
        """Publish what this rank runs as its ``step``-th step; whether the first rank to arrive runs the same.

        Two calls of the store. Where ranks differ, the last one to arrive records who runs what.
        """
        key = f"step/{step}/first"
        same: bool = what == json.loads(self.store.compare_set(key, "", json.dumps([self.rank, what])))[1]
        if not same or what != self._runs:
            self.store.set(f"runs/{self.rank}", json.dumps([step, what]))
        self._runs = what
        come, different = self._come(step, 1 if same else 1 + _DIFFERENT)
        if come == len(self.ranks):
            if different:
                self.record(_difference(step, self._said(step, all_have_come=True)), disagreement=True)
            self._passed = step - 1  # all ranks have arrived at this step
        return same

    def tidy(self) -> None:
        """Delete the keys of the step before, where this rank was the last to arrive at the one that it announced."""
        step, self._passed = self._passed, None
        if step is not None:
            self.store.delete_key(f"step/{step}/first")
            self.store.delete_key(f"step/{step}/count")

    def agree(self, step: int, what: str, *, seconds: float) -> Failure | None:
        """Announce, and wait until all ranks have: the job's first failure, if there is one by then.

        A rank that runs the same as before, and the same as the first rank to arrive, waits for none.

        Raises:
            DisagreementError: a rank did not arrive in time.
        """
        unchanged = what == self._runs
        same = self.announce(step, what)
        self.tidy()
        if same and unchanged:
            return None
        end = time.monotonic() + seconds
        while True:
            come, different = self._come(step, 0)
            failure = self.failure()
            if failure is not None or (come == len(self.ranks) and not different):
                return failure
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS / 10)
        said = self._said(step)
        if different:
            return self.record(_difference(step, said), disagreement=True)
        raise DisagreementError(
            f"rank {self.rank} runs {what} as its step {step}, and waited {seconds:.3g} s for all ranks to say what "
            f"they run; nothing was heard of {listed(rank for rank in self.ranks if rank not in said)}. Call step() "
            "equally often on every rank"
        )

    def _come(self, step: int, amount: int) -> tuple[int, int]:
        """Add to the count of a step: ranks that have arrived, and those of them that differ from the first one."""
        different, come = divmod(self.store.add(f"step/{step}/count", amount), _DIFFERENT)
        return come, different

    def _said(self, step: int, *, all_have_come: bool = False) -> dict[int, str]:
        """The plan of each rank for a step, as announced: not where it is as before and as that of the first rank."""
        first, what = json.loads(self.store.get(f"step/{step}/first"))
        said = {rank: json.loads(value) for rank, value in self.read("runs").items()}
        known = dict.fromkeys(self.ranks if all_have_come else [first], what)
        return dict(sorted((known | {rank: what for rank, (at, what) in said.items() if at == step}).items()))


def _difference(step: int, said: dict[int, str]) -> str:
    table = f"the ranks do not run the same step {step}: {'; '.join(by_text(said))}"
    return f"{table}. Give every rank the same plan, so the same microbatches"


def silent(error: BaseException) -> str:
    """Describe the ``error`` of a store that does not answer."""
    line = " ".join(str(error).split())[:200] or type(error).__name__
    return f"the control store does not answer: it is out of reach, or its process has stopped or ended ({line})"


def where_all_stand(positions: dict[int, str]) -> str:
    """One line for each place, with the ranks that are there.

    Examples:
        >>> print(where_all_stand({0: "stage 0, microbatch 3", 1: "stage 0, microbatch 3", 2: "before its first step"}))
          ranks 0-1: stage 0, microbatch 3
          rank 2: before its first step
    """
    return "\n".join(f"  {line}" for line in by_text(positions))
