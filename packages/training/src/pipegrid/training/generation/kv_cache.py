"""The KV cache of a stage: the keys and values of its own layers between tokens, and the mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from pipegrid.stages import Assignment
from pipegrid.stages.errors import CutError
from pipegrid.stages.slicing.slices import other_states, require_length
from pipegrid.stages.transformers_compat import cache_name, keeps_states, require_known_names
from pipegrid.training.errors import GenerationError


@define(eq=False)
class KVCache:
    """The KV cache of one microbatch on one stage, and what else the next pass needs of the ones before."""

    cache: Any  # Hugging Face's, with entries for all layers of the model; only those of the stage are filled
    argument: str  # of the model's forward, for `cache`
    own: dict[str, Any]  # the entries of the stage's own layers, by the name of the layer
    whole: nn.Module  # the model's tree on the stage
    new: int  # tokens that are generated at most
    others: Sequence[Any]  # of kinds that no layer here has: they count tokens alone, for masks that the model makes
    mask: Tensor | None = None  # [batch, length], 1 where a token counts; None before the first pass
    flags: dict[str, Any] = field(factory=dict)  # arguments of the first pass that are no tensors, for further ones
    _passed: int = field(default=0, init=False)  # tokens of the pass before

    def inputs(self, given: dict[str, Any], batch: int, length: int, device: torch.device) -> dict[str, Any]:
        """The arguments of a forward over ``length`` further tokens: those ``given``, with cache, mask and positions.

        The mask of the first pass is the given one. Positions count tokens, so padding on the left takes none.
        """
        mask = given.get("attention_mask")
        if self.mask is not None:
            if self.own and not any(entry.get_seq_length() for entry in self.own.values()):
                raise GenerationError(
                    f"{next(iter(self.own))} has kept nothing of the prompt in {self.argument}; generate() needs "
                    "layers that keep their keys and values in the cache that the model was called with"
                )
            mask = torch.cat((self.mask, self.mask.new_ones(batch, length)), dim=1)
            for entry in self.others:
                entry.update(*[torch.zeros(1, 1, self._passed, 1, device=device)] * 2)
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
        self.mask, self._passed = mask, length
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        inputs = {"position_ids": positions, **self.flags, **given, "attention_mask": mask}
        return inputs | {self.argument: self.cache, "use_cache": True}


def kv_cache_of(whole: nn.Module, assignment: Assignment, stage: int, new: int) -> KVCache:
    """The KV cache of a stage, for at most ``new`` tokens.

    A model asks the entry of some layer, often the first, how many tokens the cache has; so the entry of a layer on
    another stage, which stays empty, is an own layer's of the same kind (full or sliding), where there is one. Else it
    counts tokens.
    """
    config, kind = getattr(whole, "config", None), type(whole).__name__
    if config is None or len(assignment.lists) != 1:
        has = "no config" if config is None else "an encoder and a decoder"
        raise GenerationError(f"{kind} has {has}; generate() runs Hugging Face's decoders")
    can_generate = getattr(whole, "can_generate", None)
    if can_generate is not None and not can_generate():
        raise GenerationError(f"{kind} has no next token (its can_generate() is False); cut a ...ForCausalLM")
    try:
        argument = cache_name(whole)
        if argument is not None:
            require_known_names()
    except CutError as error:
        raise GenerationError(str(error)) from error
    if argument is None:
        raise GenerationError(
            f"the forward of {kind} takes no past_key_values or cache; generate() keeps keys and values alone"
        )
    if any(hasattr(module, "get_rope_index") for module in whole.modules()):
        raise GenerationError(
            f"{kind} makes positions of several axes (get_rope_index), and generate() counts tokens; "
            "generate with the whole model, from exported weights"
        )
    states = other_states(whole, assignment.layers, config)
    if states:
        raise GenerationError(
            f"{', '.join(states)} keeps another state than keys and values; generate() keeps those alone"
        )
    from transformers import DynamicCache  # only here is Hugging Face needed

    cache = DynamicCache(config=config)
    entries = zip(assignment.layers, cache.layers, strict=False)  # some layers read the entry of an earlier one
    kept = {layer: entry for layer, entry in entries if keeps_states(entry)}
    own = {layer: entry for layer, entry in kept.items() if assignment.stage_of_layer[layer] == stage}
    others: list[Any] = []
    for layer, entry in kept.items():
        alike = next((one for one in own.values() if type(one) is type(entry)), None)
        if alike is None:
            others.append(entry)
        elif layer not in own:
            cache.layers[assignment.layers.index(layer)] = alike
    return KVCache(cache, argument, own, whole, new, others)
