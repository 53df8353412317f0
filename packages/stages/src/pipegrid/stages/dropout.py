"""Dropout masks that do not depend on the cut.

The generator is seeded before the embedding, before each layer and after the last one. Each seed is the one before with
another number of the layer: inside a checkpointed region, which runs again with the generator as it was, seeds are
those of the checkpointed microbatch.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from attrs import define, field
from torch import nn

from pipegrid.core.fields import Index, checked_fields
from pipegrid.stages.errors import CutError
from pipegrid.stages.generators import States, capture_torch, restore
from pipegrid.stages.names import Names, find_names, layers_of
from pipegrid.stages.stage import Stage

_LAYERS_BITS = 16


@define(eq=False, field_transformer=checked_fields(CutError))
class DropoutMasks:
    """The masks of one process, on any stage: by seed, step, replica, microbatch and layer.

        masks = DropoutMasks(seed=1, lane=groups.dp.rank())
        masks.apply(stage)  # every stage of this rank; or a whole model in one process
        for masks.step in range(steps): ...

    Ranks of one tensor-parallel group draw the same masks.

    Attributes:
        seed: of the job.
        lane: the replica of this rank. A microbatch that has moved here from another replica has the masks of its home.
        step: counted by the script.
        microbatch: of a whole model, counted by the script; a stage has it from the step functions.

    Examples:
        >>> masks = DropoutMasks(seed=1, lane=0)
        >>> masks.step = 3
    """

    seed: Index
    lane: Index = 0
    step: Index = 0
    microbatch: Index = 0
    _states: list[States] = field(factory=list, init=False, repr=False)

    def apply(self, model: nn.Module, *, names: Names | None = None) -> None:
        """Seed the forwards of a stage of `pipeline_stage`, or of a model with one list of layers (in ``names``)."""
        if isinstance(model, Stage):
            before, layers = model.assignment.before(model.number), model.layers
        else:
            lists = find_names(model, names).layers.values()
            if len(lists) != 1:
                raise CutError(f"{type(model).__name__} has {len(lists)} lists of layers; masks are those of one")
            before, layers = 0, layers_of(model, next(iter(lists)))
        model.current_replica = None  # type: ignore[assignment]  # set by the step functions
        for number, layer in enumerate(layers, start=before + 1):
            model.get_submodule(layer).register_forward_pre_hook(_seeding(number))
        if layers:
            model.get_submodule(layers[-1]).register_forward_hook(_seeding(before + len(layers) + 1))
        model.register_forward_pre_hook(self._begin)
        if before and not layers:  # a head alone
            model.register_forward_pre_hook(_seeding(before + 1))
        model.register_forward_hook(self._end, always_call=True)

    def base(self, microbatch: int, replica: int | None = None) -> int:
        """The seed of a microbatch of ``replica`` (None: this rank's), without the layer."""
        text = f"{self.seed} {self.step} {self.lane if replica is None else replica} {microbatch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big") << _LAYERS_BITS

    def _begin(self, model: nn.Module, _: Any) -> None:
        self._states.append(capture_torch())
        if getattr(model, "current_slice", None) is not None:
            raise CutError("DropoutMasks draws the masks of whole microbatches; leave it out where slices run")
        microbatch = model.current_microbatch if isinstance(model, Stage) else self.microbatch
        torch.manual_seed(self.base(microbatch, getattr(model, "current_replica", None)))

    def _end(self, *_: Any) -> None:
        restore(self._states.pop())  # the script's own


def _seeding(number: int) -> Any:
    """A hook that seeds what comes after it: layer ``number`` (from 1), or what is behind the layers."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def seed(*_: Any) -> None:
        torch.manual_seed((torch.initial_seed() >> _LAYERS_BITS << _LAYERS_BITS) | number)

    return seed
