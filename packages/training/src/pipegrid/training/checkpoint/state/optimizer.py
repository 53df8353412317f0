"""Optimizer states under the names of the parameters, for any number of ranks and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegrid.training.checkpoint.stored.manifest import Manifest
from pipegrid.training.checkpoint.stored.plain import dtype_of, from_plain
from pipegrid.training.errors import CheckpointError

Owners = Mapping[int, tuple[str, str]]
"""Module and name of each parameter, by its id."""


def entries(optimizers: Sequence[Any], owners: Owners) -> Iterator[tuple[str, Any]]:
    """Every entry of the states under its key."""
    for optimizer, _, parameter, (module, name) in _parameters(optimizers, owners):
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer/{module}/{name}/{entry}", value


def _parameters(optimizers: Sequence[Any], owners: Owners) -> Iterator[tuple[Any, Any, Tensor, tuple[str, str]]]:
    """Every parameter, after its optimizer and its group; its module and name."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, group, parameter, owner_of(parameter, owners, number)


def owner_of(parameter: Tensor, owners: Owners, number: int) -> tuple[str, str]:
    """Module and name of a parameter."""
    try:
        return owners[id(parameter)]
    except KeyError:
        raise CheckpointError(
            f"optimizer {number} has a parameter of shape {list(parameter.shape)} that is in no stage of this rank"
        ) from None


def prepared(
    optimizers: Sequence[Any], owners: Owners, manifest: Manifest
) -> tuple[dict[str, Tensor], list[tuple[Any, Tensor, dict[str, Any]]]]:
    """Tensors to load optimizer states into, by key; and the state that each parameter is to have.

    An entry in the shape of its parameter has the parameter's device and sharding; a smaller one is on the CPU, or on
    the device where the group is ``capturable`` or ``fused``, as torch has it.
    """
    stored: dict[tuple[str, str], dict[str, str]] = {}
    for key in (*manifest.tensors, *manifest.values):
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            module, _, rest = rest.partition("/")
            name, _, entry = rest.rpartition("/")
            stored.setdefault((module, name), {})[entry] = key
    targets: dict[str, Tensor] = {}
    states = []
    for optimizer, group, parameter, owner in _parameters(optimizers, owners):
        state: dict[str, Any] = {}
        for entry, key in stored.get(owner, {}).items():
            if key in manifest.values:
                state[entry] = from_plain(manifest.values[key])
            else:
                state[entry] = targets.setdefault(key, _like(parameter, manifest, key, group))
        states.append((optimizer, parameter, state))
    return targets, states


def _like(parameter: Tensor, manifest: Manifest, key: str, group: Mapping[str, Any]) -> Tensor:
    entry = manifest.tensors[key]
    dtype = dtype_of(entry.dtype)
    if tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_device = group.get("capturable") or group.get("fused")
    return torch.empty(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def restore_states(states: Sequence[tuple[Any, Tensor, dict[str, Any]]]) -> None:
    """Give every parameter its loaded state; one without a saved state has none."""
    for optimizer, parameter, state in states:
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)
