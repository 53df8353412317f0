"""Optimizer states and parameter groups under the names of the parameters, for any number of ranks and groups."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from pipegrid.training.checkpoint.stored.manifest import GroupEntry, Manifest
from pipegrid.training.checkpoint.stored.plain import dtype_of, from_plain, to_plain
from pipegrid.training.errors import CheckpointError, CheckpointMismatchError

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


def groups(optimizers: Sequence[Any], owners: Owners) -> list[GroupEntry]:
    """The parameter groups of this rank."""
    return [
        GroupEntry(
            number,
            index,
            {
                option: to_plain(value, f"option {option!r} of group {index} of optimizer {number}")
                for option, value in group.items()
                if option != "params"
            },
            tuple(owner_of(parameter, owners, number) for parameter in group["params"]),
            type(optimizer).__name__,
        )
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    ]


def merged(of_ranks: Sequence[Sequence[GroupEntry]]) -> tuple[GroupEntry, ...]:
    """The groups of all ranks: those with the same place and options become one."""
    found: dict[tuple[int, int, str], tuple[GroupEntry, dict[tuple[str, str], None]]] = {}
    options_of: dict[tuple[str, str], dict[str, Any]] = {}
    for group in itertools.chain.from_iterable(of_ranks):
        place = (group.optimizer, group.index, json.dumps(group.options, sort_keys=True))
        names = found.setdefault(place, (group, {}))[1]
        for name in group.parameters:
            if options_of.setdefault(name, group.options) != group.options:
                raise CheckpointMismatchError(
                    f"two ranks have different options for {name[1]} of module {name[0]!r}: {options_of[name]} and "
                    f"{group.options}"
                )
            names[name] = None
    return tuple(evolve(group, parameters=tuple(names)) for group, names in found.values())


GroupOptions = list[tuple[dict[str, Any], dict[str, Any]]]
"""Parameter groups, each with the options that it was saved with."""


def group_options(optimizers: Sequence[Any], owners: Owners, saved: Sequence[GroupEntry]) -> GroupOptions:
    """The saved options of every parameter group: those of its parameters.

    A group without parameters on this rank has those of the saved group in the same place.
    """
    of_name = {name: group for group in saved for name in group.parameters}
    found: GroupOptions = []
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            names = [owner_of(parameter, owners, number) for parameter in group["params"]]
            entries = []
            for name in names:
                if name not in of_name:
                    raise CheckpointMismatchError(
                        f"group {index} of optimizer {number} has {name[1]}, which no optimizer of the checkpoint had"
                    )
                entries.append(of_name[name])
                _require_kind(f"group {index} of optimizer {number}", optimizer, group, of_name[name])
                if of_name[name].options != entries[0].options:
                    raise CheckpointMismatchError(
                        f"group {index} of optimizer {number} has {name[1]}, saved with the options "
                        f"{of_name[name].options}, and {names[0][1]}, saved with {entries[0].options}"
                    )
            entries += [one for one in saved if (one.optimizer, one.index) == (number, index)]
            options = entries[0].options if entries else {}
            found.append((group, {option: from_plain(value) for option, value in options.items()}))
    return found


def _require_kind(what: str, optimizer: Any, group: Mapping[str, Any], saved: GroupEntry) -> None:
    """Raise where another kind of optimizer has saved its state: another class, whose options differ both ways.

    A newer version of a class, or a scheduler, only adds options; SGD has ``momentum`` where AdamW has ``betas``.
    """
    actual = type(optimizer).__name__
    if saved.kind in {"", actual}:
        return
    own, other = sorted(group.keys() - saved.options.keys() - {"params"}), sorted(saved.options.keys() - group.keys())
    if own and other:
        raise CheckpointMismatchError(
            f"{what} is of {actual}, with {', '.join(own)}; it was saved by {saved.kind}, with {', '.join(other)}; to "
            "start another optimizer, load the weights alone (load_safetensors)"
        )


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
