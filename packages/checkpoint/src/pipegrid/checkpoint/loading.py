"""Load a checkpoint: verify every byte, compare names and shapes, and only then fill the state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.job import CheckpointRanks
from pipegrid.checkpoint.saving import PLAN
from pipegrid.checkpoint.state import optimizers
from pipegrid.checkpoint.state.names import StateTensors, TrainingState, stages_of
from pipegrid.checkpoint.state.optimizers import LoadedGroup
from pipegrid.checkpoint.state.snapshot import OWN
from pipegrid.checkpoint.stored import dcp, folder, manifest, reading
from pipegrid.checkpoint.stored.manifest import Manifest
from pipegrid.checkpoint.stored.plain import dtype_of, from_plain
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError, few
from pipegrid.stages.generators import derive, of_tensors, restore, seed_of


@frozen(kw_only=True, eq=False)
class LoadedCheckpoint:
    """The result of a load, besides the state that it filled.

    Attributes:
        step: of the training.
        path: the folder.
        data: the data position.
        plan: the text of the plan of the run that saved it.
        grids: dims and first rank of each grid of that run.
        layout: of its layers.
        same_layout: every rank has the stages that it had; only then random generators go on where they were.
        skipped: newer checkpoints that are corrupt, and why.

    Examples:
        >>> checkpoints = Checkpoints("runs/b")
        >>> checkpoints.save(TrainingState(stages={}), step=7)
        >>> checkpoints.load(TrainingState(stages={})).step
        7
        >>> checkpoints.close()
    """

    step: int
    path: Path
    data: Any
    plan: str | None
    grids: Any
    layout: Any
    same_layout: bool
    skipped: tuple[str, ...]


def load(job: CheckpointRanks, directory: Path, state: TrainingState, step: int | None) -> LoadedCheckpoint | None:
    """Load the checkpoint of ``step``, or the newest valid one, into ``state``; None without one."""
    job.require_equal("nothing is loaded", {"the step": step})
    names = job.first("nothing is loaded", lambda: _names(directory))
    if step is not None:
        there = [one for one, _ in names]
        if step not in there:
            raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has the steps {there}")
        names = [names[there.index(step)]]
    skipped: list[str] = []
    for named, name in names:
        path = directory / name
        try:
            found = verified(job, path, named)
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


def _names(directory: Path) -> list[tuple[int, str]]:
    """The steps and folders of the checkpoints, the newest first."""
    if not directory.is_dir():  # else a run whose file system is gone would begin anew
        raise CheckpointError(f"{directory} was there when it was opened, and is gone: look at its file system")
    return [(one.step, one.path.name) for one in folder.named_in(directory)]


def verified(job: CheckpointRanks, path: Path, step: int) -> Manifest:
    """The manifest of the checkpoint of ``step``, all of whose bytes are as saved; each is read by one rank.

    Else raises CorruptCheckpointError on every rank, with the name of the tensor.
    """

    def verify() -> Manifest:
        found = reading.read(path)
        if found.step != step:  # whole in itself, and another one's
            raise CorruptCheckpointError(
                f"{path / folder.MANIFEST} is of step {found.step}: the folder was renamed, or has another one's files"
            )
        faults = manifest.faults(path, list(manifest.parts(found))[job.rank :: job.size])
        if faults:
            raise CorruptCheckpointError("; ".join(faults[:3]))
        return found

    return job.each(f"{path.name} is not loaded", verify)


def _fill(
    job: CheckpointRanks, state: TrainingState, path: Path, found: Manifest, skipped: tuple[str, ...]
) -> LoadedCheckpoint:
    what = f"{path.name} is not loaded"
    own, groups, plan = job.each(what, lambda: _fitting(state, path, found))
    tables = job.tables(what, own.held)
    held = {one.key for table in tables for one in table}
    unused = [key for key in found.tensors if key.startswith("model/") and key not in held]
    if unused:
        raise CheckpointMismatchError(f"{what}: no rank has the tensors {_some(unused)} of the checkpoint")
    same = tuple(stages_of(table) for table in tables) == found.ranks
    changed = job.gather([text for group in groups for text in group.changed])

    def fill() -> None:
        prefix = f"random/{job.rank}/"
        targets, states = optimizers.prepared(state.optimizers, own.owners, found)
        randoms = {
            key: torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
            for key, entry in found.tensors.items()
            if same and key.startswith(prefix)
        }
        dcp.load(path, found, {**own.now(), **targets, **randoms})
        own.spread()
        for optimizer, parameter, loaded in states:  # one without a saved state has none
            if loaded:
                optimizer.state[parameter] = loaded
            else:
                optimizer.state.pop(parameter, None)
        for group in groups:
            group.group.update(group.options)
        if state.scaler is not None and found.scaler is not None:
            state.scaler.load_state_dict(from_plain(found.scaler))
        data = from_plain(found.data)
        if data is not None and hasattr(state.data, "load_state_dict"):
            state.data.load_state_dict(data)
        if not same:
            derive(found.seed, found.step, job.rank)
            for generator in state.generators.values():
                generator.manual_seed(seed_of(generator.initial_seed(), found.step))
            return
        saved = {key.removeprefix(prefix): value for key, value in randoms.items()}
        restore(of_tensors({kind: value for kind, value in saved.items() if not kind.startswith(OWN)}), own.device)
        for name, generator in state.generators.items():
            if f"{OWN}{name}" in saved:
                generator.set_state(saved[f"{OWN}{name}"])

    job.each(what, fill)
    if job.rank == 0 and (texts := list(dict.fromkeys(text for texts in changed for text in texts))):
        warnings.warn(
            f"{'; '.join(few(texts))}: the checkpoint's are used; to use the script's, set them after the load",
            stacklevel=4,
        )
    return LoadedCheckpoint(
        step=found.step,
        path=path,
        data=from_plain(found.data),
        plan=plan,
        grids=found.grids,
        layout=found.layout,
        same_layout=same,
        skipped=skipped,
    )


def _fitting(state: TrainingState, path: Path, found: Manifest) -> tuple[StateTensors, list[LoadedGroup], str | None]:
    """The tensors and parameter groups of this rank, all of which the checkpoint can fill; the text of its plan."""
    own = StateTensors(state)
    for held in own.held:
        entry = found.tensors.get(held.key)
        stored = None if entry is None else (entry.dtype, list(entry.shape))
        if stored != (held.dtype, list(held.shape)):
            of_module = [key for key in found.tensors if key.startswith(f"model/{held.module}/")]
            there = stored or _some(of_module) or f"the modules {', '.join(found.modules)}"
            raise CheckpointMismatchError(
                f"stage {held.stage} of module {held.module!r} has {held.name!r} as {(held.dtype, list(held.shape))}, "
                f"and the checkpoint has {there}"
            )
    return own, optimizers.loaded_groups(state.optimizers, own.owners, found.groups), _plan(path, found)


def _plan(path: Path, found: Manifest) -> str | None:
    if PLAN not in found.files:
        return None
    with folder.opened(path / PLAN) as file:
        data = file.read(found.files[PLAN].length)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{PLAN}: {error}") from error


def _some(names: Iterable[str]) -> str:
    return ", ".join(few([name.removeprefix("model/") for name in names]))
