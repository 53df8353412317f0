"""The exchange of plain data among the ranks of a checkpoint, over a gloo group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import cattrs
import torch.distributed as dist

from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.gathering import gather_plain
from pipegrid.checkpoint.state.names import Held
from pipegrid.monitor.collectives import Waiting
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError
from pipegrid.topology import GroupSpec, create_groups, destroy_groups
from pipegrid.topology.bounded_calls import giving_up
from pipegrid.transport.backends.wire import cut_all_connections
from pipegrid.transport.collectives.waiting import host_collectives

if TYPE_CHECKING:
    from pipegrid.monitor.monitor import Monitor

_PAUSE_SECONDS = 0.5  # between two meetings: one that is lost in it is found out that much after the deadline
_T = TypeVar("_T")
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, CheckpointMismatchError, CorruptCheckpointError)}


class CheckpointRanks:
    """The ranks that save together, over a gloo group of theirs; a process without a process group is a job of one.

    ``timeout`` is of a collective, in which all ranks wait for the one that writes longest. ``deadline``: seconds of
    silence after which a rank counts as failed: not arrived, or gone (`calling`). A failure of the ``monitor``'s job
    ends a call.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: timedelta, deadline: float | None, monitor: Monitor | None
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._alive: dist.ProcessGroup | None = None
        self._deadline, self._monitor = deadline, monitor
        self._lost: RuntimeError | None = None
        self._unreached = False  # whether this call has failed by an error that the other ranks do not know of
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(group)
            labels = ("checkpoints",) if deadline is None else ("checkpoints", "checkpoints, who is alive")
            specs = [GroupSpec(ranks, label, shared=False) for label in labels]
            coming = None if deadline is None else timedelta(seconds=deadline)
            with self.reaching("the first save() or load(): "), giving_up(self._failed):
                made = create_groups(specs, backend="gloo", timeout=timeout, creation_timeout=coming)
            self.group = made[specs[0]]
            self._alive = None if deadline is None else made[specs[1]]
            host_collectives.apart.update(made.values())
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @contextmanager
    def calling(self, what: str, *, monitored: bool = True) -> Iterator[None]:
        """Fail the block, which all ranks enter for ``what``, once a rank has been silent for the deadline.

        A thread repeats a collective with those of the other ranks until all have left the block. So a rank may write
        for as long as it takes, and one that has not arrived, has ended or is out of reach holds the others up no
        longer than the deadline: the connections of the group are cut then, which ends all waits of this rank, torch's
        collectives included. A CheckpointError names the silent rank. ``monitored``: the failure of the job ends the
        block as well.
        """
        if self._alive is None or self._deadline is None:
            yield
            return
        left, self._unreached = threading.Event(), False
        waiting = Waiting(self._deadline, self._monitor if monitored else None, what)
        meeting = threading.Thread(target=self._meet, args=(left, waiting), name="checkpoints-alive", daemon=True)
        meeting.start()
        try:
            yield
        except BaseException as error:
            shared = isinstance(error, CheckpointError) and not self._unreached
            lost = self._lost  # before the cut, by which ranks are lost as well
            if not shared:  # the others do not know of it, and would wait for this rank; nor does it wait for them
                for group in self.groups:
                    cut_all_connections(group)
            if lost is not None and isinstance(error, RuntimeError):
                raise CheckpointError(str(lost)) from error
            raise
        finally:
            left.set()
            meeting.join()
        if self._lost is not None:
            raise CheckpointError(str(self._lost)) from self._lost

    def _meet(self, left: threading.Event, waiting: Waiting) -> None:
        assert self._deadline is not None
        try:
            while not all(gather_plain(left.is_set(), self._alive, waiting=waiting)):
                left.wait(min(self._deadline / 3, _PAUSE_SECONDS))
        except RuntimeError as error:
            self._lost = error
            if self.group is not None:
                cut_all_connections(self.group)

    @contextmanager
    def reaching(self, what: str = "") -> Iterator[None]:
        """Raise a rank that is gone, or late, as an error of the checkpoint, whose text begins with ``what``."""
        try:
            yield
        except CheckpointError as error:  # of all ranks
            raise CheckpointError(f"{what}{error}") from error
        except RuntimeError as error:  # of the process group
            self._unreached = True
            gone = f"{what}a rank of the job is gone, or does not save and load: {error}"
            raise CheckpointError(gone) from error

    def _failed(self) -> str:
        return "" if self._monitor is None else self._monitor.failure or ""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank, as JSON has them: tuples as lists, attrs objects as dicts."""
        with self.reaching():
            return gather_plain(value, self.group)

    def require_equal(self, outcome: str, values: Mapping[str, Any], hint: str = "") -> None:
        """Raise on every rank unless those that have a value under a name have the same.

        A text begins with ``outcome`` and ends with ``hint``; ``values`` are of this rank.
        """
        _require_equal(outcome, self.gather(values), hint)

    def tables(self, outcome: str, held: Sequence[Held]) -> list[tuple[Held, ...]]:
        """The `Held` of each rank; every name is that of one tensor of the whole model, on one stage or tied.

        Raises CheckpointMismatchError on every rank where names are local to a stage, or shapes differ.
        """
        found = [cattrs.structure(table, tuple[Held, ...]) for table in self.gather(held)]

        def form(one: Held) -> tuple[str, Any]:
            at = "tied" if one.tied else f"stage {one.stage}"
            return f"{one.name!r} of module {one.module!r}", (at, list(one.shape), one.dtype)

        hint = "; names are those of the whole model: give names=whole_names(...), or ties=..."
        _require_equal(outcome, [dict(map(form, table)) for table in found], hint)
        return found

    def together(self, what: str, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on every rank; its results, in order of ranks, as `gather` has them.

        Where it raised on some rank, raises CheckpointError with one text on all, in the class of the first error.
        """
        result, failed, told = None, None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 -- raised below, on all ranks
            failed, kind = error, type(error).__name__
            known = isinstance(error, CheckpointError)
            told = (kind, str(error)) if known else (CheckpointError.__name__, f"{kind}: {error}")
        outcomes = self.gather((result, told))
        faults = [(rank, *fault) for rank, (_, fault) in enumerate(outcomes) if fault is not None]
        if faults:
            rank, kind, text = faults[0]
            others = [other for other, *_ in faults[1:]]
            also = f" (also ranks {others})" if others else ""
            raise _ERRORS[kind](f"{what}: rank {rank}{also}: {text}") from failed
        return [value for value, _ in outcomes]

    def each(self, what: str, function: Callable[[], _T]) -> _T:
        """Call ``function`` on every rank; its result on this one. Raises as `together`."""
        own: list[_T] = []
        self.together(what, lambda: own.append(function()))
        return own[0]

    def first(self, what: str, function: Callable[[], Any]) -> Any:
        """Call ``function`` on the first rank only; its result, on every rank. Raises as `together`."""
        return self.together(what, lambda: function() if self.rank == 0 else None)[0]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that it has created."""
        return [group for group in (self.group, self._alive) if group is not None]

    def close(self) -> None:
        """Destroy the groups."""
        destroy_groups(self.groups)


def _require_equal(outcome: str, of_ranks: Sequence[Mapping[str, Any]], hint: str) -> None:
    known: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(of_ranks):
        for name, value in values.items():
            first, other = known.setdefault(name, (rank, value))
            if value != other:
                raise CheckpointMismatchError(
                    f"{outcome}: {name} must be equal on all ranks; it is {other!r:.200} on rank {first} and "
                    f"{value!r:.200} on rank {rank}{hint}"
                )
