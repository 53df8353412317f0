"""A training state at a step: tensors copied to the CPU, and all that is small as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.training.checkpoint.agreement import Held
from pipegrid.training.checkpoint.state import groups, optimizer, random_state
from pipegrid.training.checkpoint.state.names import Slot, TrainingState, identities
from pipegrid.training.checkpoint.state.snapshot import Copies, Snapshot
from pipegrid.training.checkpoint.stored.manifest import GroupEntry
from pipegrid.training.checkpoint.stored.plain import dtype_name, to_plain


@frozen(eq=False, kw_only=True)
class Shot:
    """What one rank saves.

    Attributes:
        groups: parameter groups of the optimizers.
        values: entries of optimizer states that are no tensors.
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

    def checksums(self) -> dict[str, int]:
        """By key and offset, of all that is equal on replicas: parameters and optimizer states, not buffers."""
        buffers = {f"model/{one.module}/{one.name}" for one in self.held if not one.parameter}
        return {
            f"the checksum of {key} at {offset}": checksum
            for (key, offset), checksum in self.snapshot.checksums().items()
            if key not in buffers
        }


class Inventory:
    """Which tensors a state has, under which names; as read from its modules at one time.

    Attributes:
        owners: module and name of each parameter, by its id.
        device: of the rank: that of its first tensor off the CPU, else the CPU.
    """

    def __init__(self, state: TrainingState) -> None:
        self.slots: list[Slot] = state.slots()
        tensors = [(slot, slot.tensor()) for slot in self.slots]
        self.owners = {id(tensor): (slot.module, slot.name) for slot, tensor in tensors if slot.parameter}
        self.held = tuple(
            Held(
                slot.module,
                slot.name,
                slot.stage,
                slot.tied,
                slot.parameter,
                tuple(tensor.shape),
                dtype_name(tensor.dtype),
            )
            for slot, tensor in tensors
        )
        devices = (tensor.device for _, tensor in tensors)
        self.device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        self._keys = [slot.key for slot in self.slots]
        self._identities = identities(state)

    def holds(self, state: TrainingState) -> bool:
        """Whether the state still has the modules and parameters that were read."""
        return identities(state) == self._identities

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as they are now, by key."""
        return dict(zip(self._keys, [slot.tensor() for slot in self.slots], strict=True))


class Camera:
    """Takes shots of one state, again and again; what does not change is read once."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._settings = _plan_text(state.plan), _grids(state.grids), _layout(state.layout)
        self._inventory: Inventory | None = None
        self._copies = Copies()

    def shoot(self, step: int) -> Shot:
        """Copy the state; overwrites the copies of the shot before."""
        if self._inventory is not None and not self._inventory.holds(self.state):
            self._inventory = None  # a module or a parameter in another's place has other values under the same name
        tensors, values = self._read()
        if self._inventory is None or not self._copies.fit(tensors):
            self._inventory = Inventory(self.state)
            tensors, values = self._read()
        state, inventory = self.state, self._inventory
        data = state.data.state_dict() if hasattr(state.data, "state_dict") else state.data
        return Shot(
            step=step,
            snapshot=self._copies.take(tensors),
            random=random_state.capture(inventory.device),
            seed=torch.initial_seed(),
            groups=groups.groups(state.optimizers, inventory.owners),
            values=values,
            scaler=None if state.scaler is None else to_plain(state.scaler.state_dict(), "the state of the scaler"),
            data=to_plain(data, "the data position"),
            settings=self._settings,
            held=inventory.held,
        )

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self._inventory is None:
            return {}, {}
        tensors, values = self._inventory.tensors(), dict[str, Any]()
        for key, value in optimizer.entries(self.state.optimizers, self._inventory.owners):
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                values[key] = to_plain(value, key)
        return tensors, values


def stages_of(held: Sequence[Held]) -> tuple[tuple[str, int], ...]:
    """The stages of a rank."""
    return tuple(dict.fromkeys((one.module, one.stage) for one in held))


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
