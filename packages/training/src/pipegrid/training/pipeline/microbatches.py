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
from pipegrid.stages.slicing.slice_batches import IGNORED
from pipegrid.stages.torch_compat import tree_map_only
from pipegrid.topology import HyperCommGrid, replica_of
from pipegrid.training.pipeline.rows import Rows

_UNLABELLED = (0, 0, 0, 0, 1)  # `counts_of` without labels, after the rows
_NUMBERS = 2  # axes of labels, masks and weights


@frozen(eq=False)
class Microbatch:
    """A part of a batch: ``inputs`` are what the forward is called with; the rest is for the loss."""

    inputs: Mapping[str, Any]
    rows: int = 0
    counts: tuple[int, ...] = ()  # by rule, what a loss may be a mean over (`counts_of`)
    labels: tuple[int, ...] | None = None  # those that count: all, and without the first of each row; None: no labels
    pattern: frozenset[str] = frozenset()  # could tell kinds of means apart: several rows, padding, numbers that differ


@frozen
class Share:
    """A part of each microbatch: ``index`` of ``parts`` equal ones."""

    index: int = 0
    parts: int = 1


def shares(grids: Mapping[str, HyperCommGrid]) -> tuple[int, int, dict[str, Share]]:
    """The number of this rank's batch among those that the job reads at a time, that of these, and its share by module.

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
    sequence of dicts is a batch that is cut already. Rows that are fewer, or do not divide, are a `StepArgumentError`.
    """
    if isinstance(batch, Mapping):
        return rows.split(batch, _count(rows.number(batch), count, size))
    if isinstance(batch, Sequence) and batch and all(isinstance(each, Mapping) for each in batch):
        return list(batch)
    raise StepArgumentError(f"batch is {shown(batch)}; give a dict of tensors, or a list of one for each microbatch")


def microbatch(part: Mapping[str, Any], share: Share, device: torch.device, by: Rows | None = None) -> Microbatch:
    """The share of a replica, its tensors on ``device``."""
    return shared_microbatches([part], [""], share, device, by or Rows(), counts=True)[0]


def shared_microbatches(
    parts: Sequence[Mapping[str, Any]],
    forms: Sequence[str],
    share: Share,
    device: torch.device,
    by: Rows,
    *,
    counts: bool,
) -> list[Microbatch]:
    """The shares of a replica in each part of a step, tensors on ``device``; without ``counts`` the ``inputs`` alone.

    Parts of one form (`form_of`) have equally many rows.
    """
    own = parts if share.parts == 1 else [_shared(part, share, by) for part in parts]
    inputs = []
    for part in own:
        moved = {}
        for name, value in part.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device, non_blocking=True)
            else:
                to_device = partial(torch.Tensor.to, device=device, non_blocking=True)
                moved[name] = tree_map_only(torch.Tensor, to_device, value)
        inputs.append(moved)
    if not counts:
        return [Microbatch(moved) for moved in inputs]
    numbers = {form: by.number_or_first(part) for form, part in dict(zip(forms, own, strict=True)).items()}
    rows = [numbers[form] for form in forms]
    made = []
    for moved, part, number, pattern in zip(inputs, own, rows, _patterns(own, rows), strict=True):
        labels = part.get("labels")
        has_labels = isinstance(labels, torch.Tensor) and labels.dim() > 0
        found = counts_of(part, number) if has_labels else (number, *_UNLABELLED)
        made.append(Microbatch(moved, number, found, found[1:3] if has_labels else None, pattern))
    return made


