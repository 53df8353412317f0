"""What ranks exchange about a checkpoint: plain data, over a gloo group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import cattrs
import torch.distributed as dist

from pipegrid.topology import GroupSpec, create_groups, destroy_groups
from pipegrid.training.checkpoint.state.names import Held
from pipegrid.training.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from pipegrid.training.gathering import gather_plain

_T = TypeVar("_T")
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, CheckpointMismatchError, CorruptCheckpointError)}


class Job:
    """The ranks that save together, over a gloo group of theirs; a process without a process group is a job of one."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            spec = GroupSpec(dist.get_process_group_ranks(group), "checkpoints", shared=False)
            self.group = create_groups([spec], backend="gloo", timeout=timeout)[spec]
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank, as JSON has them: tuples as lists, attrs objects as dicts."""
        with reached():
            return gather_plain(value, self.group)

    def require_equal(self, outcome: str, values: Mapping[str, Any], hint: str = "") -> None:
        """Raise on every rank unless those that have a value under a name have the same.

        Args:
            outcome: of a difference, the first words of its text.
            values: of this rank, by name.
            hint: the end of the text.
        """
        _require_equal(outcome, self.gather(values), hint)

    def tables(self, outcome: str, held: Sequence[Held]) -> list[tuple[Held, ...]]:
        """What each rank holds; every name is that of one tensor of the whole model, on one stage or tied on several.

        Raises:
            CheckpointMismatchError: names are local to a stage, or shapes differ; on every rank.
        """
        found = [cattrs.structure(table, tuple[Held, ...]) for table in self.gather(held)]
        forms = [
            {
                f"{one.name!r} of module {one.module!r}": (
                    "tied" if one.tied else f"stage {one.stage}",
                    list(one.shape),
                    one.dtype,
                )
                for one in table
            }
            for table in found
        ]
        hint = "; names are those of the whole model: give names=whole_names(...), or ties=..."
        _require_equal(outcome, forms, hint)
        return found

    def together(self, what: str, function: Callable[[], Any]) -> list[Any]:
        """Call ``function`` on every rank; its results, in order of ranks, as `gather` has them.

        Raises:
            CheckpointError: it raised on some rank; the same text on every rank, in the class of the first error.
        """
        result, failed = None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 -- raised below, on all ranks
            failed = error
        outcomes = self.gather((result, None if failed is None else _told(failed)))
        faults = [(rank, *told) for rank, (_, told) in enumerate(outcomes) if told is not None]
        if faults:
            rank, kind, text = faults[0]
            others = [other for other, *_ in faults[1:]]
            also = f" (also ranks {others})" if others else ""
            raise _ERRORS[kind](f"{what}: rank {rank}{also}: {text}") from failed
        return [value for value, _ in outcomes]

    def each(self, what: str, function: Callable[[], _T]) -> _T:
        """What ``function``, called on every rank, returns here; raises as `together`."""
        own: list[_T] = []
        self.together(what, lambda: own.append(function()))
        return own[0]

    def first(self, what: str, function: Callable[[], Any]) -> Any:
        """What ``function`` returns on the first rank, which alone calls it; on every rank."""
        return self.together(what, lambda: function() if self.rank == 0 else None)[0]

    def close(self) -> None:
        """Destroy the group."""
        if self.group is not None:
            destroy_groups([self.group])


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


@contextmanager
def reached(what: str = "") -> Iterator[None]:
    """A rank that is gone, or does not come within the timeout, is an error of the checkpoint; ``what`` begins it."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, CheckpointError)  # else of the process group
        text = str(error) if known else f"a rank of the job is gone, or does not save and load: {error}"
        raise CheckpointError(what + text) from error


def _told(error: Exception) -> tuple[str, str]:
    if isinstance(error, CheckpointError):
        return type(error).__name__, str(error)
    return CheckpointError.__name__, f"{type(error).__name__}: {error}"
