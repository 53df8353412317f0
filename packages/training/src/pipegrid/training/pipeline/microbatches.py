"""A batch cut into microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, checked, shown
from pipegrid.topology import HyperCommGrid, replica_of
from pipegrid.training.pipeline.rows import Rows
from pipegrid.training.stages.slicing.slice_batches import IGNORED
from pipegrid.training.stages.torch_compat import tree_map_only

_NUMBERS = 2  # axes of labels, masks and weights


@frozen(eq=False)
class Microbatch:
    """A part of a batch.

    Attributes:
        inputs: what the forward is called with.
        rows: samples.
        labels: labels that count: all, and without the first of each row. None without labels.
        pattern: what could tell one kind of mean from another: several rows, padding, numbers that differ.
    """

    inputs: Mapping[str, Any]
    rows: int
    labels: tuple[int, int] | None
    pattern: frozenset[str] = frozenset()


@frozen
class Share:
    """A part of each microbatch: ``index`` of ``parts`` equal ones."""

    index: int = 0
    parts: int = 1


def shares(grids: Mapping[str, HyperCommGrid]) -> tuple[int, int, dict[str, Share]]:
    """Which batch this rank reads, of how many that the job reads at a time, and its share of it by module.

    All modules see the same samples. A job reads as many batches at a time as divide the replicas of each module,
    and as each rank has one of; a module with more replicas shares each microbatch among them.
    """
    replicas = {name: replica_of(grid, grid.ranks[0])[1] for name, grid in grids.items()}
    together = next(
        number
        for number in range(math.gcd(*replicas.values()), 0, -1)
        if all(size % number == 0 for size in replicas.values())
        and all(len(_batches_of(rank, grids, replicas, number)) == 1 for grid in grids.values() for rank in grid.ranks)
    )
    own = {name: grid for name, grid in grids.items() if grid.is_current_rank_in_grid()}
    parts = {name: replicas[name] // together for name in own}
    batch = min(_batches_of(dist.get_rank(), grids, replicas, together), default=0)  # of a spare rank any
    return batch, together, {name: Share(replica_of(own[name])[0] % parts[name], parts[name]) for name in own}


def _batches_of(rank: int, grids: Mapping[str, HyperCommGrid], replicas: Mapping[str, int], together: int) -> set[int]:
    """The batches that the modules on ``rank`` read, of ``together``."""
    held = [(grid, replicas[name]) for name, grid in grids.items() if rank in grid.ranks]
    return {replica_of(grid, rank)[0] * together // size for grid, size in held}


def microbatches(
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, count: int | None, size: int | None, rows: Rows
) -> list[Mapping[str, Any]]:
    """``batch`` cut by ``rows`` into ``count`` microbatches, or into those of ``size`` rows.

    ``count`` microbatches differ by one row at most; losses are divided by what they count, not by microbatches. A
    sequence of dicts is a batch that is cut already.

    Raises:
        StepArgumentError: no rows, fewer than microbatches, entries without these rows, or rows that do not divide.
    """
    if isinstance(batch, Mapping):
        return rows.split(batch, _count(rows.number(batch), count, size))
    if isinstance(batch, Sequence) and batch and all(isinstance(each, Mapping) for each in batch):
        return list(batch)
    raise StepArgumentError(f"batch is {shown(batch)}; give a dict of tensors, or a list of one for each microbatch")


def microbatch(part: Mapping[str, Any], share: Share, device: torch.device, by: Rows | None = None) -> Microbatch:
    """The share of a replica, its tensors on ``device``."""
    by = by or Rows()
    inputs = _shared(part, share, by)
    rows = by.number_or_first(inputs)
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    moved = {name: tree_map_only(torch.Tensor, move, value) for name, value in inputs.items()}
    pattern = _pattern(inputs, rows)
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return Microbatch(moved, rows, None, pattern)
    counted = labels != IGNORED
    following = counted[:, 1:] if labels.dim() > 1 else counted
    return Microbatch(moved, rows, (int(counted.sum()), int(following.sum())), pattern)


def _pattern(inputs: Mapping[str, Any], rows: int) -> frozenset[str]:
    """`Microbatch.pattern`: of what has a number, or a few, for each row, such as labels, masks and weights."""
    found = {"rows"} if rows > 1 else set()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and 0 < value.dim() <= _NUMBERS and len(value) == rows and value.numel():
            if bool((value == IGNORED).any()):
                found.add(f"{name} padded")
            if bool((value != value.flatten()[0]).any()):
                found.add(f"{name} varies")
    return frozenset(found)


def signature(parts: Sequence[Mapping[str, Any]]) -> str:
    """All of the microbatches that shapes inside a model may depend on: shapes, dtypes, and plain values.

    Equal texts in a row are written once.
    """
    each = itertools.groupby(map(_form, parts))
    return " ".join(f"{len(list(same))} of {form}" for form, same in each)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_form(each)}' for name, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_form, value))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _count(rows: int, count: int | None, size: int | None) -> int:
    if size is not None:
        if rows % checked(size, Count, "microbatch_size", StepArgumentError):
            raise StepArgumentError(
                f"the batch has {rows} rows, no multiple of microbatch_size={size}; drop the rest "
                "(DataLoader(drop_last=True)), or give num_microbatches"
            )
        return rows // size
    count = rows if count is None else checked(count, Count, "num_microbatches", StepArgumentError)
    if rows < count:
        raise StepArgumentError(f"the batch has {rows} rows for num_microbatches={count}; each has at least one")
    return count


def _shared(part: Mapping[str, Any], share: Share, by: Rows) -> Mapping[str, Any]:
    if share.parts == 1:
        return part
    rows = by.number(part)
    if rows % share.parts:
        raise StepArgumentError(
            f"a microbatch of {rows} rows does not divide among the {share.parts} replicas that read it; give a "
            "multiple"
        )
    return by.split(part, share.parts)[share.index]
