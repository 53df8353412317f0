"""What replaces the parts of a model that are on other stages, so that the model's own forward runs on every stage.

The layer before the stage returns what arrived. Layers before that one, and earlier parts such as the embedding, return
NaN in the shape of their results, from which tables (masks, positions, rotary) are made; the first later part ends the
forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from pipegrid.training.errors import CutError
from pipegrid.training.stages.torch_compat import on_meta
from pipegrid.training.stages.tree import meta_copy


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
        self.name, self.run, self.earlier = name, run, earlier

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
            return self.run.received if self.sends else mapped(self._stand_in, self.run.received)
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
            made = self.__dict__["ghost"](*mapped(on_meta, args), **mapped(on_meta, kwargs))
        return mapped(self._stand_in, made)


def blank(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype that takes no memory; a use of its values shows as NaN."""
    value = math.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of each of its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return value
