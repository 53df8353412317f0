"""The KV cache of a stage: the keys and values of its own layers between tokens, and the mask."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from pipegrid.training.errors import GenerationError
from pipegrid.training.stages import Assignment
from pipegrid.training.stages.slicing.slices import other_states, require_length


@define(eq=False)
class KVCache:
    """The KV cache of one microbatch on one stage, and what else the next pass needs of the ones before.

    Attributes:
        cache: Hugging Face's, with entries for all layers of the model; only those of the stage are filled.
        whole: the model's tree on the stage.
        new: tokens that are generated at most.
        mask: ``[batch, length]``, 1 where a token counts; None before the first pass.
        flags: arguments of the first pass that are no tensors; further passes have them as well.
    """

    cache: Any
    whole: nn.Module
    new: int
    mask: Tensor | None = None
    flags: dict[str, Any] = field(factory=dict)

    def inputs(self, given: dict[str, Any], batch: int, length: int, device: torch.device) -> dict[str, Any]:
        """The arguments of a forward over ``length`` further tokens: those ``given``, with cache, mask and positions.

        The mask of the first pass is the given one. Positions count tokens, so padding on the left takes none.
        """
        mask = given.get("attention_mask")
        if self.mask is not None:
            mask = torch.cat((self.mask, self.mask.new_ones(batch, length)), dim=1)
        elif mask is None:
            mask = torch.ones(batch, length, dtype=torch.long, device=device)
        elif not mask[:, -1].all():
            row = int(mask[:, -1].argmin())
            raise GenerationError(
                f"row {row} of the prompts is padded on the right, before its next token; pad prompts on the left"
            )
        if self.mask is None:
            require_length(self.whole, mask.shape[1] + self.new - 1, "prompt and new tokens are", GenerationError)
            self.flags = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
        self.mask = mask
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        return {
            "position_ids": positions,
            **self.flags,
            **given,
            "attention_mask": mask,
            "past_key_values": self.cache,
            "use_cache": True,
        }


def cache_of(whole: nn.Module, assignment: Assignment, stage: int) -> Any:
    """Hugging Face's cache for the layers of a stage.

    A model asks the entry of some layer, often the first, how many tokens the cache has; so the entry of a layer on
    another stage, which stays empty, is an own layer's of the same kind (full or sliding), where there is one.
    """
    config = getattr(whole, "config", None)
    if config is None or len(assignment.lists) != 1:
        has = "no config" if config is None else "an encoder and a decoder"
        raise GenerationError(f"{type(whole).__name__} has {has}; generate() runs Hugging Face's decoders")
    can_generate = getattr(whole, "can_generate", None)
    if can_generate is not None and not can_generate():
        raise GenerationError(
            f"{type(whole).__name__} has no next token (its can_generate() is False); cut a ...ForCausalLM"
        )
    if "past_key_values" not in inspect.signature(whole.forward).parameters:
        raise GenerationError(
            f"the forward of {type(whole).__name__} takes no past_key_values; generate() keeps keys and values alone"
        )
    if any(hasattr(module, "get_rope_index") for module in whole.modules()):
        raise GenerationError(
            f"{type(whole).__name__} makes positions of several axes (get_rope_index), and generate() counts tokens; "
            "generate with the whole model, from exported weights"
        )
    states = other_states(whole, assignment.layers, config)
    if states:
        raise GenerationError(
            f"{', '.join(states)} keeps another state than keys and values; generate() keeps those alone"
        )
    from transformers import DynamicCache  # only here is Hugging Face needed

    cache = DynamicCache(config=config)
    own = [number for number, layer in enumerate(assignment.layers) if assignment.stage_of_layer[layer] == stage]
    for number, entry in enumerate(cache.layers):
        alike = next((cache.layers[one] for one in own if type(cache.layers[one]) is type(entry)), None)
        if number not in own and alike is not None:
            cache.layers[number] = alike
    return cache
