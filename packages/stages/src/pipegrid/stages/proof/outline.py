"""A whole model without values, and its cut: what a forward is traced on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.stages.assignment import Assignment, is_container, joined
from pipegrid.stages.calls import accepted_by
from pipegrid.stages.errors import CutError

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


@frozen(eq=False, slots=False)
class Outline:
    """A model with its parameters on the meta device, over stages."""

    model: nn.Module  # made by `meta_copy`
    assignment: Assignment  # of its layers and parameters
    layout: str  # in its short form

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The outermost submodules beside the layers that belong to one stage, by their dotted names."""
        return tuple(_parts(self.model, "", self.assignment))

    @cached_property
    def first_names(self) -> dict[str, str]:
        """The first of a parameter's names, by each of them."""
        named = list(self.model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        return {name: first.setdefault(id(one), name) for name, one in named}

    @cached_property
    def encoder(self) -> tuple[str, int] | None:
        """The dotted name of the encoder and its number of layers, of a model that takes what that has returned."""
        if len(self.assignment.lists) < 2 or "encoder_outputs" not in accepted_by(self.model):
            return None
        encoder = self.model.get_encoder()  # type: ignore[operator]
        name = next(name for name, module in self.model.named_modules() if module is encoder)
        return name, len(self.assignment.lists[0])

    def cast(self, function: Callable[[Tensor], Tensor]) -> None:
        """Follow a change of the stages' dtypes; the outline stays without memory."""

        def dtype(tensor: Tensor) -> torch.dtype:
            return function(torch.empty(0, dtype=tensor.dtype)).dtype

        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype(parameter))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(dtype(buffer)))  # the model's own buffer stays

    def take_modes(self, stage: nn.Module) -> None:
        """Train or evaluate each module as ``stage`` does; those of others as made, unless all has changed."""
        own = dict(stage.named_modules())
        changed = stage.training != self._made[""]
        for name, module in self.model.named_modules():
            known = stage.training if changed else self._made[name]
            module.training = own[name].training if name in own else known

    @cached_property
    def _made(self) -> dict[str, bool]:
        return {name: module.training for name, module in self.model.named_modules()}

    def require_no_layerdrop(self) -> None:
        """Raise where a model in training leaves out layers at random."""
        config = getattr(self.model, "config", None)
        nested = [value for value in vars(config).values() if hasattr(value, "to_dict")] if config is not None else []
        for name in _DROPS:
            if self.model.training and any(getattr(each, name, 0) for each in (config, *nested)):
                raise CutError(
                    f"{name} of {type(config).__name__} is above 0, and stages do not agree on the layers that they "
                    "leave out; set it to 0"
                )

    def asked(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """The outputs that a Hugging Face model is asked for, by its config or the call."""
        found = getattr(self.model, "config", None)
        config = vars(found) if hasattr(found, "to_dict") else {}
        every = {**config, **kwargs}
        return tuple(f"{name}=True" for name, value in every.items() if name.startswith("output_") and value)


def _parts(part: nn.Module, path: str, assignment: Assignment) -> Iterator[str]:
    if path in assignment.stage_of_layer:
        return
    owners = assignment.owners(path)
    if not assignment.has_layers(path) and len(owners) <= 1 and not is_container(part):
        if owners:
            yield path
        return
    for key, child in part.named_children():
        yield from _parts(child, joined(path, key), assignment)
