"""Optimizers under the names of the parameters, for any number of ranks: states, and the options of groups."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, optim

from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.stored.manifest import GroupEntry, Manifest
from pipegrid.checkpoint.stored.plain import dtype_of, from_plain, to_plain
from pipegrid.stages.errors import CheckpointError

Owners = Mapping[int, tuple[str, str]]  # module and name of each parameter, by its id
_TORCH = "torch.optim."
_COMPUTED = {"foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not what
_CYCLED = {"base_momentum", "max_momentum"}  # of a schedule that changes momentum or betas as well


def entries(optimizers: Sequence[Any], owners: Owners) -> Iterator[tuple[str, Any]]:
    """Every entry of the states under its key."""
    for optimizer, _, parameter, (module, name) in _parameters(optimizers, owners):
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer/{module}/{name}/{entry}", value


def _parameters(optimizers: Sequence[Any], owners: Owners) -> Iterator[tuple[Any, Any, Tensor, tuple[str, str]]]:
    """Every parameter, after its optimizer and its group; its module and name."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in _held(group, owners):
                yield optimizer, group, parameter, owner_of(parameter, owners, number)


def _held(group: Mapping[str, Any], owners: Owners) -> list[Tensor]:
    """The parameters of a group. One without elements, and in no stage, only makes an optimizer on a frozen rank."""
    return [parameter for parameter in group["params"] if id(parameter) in owners or parameter.numel()]


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


def kind_of(optimizer: Any) -> str:
    """The class of an optimizer: of a subclass of one of torch the latter, ``torch.optim.AdamW``."""
    cls = type(optimizer)
    bases = (one for one in cls.__mro__ if one.__module__.startswith(_TORCH) and one is not optim.Optimizer)
    base = next(bases, None)
    return f"{cls.__module__}.{cls.__qualname__}" if base is None else f"{_TORCH}{base.__qualname__}"


def groups(optimizers: Sequence[Any], owners: Owners) -> list[GroupEntry]:
    """The parameter groups of this rank."""
    found = []
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            of = f"of group {index} of optimizer {number}"
            plain = {key: to_plain(value, f"option {key!r} {of}") for key, value in group.items() if key != "params"}
            names = tuple(owner_of(parameter, owners, number) for parameter in _held(group, owners))
            found.append(GroupEntry(number, index, plain, names, kind_of(optimizer), dict(_defaults(optimizer))))
    return found


def _defaults(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The options that an optimizer was made with, as far as they are plain data."""
    for option, value in getattr(optimizer, "defaults", {}).items():
        try:
            yield str(option), to_plain(value, str(option))
        except CheckpointError:
            continue


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


@frozen(eq=False)
class LoadedGroup:
    """A parameter group of the state, the options that it is to have, and where the script's own differ."""

    group: dict[str, Any]
    options: dict[str, Any]
    changed: tuple[str, ...]


def loaded_groups(optimizers: Sequence[Any], owners: Owners, saved: Sequence[GroupEntry]) -> list[LoadedGroup]:
    """The saved options of every parameter group: those of its parameters.

    A group without parameters on this rank has those of the saved group in the same place. How a step is computed
    (``foreach``, ``fused``, ``capturable``) stays the script's choice: it depends on the device. Raises
    CheckpointMismatchError where another kind of optimizer has saved them, or parameters of one group have several.
    """
    of_name = {name: group for group in saved for name in group.parameters}
    found = []
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            what = f"group {index} of optimizer {number}"
            names = [owner_of(parameter, owners, number) for parameter in _held(group, owners)]
            entries = []
            for name in names:
                if name not in of_name:
                    raise CheckpointMismatchError(f"{what} has {name[1]}, which no optimizer of the checkpoint had")
                entries.append(of_name[name])
                if of_name[name].options != entries[0].options:
                    raise CheckpointMismatchError(
                        f"{what} has {name[1]}, saved with the options {of_name[name].options}, and {names[0][1]}, "
                        f"saved with {entries[0].options}"
                    )
            entries += [one for one in saved if (one.optimizer, one.index) == (number, index)]
            if not entries:
                continue
            _require_kind(what, optimizer, entries[0])
            options = {
                option: from_plain(value)
                for option, value in entries[0].options.items()
                if not (option in _COMPUTED and option in group)
            }
            found.append(LoadedGroup(group, options, tuple(_changed(what, optimizer, group, entries[0]))))
    return found


def _require_kind(what: str, optimizer: Any, saved: GroupEntry) -> None:
    """Raise where another kind of optimizer has saved its state.

    Adam and AdamW have the same options and states, and are one class with a flag: only the kind tells them apart. A
    class that is not torch's may have moved to another module; its subclass is of its kind.
    """
    actual = kind_of(optimizer)
    bare = {base.__name__ for base in type(optimizer).__mro__ if not base.__module__.startswith(_TORCH)}
    bare.add(actual.rpartition(".")[2])
    if "." in saved.kind and any(kind.startswith(_TORCH) for kind in (saved.kind, actual)):
        alike = saved.kind == actual
    else:  # also of an older checkpoint, which has the name alone or nothing
        alike = saved.kind.rpartition(".")[2] in {"", *bare}
    if not alike:
        raise CheckpointMismatchError(
            f"{what} is of {actual}, and was saved by {saved.kind}, whose state means something else; go on with "
            f"{saved.kind}, or start anew with its weights alone (checkpoint export, load_safetensors)"
        )


def _changed(what: str, optimizer: Any, group: Mapping[str, Any], saved: GroupEntry) -> Iterator[str]:
    """Options that the script has otherwise than the checkpoint, apart from what a schedule changes every step."""
    both = group.keys() & saved.options.keys()
    scheduled = {"momentum", "betas"} if _CYCLED & saved.options.keys() else set()
    compared = sorted(both - _COMPUTED - scheduled - _CYCLED - {"initial_lr", "lr"})
    pairs = {option: (group[option], saved.options[option]) for option in compared}
    made = dict(_defaults(optimizer))
    if {"lr", "initial_lr"} <= both:
        pairs["lr"] = group["initial_lr"], saved.options["initial_lr"]
    elif "lr" in both and "lr" in made and "lr" in saved.defaults:
        pairs["lr"] = made["lr"], saved.defaults["lr"]
    for option, (own, old) in pairs.items():
        ours, theirs = _bare(own), _bare(from_plain(old))
        if not (ours == theirs or repr(ours) == repr(theirs)):  # NaN is equal to itself here
            yield f"{option} of {what} is {ours!r:.80} in the script and {theirs!r:.80} in the checkpoint"


def _bare(value: Any) -> Any:
    """Normalize an option for comparison: a tensor becomes its values, a list a tuple."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value
