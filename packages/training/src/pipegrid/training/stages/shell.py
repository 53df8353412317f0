"""A copy of a model's tree that shares the parts of one stage and replaces all others.

So the model's own forward runs on every stage. The layer before the stage returns what arrived. Layers before that one,
and earlier parts such as the embedding, return NaN in the shape of their results, from which tables (masks, positions,
rotary) are made; the first later part ends the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment, joined
from pipegrid.training.stages.torch_compat import (
    TABLES,
    copied,
    memory_of,
    meta_copy,
    on_meta,
    tree_leaves,
    tree_map_only,
)


class Leave(Exception):  # noqa: N818 -- no error: the own part is done
    """Ends the forward of a stage after its last part."""


@define(eq=False)
class Run:
    """The forward that is running on a stage.

    Attributes:
        received: what the last layer of the stage before returned; None on the first.
        entered: the first part after the embedding has run.
        left: what the last own layer returned.
        encoded: the encoder's output, of a model that has one.
    """

    received: Any = None
    entered: bool = False
    left: Any = None
    encoded: Any = None

    def hidden(self) -> Tensor:
        """The hidden states of what was received."""
        return first_tensor(self.received)

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Hook of the first layer of the model: on a stage without the embedding, it takes what arrived."""
        del layer
        if self.received is None or self.entered:
            return None
        self.entered = True
        if args:
            return (self.hidden(), *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.hidden()}

    def leave(self, layer: nn.Module, args: Any, result: Any) -> None:
        """Hook of the last own layer."""
        del layer, args
        self.left = result

    def encode(self, encoder: nn.Module, args: Any, result: Any) -> None:
        """Hook of the encoder."""
        del encoder, args
        self.encoded = result[0]


def first_tensor(value: Any) -> Tensor:
    """The hidden states of what a layer returned: a tensor, or the first of a tuple."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


class Foreign(nn.Module):
    """A part on another stage: no parameters; attributes are those of the part, with its tensors on the meta device."""

    def __init__(self, name: str, part: nn.Module, run: Run, *, earlier: bool) -> None:
        super().__init__()
        # No submodule: it has no place among the stage's parameters.
        self.__dict__["ghost"] = meta_copy(part, buffers=True)
        self.name, self.run, self.earlier, self.training = name, run, earlier, part.training

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "ghost" not in self.__dict__:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["ghost"], name)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """NaN in place of ``tensor``, in the dtype of the hidden states: the ghost does not know that of FSDP2."""
        hidden = self.run.hidden()
        like = tensor.to(hidden.dtype) if tensor.is_meta and tensor.is_floating_point() else tensor
        return blank(like, hidden.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Foreign:
        """``to(dtype)`` and its like: the ghost takes the dtype, and stays on the meta device."""
        part: nn.Module = self.__dict__["ghost"]
        dtype = next((tensor.dtype for tensor in part.parameters() if tensor.is_floating_point()), None)
        if dtype is not None:
            part.to(fn(torch.empty(0, dtype=dtype)).dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class ForeignLayer(Foreign):
    """A layer on another stage; ``sends``: it is the last before this stage."""

    def __init__(self, name: str, part: nn.Module, run: Run, *, earlier: bool, sends: bool) -> None:
        super().__init__(name, part, run, earlier=earlier)
        self.sends = sends

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stage before has sent, or a stand-in of it; a later layer ends the forward."""
        if self.earlier:
            self.run.entered = True
            return self.run.received if self.sends else tree_map_only(Tensor, self._stand_in, self.run.received)
        if self.run.left is None:  # a stage of the embedding alone
            self.run.left = args[0] if args else next(iter(kwargs.values()))
        raise Leave


class ForeignPart(Foreign):
    """A part beside the layers on another stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN in the shape of the part's result; a later part ends the forward."""
        if not self.earlier:
            if self.run.left is None:
                raise CutError(f"{self.name} runs before the layers; name it in Names(embedding=...)")
            raise Leave
        if self.run.entered:
            raise CutError(f"{self.name} runs after the layers; name it in Names(head=...)")
        with torch.no_grad():
            args, kwargs = tree_map_only(Tensor, on_meta, (args, kwargs))
            made = self.__dict__["ghost"](*args, **kwargs)
        return tree_map_only(Tensor, self._stand_in, made)


def blank(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype that takes no memory; a use of its values shows as NaN."""
    value = math.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def shell_of(model: nn.Module, assignment: Assignment, stage: int, run: Run) -> nn.Module:
    """The model with the parts of ``stage``; own parts are shared with ``model``, which is not changed."""
    shell = _part(model, "", assignment, stage, run)
    _require_no_hidden_parts(model, shell, assignment, stage)
    held = assignment.held(stage)
    if held and held[0] == assignment.layers[0]:
        shell.get_submodule(held[0]).register_forward_pre_hook(run.enter, with_kwargs=True)
    return shell


def _part(part: nn.Module, path: str, assignment: Assignment, stage: int, run: Run) -> nn.Module:
    """``part`` of the model, shared, replaced or copied: a copy holds parts of both kinds."""
    if path in assignment.stage_of_layer:
        owner = assignment.stage_of_layer[path]
        if owner == stage:
            return copied(part)
        sends = assignment.layers[: assignment.before(stage)][-1:] == (path,)
        return ForeignLayer(path, part, run, earlier=owner < stage, sends=sends)
    owners = assignment.owners(path)
    if not assignment.has_layers(path):
        if owners <= {stage}:
            return part  # without parameters (rotary tables, dropout), or all on this stage
        if stage not in owners:
            return ForeignPart(path, part, run, earlier=max(owners) < stage)
    made = copied(part)
    for key, child in part.named_children():
        made.add_module(key, _part(child, joined(path, key), assignment, stage, run))
    for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        if assignment.stage_of_parameter[joined(path, key)] != stage:
            delattr(made, key)
            made.register_buffer(key, blank(parameter, torch.device("cpu")), persistent=False)
    return made


def _require_no_hidden_parts(model: nn.Module, shell: nn.Module, assignment: Assignment, stage: int) -> None:
    """Raise where a plain attribute of a module holds parameters of other stages, which `Foreign` does not replace."""
    named = list(model.named_parameters(remove_duplicate=False))
    own = {id(parameter) for name, parameter in named if assignment.stage_of_parameter[name] == stage}
    foreign = {id(parameter): name for name, parameter in named if id(parameter) not in own}
    memory = {memory_of(parameter): name for name, parameter in named if id(parameter) not in own}

    def hidden(value: Any) -> str | None:
        if isinstance(value, nn.Module):
            names = [foreign.get(id(parameter)) for parameter in value.parameters()]
            return None if None in names or not names else names[0]
        return memory.get(memory_of(value)) if isinstance(value, torch.Tensor) and id(value) not in own else None

    for path, module in shell.named_modules():
        if isinstance(module, Foreign):
            continue
        for key, value in vars(module).items():
            for name in () if key in TABLES else filter(None, map(hidden, tree_leaves(value))):
                raise CutError(
                    f"{joined(path, key)} is a plain attribute that holds {name}, a parameter of another stage; make "
                    "it a parameter or a submodule"
                )