def counts_of(inputs: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    """Counts that a mean over so many rows may have: rows, labels, following ones, both with padding, microbatches.

    Without labels only rows and microbatches. The host waits for the labels.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or not labels.dim():
        return rows, *_UNLABELLED
    counted = labels != IGNORED
    following = counted[:, 1:] if labels.dim() > 1 else counted
    return rows, int(counted.sum()), int(following.sum()), counted.numel(), following.numel(), 1


def _patterns(parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> list[frozenset[str]]:
    """`Microbatch.pattern` of each: of what has a number, or a few, for each row, such as labels, masks and weights.

    The host asks a device once for all microbatches, of which those of one shape are looked at together.
    """
    found = [{"rows"} if number > 1 else set[str]() for number in rows]
    alike: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    for place, (part, number) in enumerate(zip(parts, rows, strict=True)):
        for name, value in part.items():
            few = isinstance(value, torch.Tensor) and 0 < value.dim() <= _NUMBERS and value.shape[0] == number
            if few and value.numel():
                alike.setdefault((value.dtype, value.device, value.shape), []).append((name, place))
    ends: dict[tuple[Any, ...], list[tuple[list[tuple[str, int]], torch.Tensor]]] = {}  # the least and the largest
    for (dtype, device, _), each in alike.items():
        values = torch.stack([parts[place][name].detach() for name, place in each])
        flat = (torch.view_as_real(values) if values.is_complex() else values).flatten(1)
        ends.setdefault((dtype, device), []).append((each, torch.stack(torch.aminmax(flat, dim=1), dim=1)))
    masks: dict[str, list[int]] = {}  # by name, the microbatches of one row in which it may be one
    for together in ends.values():
        read = iter(torch.cat([pairs for _, pairs in together]).tolist())
        for name, place in [one for each, _ in together for one in each]:
            low, high = next(read)
            entry = parts[place][name]
            ignored = not (low > IGNORED or high < IGNORED) and bool((entry == IGNORED).any())  # also where one is NaN
            if ignored or (entry.dtype == torch.int64 and low < 0 and is_uneven(entry)):  # -1, as many scripts have it
                found[place].add(f"{name} padded")
            if low != high:
                found[place].add(f"{name} varies")
            if rows[place] == 1 and low >= 0 and high <= 1:
                masks.setdefault(name, []).append(place)
    for name, places in masks.items():
        if len(set(torch.stack([parts[place][name].count_nonzero() for place in places]).tolist())) > 1:
            for place in places:
                found[place].add(f"{name} uneven")
    return [frozenset(each) for each in found]


def padding_of(value: torch.Tensor) -> torch.Tensor:
    """Where an entry may have nothing to count: -100, and of class indices the number below zero, if there is one."""
    found = value == IGNORED
    if value.dtype != torch.int64:
        return found
    low = value.min()
    return found | ((value == low) & (low < 0) & (value[value < 0] == low).all())


def is_uneven(value: torch.Tensor) -> bool:
    """Whether rows may count unequally many numbers of an entry: `padding_of` differs, or there is one row with some.

    The host waits for the entry.
    """
    low, high = torch.stack(torch.aminmax(padding_of(value).reshape(len(value), -1).sum(dim=1))).tolist()
    return low != high or (len(value) == 1 and high > 0)


def signature(forms: Sequence[str]) -> str:
    """The forms of a step's microbatches; equal ones in a row are written once."""
    return " ".join(f"{len(list(same))} of {form}" for form, same in itertools.groupby(forms))


def forms_of(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """`form_of` each part; a part of tensors like those of the part before has the same."""
    forms: list[str] = []
    before: list[object] = []
    for part in parts:
        tensors: list[object] = []
        for name, value in part.items():
            tensors += (name, value.dtype, value.shape) if isinstance(value, torch.Tensor) else (name, object())
        forms.append(forms[-1] if forms and tensors == before else form_of(part))
        before = tensors
    return forms


def form_of(value: Any) -> str:
    """All of a microbatch that shapes inside a model may depend on: shapes, dtypes, and plain values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if type(value) is dict or isinstance(value, Mapping):
        entries = []
        for name, each in value.items():  # most are tensors
            form = f"{each.dtype}{list(each.shape)}" if isinstance(each, torch.Tensor) else form_of(each)
            entries.append(f"{name}: {form}")
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(form_of, value))}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__}{list(getattr(value, 'shape', ()))}"


def _count(rows: int, count: int | None, size: int | None) -> int:
    if size is not None:
        if rows % checked(size, Count, "microbatch_size", StepArgumentError):
            raise StepArgumentError(
                f"the batch has {rows} rows, no multiple of microbatch_size={size}; drop the rest "
                "(DataLoader(drop_last=True)), or give num_microbatches"
            )
        return rows // size
    if count is None:
        return rows
    if type(count) is not int or count < 1:
        count = checked(count, Count, "num_microbatches", StepArgumentError)
    if rows < count:
        raise StepArgumentError(f"the batch has {rows} rows for num_microbatches={count}; each has at least one")
    return count


def _shared(part: Mapping[str, Any], share: Share, by: Rows) -> Mapping[str, Any]:
    rows, parts = by.number(part), share.parts
    if rows % parts:
        raise StepArgumentError(
            f"a microbatch of {rows} rows does not divide among the {parts} replicas that read it; give a multiple"
        )
    return by.split(part, parts)[share.index]
