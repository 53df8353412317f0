"""Tensors, operations and modules by names of torch that are not public, in one place; a test pins what they do."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import (
    SUPPORTED_NODES,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["TorchDispatchMode", "WeakTensorKeyDictionary", "tree_leaves", "tree_map", "tree_map_only", "without_modes"]

_aten = torch.ops.aten
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})

WeakStorage: Any = reductions.StorageWeakRef


def memory_of(tensor: Tensor) -> Any:
    """A weak reference to the memory of a tensor; equal for views of one memory."""
    return WeakStorage(tensor.untyped_storage())


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of ``tensor``."""
    if tensor.is_meta:
        return tensor
    if tensor.layout is not torch.strided:
        return tensor.to("meta")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def nan_like(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype that takes no memory; a use of its values shows as NaN."""
    value = math.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def called_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on the shapes of its arguments."""
    args, kwargs = tree_map_only(Tensor, on_meta, (args, dict(kwargs)))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)


def by_places(func: Any, args: tuple[Any, ...], values: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments of an index, with places for its masks of which ``values`` gives a tensor (else None)."""
    if func not in _INDEXING:
        return args
    indices: list[Any] = []
    for index in args[1]:
        there = values(index) if is_mask(index) else None
        indices.extend([index] if there is None else there.nonzero(as_tuple=True))
    return (args[0], indices, *args[2:])


def is_mask(index: Any) -> bool:
    """Whether an index is a mask."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on shapes where an argument is on the meta device, and on values where none is.

    What would be made on the meta device is made on ``device``: code asks tensors without values where they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``; a tensor with values to which a shape is written is NaN from there on."""
        kwargs = dict(kwargs or {})
        args = by_places(func, args, lambda mask: None if mask.is_meta else mask)
        if not any(one.is_meta for one in tensors_in((args, kwargs))):
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
                kwargs["device"] = self.device
            return func(*args, **kwargs)
        for one in written_by(func, args, kwargs):
            if not one.is_meta:
                one.fill_(math.nan)  # raises for numbers that code may read
        return called_on_meta(func, args, kwargs)


def num_forward_hooks(module: nn.Module) -> int:
    """The number of forward hooks of a module, which has no public name."""
    return len(module._forward_hooks)  # noqa: SLF001


def extent_of(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def name_of(operation: Any) -> str:
    """An operation's name without its namespace and overload."""
    return str(operation.overloadpacket.__name__)


def makes_memory(operation: Any) -> bool:
    """Whether an operation returns a tensor over memory of its own."""
    if name_of(operation) in ("_unsafe_view", "lift_fresh"):  # their schemas say otherwise
        return False
    returns = operation._schema.returns  # noqa: SLF001 (has no public name)
    return any(each.alias_info is None and "Tensor" in str(each.type) for each in returns)


def written_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that a call writes to."""
    schema = operation._schema.arguments  # noqa: SLF001 (has no public name)
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    written = [each.name for each in schema if each.alias_info is not None and each.alias_info.is_write]
    return [tensor for name in written for tensor in tensors_in(given.get(name))]


def is_random(operation: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def reads_shapes_only(operation: Any) -> bool:
    """Whether the result depends on the shapes of the arguments and on no values."""
    name = name_of(operation)
    return name.endswith("_like") or name.startswith("new_")


def stays(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether an operation is a ``to`` that returns its argument, were that on ``device``."""
    if name_of(operation) != "_to_copy":
        return False
    to = torch.device(kwargs.get("device") or device)
    return to == device and kwargs.get("dtype") in (None, args[0].dtype) and kwargs.get("memory_format") is None


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree in order, each with its place, such as ``['hidden_states'][0]``."""
    leaves: list[tuple[str, Any]] = []
    for path, leaf in tree_flatten_with_path(value, is_leaf=_without_keys)[0]:
        place = "".join(map(str, path))
        if not _without_keys(leaf):
            leaves.append((place, leaf))
            continue
        for key, entry in leaf.items():
            leaves += [(f"{place}[{key!r}]{below}", each) for below, each in named_leaves(entry)]
    return leaves


def _without_keys(value: Any) -> bool:
    """Whether torch has no places for the entries of a mapping: transformers 5.0 registers its outputs so."""
    node = SUPPORTED_NODES.get(type(value))
    return isinstance(value, Mapping) and node is not None and node.flatten_with_keys_fn is None


def mapped_by_place(function: Callable[[str, Any], Any], value: Any) -> Any:
    """A tree with ``function`` of each leaf and its place, as in `named_leaves`."""
    return tree_unflatten([function(place, leaf) for place, leaf in named_leaves(value)], tree_structure(value))


def mappings_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, MutableMapping[Any, Any]]:
    """The arguments of a call that it may fill, such as keys and values for later layers; positional ones by number."""
    named = {**dict(zip(map(str, range(len(args))), args, strict=True)), **kwargs}
    return {name: value for name, value in named.items() if isinstance(value, MutableMapping)}


# ---- Copies of a tree of modules that share its tensors

TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied(part: nn.Module) -> nn.Module:
    """A module with the same parameters, buffers, children and hooks; changes of these do not reach ``part``."""
    made = object.__new__(type(part))  # copy.copy() fails for parametrized modules
    made.__dict__.update(vars(part))
    for name, value in vars(part).items():
        if name in TABLES:
            made.__dict__[name] = dict(value)
        elif name.startswith(_HOOKS):
            made.__dict__[name] = OrderedDict(value)
        elif name == "_non_persistent_buffers_set":
            made.__dict__[name] = set(value)
    return made


def children_of(part: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a module by their keys, also the second of two keys for one module."""
    children = part._modules.items()  # noqa: SLF001 -- named_children leaves it out
    return [(key, child) for key, child in children if child is not None]


def first_parameter(model: nn.Module) -> tuple[dict[str, Any], str] | None:
    """The place of a tree's first parameter, where another may replace it: the table of its module, and its key."""
    tables = (module._parameters for module in model.modules())  # noqa: SLF001 -- has no public name
    return next(((table, key) for table in tables for key, found in table.items() if found is not None), None)


def meta_copy(model: nn.Module, *, buffers: bool) -> nn.Module:
    """A copy of a tree with its parameters on the meta device; what is in two places stays one.

    ``buffers``: those as well; else the copy shares them. A forward of the copy changes neither hooks nor attributes of
    ``model``.
    """
    parts: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}

    def part_of(part: nn.Module) -> nn.Module:
        if id(part) in parts:
            return parts[id(part)]
        parts[id(part)] = copy = copied(part)
        for key, one in part.named_parameters(recurse=False, remove_duplicate=False):
            shape = nn.Parameter(on_meta(one.detach()), one.requires_grad)
            copy.register_parameter(key, parameters.setdefault(id(one), shape))
        for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False) if buffers else ():
            copy.register_buffer(key, on_meta(buffer))
        for key, child in children_of(part):
            copy.add_module(key, part_of(child))
        return copy

    return part_of(model)


def adopt(wrapper: nn.Module, inner: nn.Module) -> None:
    """Parameters, buffers and children of ``inner`` become those of ``wrapper``, under the same names."""
    for name in (*TABLES, "_non_persistent_buffers_set"):
        wrapper.__dict__[name] = vars(inner)[name]
