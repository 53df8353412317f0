"""A training state at a step: tensors copied to the CPU, and all that is small as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.training.checkpoint.agreement import Held
from pipegrid.training.checkpoint.state import optimizer, random_state
from pipegrid.training.checkpoint.state.names import Slot, TrainingState
from pipegrid.training.checkpoint.state.snapshot import Copies, Snapshot
from pipegrid.training.checkpoint.stored.manifest import GroupEntry
from pipegrid.training.checkpoint.stored.plain import dtype_name, to_plain


@frozen(eq=False, kw_only=True)
class Shot:
    """What one rank saves.

    Attributes:
        snapshot: copies of the tensors.
        random: captured states of random generators.
        seed: torch's initial seed.
        groups: parameter groups of the optimizers.
        values: entries of optimizer states that are no tensors.
        scaler: state of the loss scaler.
        data: the data position.
        settings: the text of the plan, the grids, the layout.
        held: the tensors of the model.
    """

    step: int
    snapshot: Snapshot
    random: dict[str, Any]
    seed: int
    groups: list[GroupEntry]
    values: dict[str, Any]
    scaler: Any
    data: Any
    settings: tuple[str | None, Any, Any]
    held: tuple[Held, ...]


def shoot(state: TrainingState, step: int, copies: Copies, settings: tuple[str | None, Any, Any]) -> Shot:
    """Copy the state of this rank.

    Raises:
        CheckpointError: something of it cannot be stored.
    """
    slots = state.slots()
    tensors = {slot.key: slot.tensor() for slot in slots}
    owners = owners_of(slots)
    values = {}
    for key, value in optimizer.entries(state.optimizers, owners):
        if isinstance(value, Tensor):
            tensors[key] = value
        else:
            values[key] = to_plain(value, key)
    data = state.data.state_dict() if hasattr(state.data, "state_dict") else state.data
    return Shot(
        step=step,
        snapshot=copies.take(tensors),
        random=random_state.capture(device_of(slots)),
        seed=torch.initial_seed(),
        groups=optimizer.groups(state.optimizers, owners),
        values=values,
        scaler=None if state.scaler is None else to_plain(state.scaler.state_dict(), "the state of the loss scaler"),
        data=to_plain(data, "the data position"),
        settings=settings,
        held=held_by(slots),
    )


def owners_of(slots: Sequence[Slot]) -> dict[int, tuple[str, str]]:
    """Module and name of each parameter, by its id."""
    return {id(slot.tensor()): (slot.module, slot.name) for slot in slots if slot.parameter}


def held_by(slots: Sequence[Slot]) -> tuple[Held, ...]:
    """What a rank tells the others of its tensors."""
    return tuple(
        Held(slot.module, slot.name, slot.stage, slot.tied, tuple(tensor.shape), dtype_name(tensor.dtype))
        for slot in slots
        for tensor in (slot.tensor(),)
    )


def stages_of(held: Sequence[Held]) -> tuple[tuple[str, int], ...]:
    """The stages of a rank."""
    return tuple(dict.fromkeys((one.module, one.stage) for one in held))


def device_of(slots: Sequence[Slot]) -> torch.device:
    """The device of a rank: that of its first tensor off the CPU, else the CPU."""
    devices = (slot.tensor().device for slot in slots)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def settings_of(state: TrainingState) -> tuple[str | None, Any, Any]:
    """The text of the plan, the grids and the layout as plain data."""
    return _plan_text(state.plan), _grids(state.grids), _layout(state.layout)


def _plan_text(plan: Any) -> str | None:
    if plan is None or isinstance(plan, str):
        return plan
    from pipegrid.schedules.plan import to_text

    return to_text(plan)


def _grids(grids: Mapping[str, Any] | None) -> Any:
    if grids is None:
        return None
    return {
        name: {"dims": dict(zip(grid.dim_names, grid.shape, strict=True)), "rank_offset": grid.rank_offset}
        for name, grid in grids.items()
    }


def _layout(layout: Any) -> Any:
    if isinstance(layout, Mapping):
        return {module: _layout(one) for module, one in layout.items()}
    return layout if layout is None or isinstance(layout, str) else layout.short_text()
