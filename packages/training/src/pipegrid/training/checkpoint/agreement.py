"""What must be equal on all ranks before the first byte of a checkpoint is written or read: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from pipegrid.training.errors import CheckpointMismatchError


@frozen
class Held:
    """A tensor of the model on a rank."""

    module: str
    name: str
    stage: int
    tied: bool
    parameter: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return f"model/{self.module}/{self.name}"


def stages_of(held: Iterable[Held]) -> tuple[tuple[str, int], ...]:
    """The stages of a rank."""
    return tuple(dict.fromkeys((one.module, one.stage) for one in held))


def require_equal(outcome: str, of_ranks: Sequence[Mapping[str, Any]], hint: str = "") -> None:
    """Ranks that have a value under the same name have the same value.

    Args:
        outcome: of a difference, the first words of its text.
        of_ranks: the values of each rank, by name.
        hint: the end of the text.
    """
    known: dict[str, tuple[int, Any]] = {}
    for rank, values in enumerate(of_ranks):
        for name, value in values.items():
            first, other = known.setdefault(name, (rank, value))
            if value != other:
                raise CheckpointMismatchError(
                    f"{outcome}: {name} must be equal on all ranks; it is {other!r:.200} on rank {first} and "
                    f"{value!r:.200} on rank {rank}{hint}"
                )


def require_whole_names(outcome: str, tables: Sequence[Iterable[Held]]) -> None:
    """Every name is that of one tensor of the whole model: on one stage, or on several that are tied."""
    forms = [
        {
            f"{held.name!r} of module {held.module!r}": (
                "tied" if held.tied else f"stage {held.stage}",
                list(held.shape),
                held.dtype,
            )
            for held in table
        }
        for table in tables
    ]
    require_equal(outcome, forms, "; names are those of the whole model: give names=whole_names(...), or ties=...")
