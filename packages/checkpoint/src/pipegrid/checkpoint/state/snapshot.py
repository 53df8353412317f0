"""The state of a rank at a step: its tensors, copied to the CPU before the next step changes them, and plain data.

The copies live from save to save: a save costs one copy and no allocation. On an accelerator they are pinned, and the
copy is ordered on the current stream before whatever the step does next; the host does not wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.checkpoint.state import optimizers
from pipegrid.checkpoint.state.names import Held, StateTensors, TrainingState, stages_of
from pipegrid.checkpoint.stored import dcp
from pipegrid.checkpoint.stored.manifest import Manifest
from pipegrid.checkpoint.stored.plain import raw_bytes, to_plain
from pipegrid.gradients import foreach
from pipegrid.gradients.dtensors import is_dtensor, local_of
from pipegrid.stages.generators import States, capture

OWN: Final = "generator."  # before the name of a generator of the state, among the states of those of the process


@frozen(eq=False, kw_only=True)
class Snapshot:
    """The part of a checkpoint that one rank saves."""

    boxes: Sequence[dcp.Box]  # this rank's parts of the tensors, and their copies
    events: Sequence[Any]  # end when the copies are complete
    held: tuple[Held, ...]  # the tensors of the model
    random: States
    plan: str | None  # the text of the step's plan
    manifest: Manifest  # of this rank alone, without tensors and files

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self.events:
            event.synchronize()

    def checksums(self) -> dict[str, int]:
        """Checksums by key and offset of what replicas hold alike: parameters and optimizer states, not buffers."""
        buffers = {one.key for one in self.held if not one.parameter}
        return {
            f"the checksum of {item.index.fqn} at {tuple(item.index.offset or ())}": zlib.crc32(raw_bytes(copy))
            for item, copy in self.boxes
            if item.index.fqn not in buffers
        }


class Snapshots:
    """Takes snapshots of one state, each into the memory of the one before; what does not change is read once."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self._plan, self._layout = _plan_text(state.plan), _layout(state.layout)
        self._grids = None if state.grids is None else {name: _grid(grid) for name, grid in state.grids.items()}
        self._model: StateTensors | None = None
        self._tensors: dict[str, Tensor] = {}  # of the snapshot before, by key
        self._boxes: list[dcp.Box] = []

    def take(self, step: int) -> Snapshot:
        """Copy the state; overwrites the snapshot before."""
        state = self.state
        model, values = self._found()
        data = state.data.state_dict() if hasattr(state.data, "state_dict") else state.data
        scaler = None if state.scaler is None else to_plain(state.scaler.state_dict(), "the state of the scaler")
        manifest = Manifest(
            step=step,
            tensors={},
            files={},
            groups=tuple(optimizers.groups(state.optimizers, model.owners)),
            values=values,
            scaler=scaler,
            data=to_plain(data, "the data position"),
            seed=torch.initial_seed(),
            ranks=(stages_of(model.held),),
            grids=self._grids,
            layout=self._layout,
        )
        return Snapshot(
            boxes=self._boxes,
            events=self._copy(),
            held=model.held,
            random=capture(model.device)
            | {f"{OWN}{name}": generator.get_state() for name, generator in state.generators.items()},
            plan=self._plan,
            manifest=manifest,
        )

    def _found(self) -> tuple[StateTensors, dict[str, Any]]:
        """The tensors of the state, and the entries of optimizer states that are no tensors.

        Rebuilt where the objects of the state, or the shapes of its tensors, have changed; after that the boxes are
        those of all its tensors.
        """
        if self._model is not None and self._model.are_of(self.state):
            tensors, values = self._read(self._model)
            if self._fit(tensors):
                self._tensors = tensors
                return self._model, values
        self._model = StateTensors(self.state)
        tensors, values = self._read(self._model)
        if not self._fit(tensors):
            self._boxes = [(item, _room_for(tensors[item.index.fqn])) for item in dcp.items_of(tensors)]
        self._tensors = tensors
        return self._model, values

    def _read(self, model: StateTensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = model.now(), dict[str, Any]()
        for key, value in optimizers.entries(self.state.optimizers, model.owners):
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                values[key] = to_plain(value, key)
        return tensors, values

    def _fit(self, tensors: Mapping[str, Tensor]) -> bool:
        return (
            tensors.keys() == self._tensors.keys()
            and all(_alike(tensor, self._tensors[key]) for key, tensor in tensors.items())
            and all(copy.shape == local_of(tensors[item.index.fqn]).shape for item, copy in self._boxes)
        )

    @torch.no_grad()
    def _copy(self) -> list[Any]:
        """Copy the tensors into the boxes; events that end when all are complete."""
        copies = [copy for _, copy in self._boxes]
        sources = [local_of(self._tensors[item.index.fqn]) for item, _ in self._boxes]
        devices = {source.device for source in sources if not source.is_cpu}
        if not devices:
            foreach.copy_(copies, sources)
        for source, copy in zip(sources, copies, strict=True) if devices else ():
            copy.copy_(source, non_blocking=True)
        events = []
        for device in devices:
            module = torch.get_device_module(device)
            events.append(module.Event())
            events[-1].record(module.current_stream(device))
        return events


def _alike(tensor: Tensor, known: Tensor) -> bool:
    if tensor is known:
        return True
    if is_dtensor(tensor) or is_dtensor(known):
        return False  # the sharding may be another one
    return (tensor.shape, tensor.dtype, tensor.device) == (known.shape, known.dtype, known.device)


def _room_for(tensor: Tensor) -> Tensor:
    local = local_of(tensor)
    return torch.empty(local.shape, dtype=local.dtype, pin_memory=not local.is_cpu)


def _plan_text(plan: Any) -> str | None:
    if plan is None or isinstance(plan, str):
        return plan
    from pipegrid.plans.plan import to_text

    return to_text(plan)


def _grid(grid: Any) -> dict[str, Any]:
    consecutive = isinstance(grid.ranks, range)
    where = {"rank_offset": grid.rank_offset} if consecutive else {"ranks": list(grid.ranks)}
    return {"dims": dict(zip(grid.dim_names, grid.shape, strict=True)), **where}


def _layout(layout: Any) -> Any:
    if isinstance(layout, Mapping):
        return {module: _layout(one) for module, one in layout.items()}
    return layout if layout is None or isinstance(layout, str) else layout.short_text()
