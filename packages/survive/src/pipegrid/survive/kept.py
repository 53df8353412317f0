"""The state kept before a function, so that it can run again: gradients, buffers, loss scales, random generators.

Parameters are not kept: only the optimizer changes them, between two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pipegrid.gradients.dtensors import local_of
from pipegrid.gradients.layout import TieMark
from pipegrid.gradients.loss_scale import LossScale
from pipegrid.gradients.loss_scaler import LossScaler
from pipegrid.gradients.main_grad import Modules, named_modules, parameters_of
from pipegrid.schedules.megatron.config import config_owner, option
from pipegrid.stages.generators import States, capture, restore
from pipegrid.survive.errors import SurviveError

_PLACES = ("grad", "main_grad")


_Kept = tuple[torch.nn.Parameter | torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]
"""A gradient of a parameter or a buffer of a module: where it is, the tensor there, and a copy of what that held."""


class KeptState:
    """The state of ``modules`` at the last `keep`, of their loss scalers, and of this process's random generators.

    A gradient that is None costs nothing (``zero_grad(set_to_none=True)``, torch's default); one that is a tensor is
    copied, and so is every buffer, such as the running statistics of a batch norm. A buffer that a forward replaces by
    another tensor is put back.

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 4)
        >>> kept = KeptState(stage)
        >>> kept.keep()
        >>> kept.restore()
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._gradients: list[_Kept] = []
        self._seen: list[tuple[torch.nn.Parameter, str, torch.Tensor | None, int]] = []
        self._buffers: list[_Kept] = []  # in every run: torch's count of writes leaves out those of a batch norm
        self._sums: list[tuple[TieMark, bool]] = []
        self._scales: list[tuple[LossScaler, LossScale, int]] = []
        self._states: States = {}

    @torch.no_grad()
    def keep(self, *, gradients: bool = True) -> None:
        """Keep the state as it is now; without ``gradients``, `restore` leaves those alone: see `require_unwritten`."""
        parameters = [parameter for _, parameter in parameters_of(self._modules)]
        held = [(parameter, place) for parameter in parameters for place in _PLACES if hasattr(parameter, place)]
        self._gradients = [_kept(*each) for each in held] if gradients else []
        self._seen = [] if gradients else [(*each, *_writes(*each)) for each in held]
        marks: list[Any] = [getattr(parameter, "tied", None) for parameter in parameters]
        self._sums = [(mark, mark.summed) for mark in marks if isinstance(mark, TieMark)]
        configs = [getattr(config_owner(stage), "config", None) for _, stage in named_modules(self._modules)]
        scalers = {id(scaler): scaler for scaler in (option(config, "grad_scale_func") for config in configs)}
        self._scales = [(one, one.state, one.skipped) for one in scalers.values() if isinstance(one, LossScaler)]
        values = {id(tensor): value for _, _, tensor, value in self._buffers}
        self._buffers = [
            _kept(module, name, values.get(id(buffer)))
            for _, stage in named_modules(self._modules)
            for module, name, buffer in _buffers_of(stage)
        ]
        self._states = capture()

    def require_unwritten(self, key: str) -> None:
        """Raise where gradients are others than at the last `keep`, which was without them.

        Raises:
            SurviveError: the function of ``key`` has written one, or put another tensor in its place.
        """
        for parameter, place, tensor, writes in self._seen:
            found, count = _writes(parameter, place)
            if found is not tensor or count != writes:
                raise SurviveError(
                    f"the function of {key!r} has changed the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} with keep_gradients=False, so it could not run again: leave that "
                    "out, or change gradients after it"
                )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore what the last `keep` kept."""
        for holder, place, tensor, value in (*self._gradients, *self._buffers):
            if tensor is not None and value is not None:
                local_of(tensor).copy_(value)
            setattr(holder, place, tensor)
        for mark, summed in self._sums:
            mark.summed = summed
        for scaler, state, skipped in self._scales:
            scaler.state, scaler.skipped = state, skipped
        restore(self._states)

    def drop(self) -> None:
        """Free the copies of gradients; the memory of those of buffers serves the next `keep`."""
        self._gradients.clear()


def _kept(holder: Any, place: str, into: torch.Tensor | None = None) -> _Kept:
    """What is in ``place``, with its copy in the memory of the copy before where that fits."""
    tensor: torch.Tensor | None = getattr(holder, place)
    if tensor is None:
        return holder, place, None, None
    held = local_of(tensor.detach())
    if into is None or (into.shape, into.dtype, into.device) != (held.shape, held.dtype, held.device):
        return holder, place, tensor, held.clone()
    return holder, place, tensor, into.copy_(held)


def _writes(parameter: torch.nn.Parameter, place: str) -> tuple[torch.Tensor | None, int]:
    """The tensor there, and the number of writes to it; those through ``.data`` are not counted."""
    tensor: torch.Tensor | None = getattr(parameter, place, None)
    return tensor, 0 if tensor is None else local_of(tensor)._version  # noqa: SLF001 -- the documented way to ask


def _buffers_of(stage: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor | None]]:
    for module in stage.modules():
        for name, buffer in module._buffers.items():  # noqa: SLF001 -- torch has no list with entries that are None
            yield module, name, buffer
