"""Load a checkpoint: verify every byte, compare names and shapes, and only then fill the state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from pipegrid.training.checkpoint import agreement
from pipegrid.training.checkpoint.job import Job
from pipegrid.training.checkpoint.saving import PLAN
from pipegrid.training.checkpoint.state import optimizer, random_state
from pipegrid.training.checkpoint.state.names import TrainingState
from pipegrid.training.checkpoint.state.shot import Inventory, stages_of
from pipegrid.training.checkpoint.stored import dcp, folder, manifest
from pipegrid.training.checkpoint.stored.manifest import Manifest
from pipegrid.training.checkpoint.stored.plain import dtype_of, from_plain
from pipegrid.training.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError


@frozen(kw_only=True, eq=False)
class LoadedCheckpoint:
    """What a load found, besides what it filled.

    Attributes:
        step: of the training.
        path: the folder.
        data: the data position.
        plan: the text of the plan of the run that saved it.
        grids: dims and first rank of each grid of that run.
        layout: of its layers.
        same_layout: every rank has the stages that it had; only then random generators go on where they were.
        skipped: newer checkpoints that are corrupt, and why.
    """

    step: int
    path: Path
    data: Any
    plan: str | None
    grids: Any
    layout: Any
    same_layout: bool
    skipped: tuple[str, ...]


def load(job: Job, directory: Path, state: TrainingState, step: int | None) -> LoadedCheckpoint | None:
    """As `Checkpoints.load`."""
    agreement.require_equal("nothing is loaded", job.gather({"the step": step}))
    names = job.first("nothing is loaded", lambda: [(one.step, one.path.name) for one in folder.saved_in(directory)])
    if step is not None:
        there = [one for one, _ in names]
        if step not in there:
            raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has the steps {there}")
        names = [names[there.index(step)]]
    skipped: list[str] = []
    for _, name in names:
        path = directory / name
        try:
            found = verified(job, path)
        except CorruptCheckpointError as error:
            if step is not None:
                raise
            skipped.append(str(error))
            continue
        loaded = _fill(job, state, path, found, tuple(skipped))
        for text in skipped if job.rank == 0 else ():  # last: a filter may make it an error, on this rank alone
            warnings.warn(f"skipped: {text}", stacklevel=3)
        return loaded
    if skipped:
        raise CorruptCheckpointError(f"{directory} has no good checkpoint: {'; '.join(skipped)}")
    return None


def verified(job: Job, path: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose bytes are as saved; each is read by one rank.

    Raises:
        CorruptCheckpointError: some are not; on every rank, with the name of the tensor.
    """

    def verify() -> Manifest:
        found = manifest.read(path)
        faults = manifest.faults(path, list(manifest.parts(found))[job.rank :: job.size])
        if faults:
            raise CorruptCheckpointError("; ".join(faults[:3]))
        return found

    return job.together(f"{path.name} is not loaded", verify)[job.rank]


def _fill(job: Job, state: TrainingState, path: Path, found: Manifest, skipped: tuple[str, ...]) -> LoadedCheckpoint:
    what = f"{path.name} is not loaded"
    made: list[tuple[Inventory, optimizer.GroupOptions]] = []
    job.together(what, lambda: made.append(_fitting(state, found)))
    inventory, options = made[0]
    tables = job.gather(inventory.held)
    agreement.require_whole_names(what, tables)
    held = {f"model/{one.module}/{one.name}" for table in tables for one in table}
    unused = [key for key in found.tensors if key.startswith("model/") and key not in held]
    if unused:
        raise CheckpointMismatchError(f"{what}: no rank has the tensors {_some(unused)} of the checkpoint")
    owners = inventory.owners
    targets, states = optimizer.prepared(state.optimizers, owners, found)
    same = tuple(stages_of(table) for table in tables) == found.ranks
    own = f"random/{job.rank}/"
    randoms = {
        key: torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        for key, entry in found.tensors.items()
        if same and key.startswith(own)
    }
    with torch.no_grad():
        dcp.load(path, {**inventory.tensors(), **targets, **randoms}, job.group)
    optimizer.restore_states(states)
    for group, saved in options:
        group.update(saved)
    if state.scaler is not None and found.scaler is not None:
        state.scaler.load_state_dict(from_plain(found.scaler))
    data = from_plain(found.data)
    if data is not None and hasattr(state.data, "load_state_dict"):
        state.data.load_state_dict(data)
    if same:
        random_state.restore({key.removeprefix(own): state for key, state in randoms.items()}, inventory.device)
    else:
        random_state.derive(found.seed, found.step, job.rank)
    return LoadedCheckpoint(
        step=found.step,
        path=path,
        data=data,
        plan=(path / PLAN).read_text(encoding="utf-8") if PLAN in found.files else None,
        grids=found.grids,
        layout=found.layout,
        same_layout=same,
        skipped=skipped,
    )


def _fitting(state: TrainingState, found: Manifest) -> tuple[Inventory, optimizer.GroupOptions]:
    """What the state has, all of which the checkpoint can fill, and the options of its parameter groups."""
    inventory = Inventory(state)
    for held in inventory.held:
        entry = found.tensors.get(f"model/{held.module}/{held.name}")
        stored = None if entry is None else (entry.dtype, list(entry.shape))
        if stored != (held.dtype, list(held.shape)):
            of_module = [key for key in found.tensors if key.startswith(f"model/{held.module}/")]
            there = stored or _some(of_module) or f"the modules {', '.join(found.modules)}"
            raise CheckpointMismatchError(
                f"stage {held.stage} of module {held.module!r} has {held.name!r} as {(held.dtype, list(held.shape))}, "
                f"and the checkpoint has {there}"
            )
    return inventory, optimizer.group_options(state.optimizers, inventory.owners, found.groups)


def _some(names: Iterable[str]) -> str:
    listed = [name.removeprefix("model/") for name in names]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} others" if len(listed) > 3 else "")
