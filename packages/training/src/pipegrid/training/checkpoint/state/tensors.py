"""Which tensors a training state has, under which names of the whole model."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegrid.training.checkpoint.state.names import TrainingState, identities


class StateTensors:
    """The tensors of the model that a state has, as read from its modules at one time.

    Attributes:
        held: each of them, for other ranks.
        owners: module and name of each parameter, by its id.
        device: of the rank: that of its first tensor off the CPU, else the CPU.
    """

    def __init__(self, state: TrainingState) -> None:
        self._slots = state.slots()
        self.held = tuple(slot.held for slot in self._slots)
        tensors = [(slot.held, slot.tensor()) for slot in self._slots]
        self.owners = {id(tensor): (held.module, held.name) for held, tensor in tensors if held.parameter}
        devices = (tensor.device for _, tensor in tensors)
        self.device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        self._identities = identities(state)

    def are_of(self, state: TrainingState) -> bool:
        """Whether ``state`` has the modules and parameters that were read; another one may have the name of each."""
        return identities(state) == self._identities

    def now(self) -> dict[str, Tensor]:
        """The tensors as they are now, by key."""
        return {slot.held.key: slot.tensor() for slot in self._slots}
