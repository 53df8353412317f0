"""What must be equal on all ranks before the first byte of a checkpoint is written or read: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def require_equal(outcome: str, what: str, values: Sequence[Any]) -> None:
    """All values are equal.

    Raises:
        CheckpointMismatchError: two differ.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CheckpointMismatchError(
                f"{outcome}: {what} must be equal on all ranks; it is {values[0]!r:.200} on rank 0 and "
                f"{value!r:.200} on rank {rank}"
            )


def require_equal_replicas(outcome: str, sums: Sequence[Mapping[tuple[str, tuple[int, ...]], int]]) -> None:
    """Ranks that hold the same box of a tensor hold the same values.

    Args:
        outcome: of a failure, the first words of its text.
        sums: of each rank the checksums of its boxes.

    Raises:
        CheckpointMismatchError: two hold different ones: copies that have drifted apart, or plain tensors that are
            shards of one.
    """
    known: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for rank, of_rank in enumerate(sums):
        for box, checksum in of_rank.items():
            other, first = known.setdefault(box, (rank, checksum))
            if checksum != first:
                raise CheckpointMismatchError(
                    f"{outcome}: ranks {other} and {rank} hold different values of {box[0]}, of which one is "
                    "stored. Copies must be equal, and a shard of a tensor must be a DTensor; "
                    "Checkpoints(replicas='first') stores the copy of the lowest rank"
                )


def require_whole_names(outcome: str, tables: Sequence[Sequence[Held]]) -> None:
    """Every name is that of one tensor of the whole model: on one stage, or on several that are tied.

    Args:
        outcome: of a failure, the first words of its text.
        tables: what each rank holds.

    Raises:
        CheckpointMismatchError: two stages of a module have a tensor with the same name, which is then local to each;
            or two ranks have different shapes or types of one tensor.
    """
    known: dict[tuple[str, str], tuple[int, Held]] = {}
    for rank, table in enumerate(tables):
        for held in table:
            other_rank, other = known.setdefault((held.module, held.name), (rank, held))
            if held.stage != other.stage and not (held.tied and other.tied):
                raise CheckpointMismatchError(
                    f"{outcome}: module {held.module!r}: stage {other.stage} on rank {other_rank} and stage "
                    f"{held.stage} on rank {rank} both have {held.name!r}, so the name is local to a stage. A "
                    "checkpoint has names of the whole model: give names=whole_names(...), or "
                    "ties=... where it is one parameter"
                )
            if (held.shape, held.dtype) != (other.shape, other.dtype):
                raise CheckpointMismatchError(
                    f"{outcome}: module {held.module!r}: {held.name!r} has shape {list(other.shape)} and dtype "
                    f"{other.dtype} on rank {other_rank}, and {list(held.shape)} and {held.dtype} on rank {rank}"
                )
