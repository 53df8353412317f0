"""A Hugging Face model over slices of a sequence: its cache is what the slices of a microbatch keep for each other.

A slice runs as further tokens of a text do: positions begin after the earlier slices, and attention gets their keys and
values out of the cache. Unlike in generation they belong to the graph of their own slice, to which
`pipegrid.schedules.Slice` returns the gradients of all later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegrid.autograd import compiled_modules
from pipegrid.stages.assignment import Assignment
from pipegrid.stages.errors import CutError
from pipegrid.stages.transformers_compat import cache_name, require_known_names

if TYPE_CHECKING:
    from pipegrid.stages.slicing.slice_cache import SequenceSlice

# Arguments whose values for a token do not depend on later tokens.
_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
_LABELS = ("shift_labels", "num_items_in_batch")
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT = frozenset({"moe", "mlp"})  # kinds of layers that keep nothing


def forward_of_slice(
    whole: nn.Module,
    assignment: Assignment,
    number: int,
    part: SequenceSlice,
    cache_argument: str,
    tokens: Tensor,
    given: Mapping[str, Any],
    forward: Callable[[dict[str, Any]], Any],
) -> Any:
    """Run ``forward`` on the slice ``part``, with the cache of the microbatch among its arguments ``given``.

    ``number`` is that of the stage of the model ``whole``, ``cache_argument`` that of `cache_name`; ``tokens`` are the
    ids or hidden states of the slice.
    """
    given = {name: value for name, value in given.items() if value is not None}
    unknown = given.keys() - {*_INPUTS, *_LABELS}
    if unknown:  # labels too: the model would shift them inside of the slice, and lose that of its last token
        raise CutError(
            f"{', '.join(sorted(unknown))} was given for a slice; slices take {', '.join((*_INPUTS, *_LABELS))}, as "
            "sequence_slices makes them of a batch"
        )
    if "position_ids" in given and "attention_mask" not in given:
        raise CutError(
            "position_ids without attention_mask was given for a slice: Hugging Face reads the bounds of packed "
            "samples out of it for a whole sequence only"
        )
    if "attention_mask" in given and given["attention_mask"].ndim != 2:
        raise CutError(f"attention_mask has {given['attention_mask'].ndim} axes; that of a slice is [samples, tokens]")
    loss = {name: given.pop(name) for name in _LABELS if name in given}
    own = [n for n, layer in enumerate(assignment.layers) if assignment.stage_of_layer[layer] == number]
    past = sum(len(each) for each in part.past("tokens"))
    require_length(whole, past + tokens.shape[1], "slices reach", CutError)
    part.keep("tokens", torch.empty(tokens.shape[1], device="meta"))
    if "attention_mask" in given:
        given["attention_mask"] = part.extend("attention_mask", given["attention_mask"], dim=1)
    from pipegrid.stages.slicing.slice_cache import SliceCache  # only here is Hugging Face needed

    cache = SliceCache(part, len(assignment.layers), past)
    result = forward({**given, cache_argument: cache, "use_cache": True})
    missed = [assignment.layers[n] for n in own if n not in cache.read]
    if missed:
        raise CutError(
            f"{missed[0]} has not read the keys and values of earlier slices: it keeps another kind of state, or is "
            "checkpointed such that transformers drops the cache (torch.utils.checkpoint does not)"
        )
    if loss and number == assignment.num_stages - 1:
        result.loss = _loss(whole, result, **loss)
    return result


def _loss(whole: nn.Module, result: Any, *, shift_labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """The model's own loss: the sum over the slice, by ``num_items_in_batch``."""
    logits = result.logits
    loss: Tensor = whole.loss_function(  # type: ignore[operator]
        logits=logits,
        labels=None,
        vocab_size=logits.shape[-1],
        num_items_in_batch=num_items_in_batch,
        shift_labels=shift_labels.contiguous(),
    )
    return loss


def require_slices(stage: nn.Module, whole: nn.Module, assignment: Assignment) -> str:
    """The argument for the cache of ``whole``; raise unless a stage's attention can be a decoder's in slices."""
    config = getattr(whole, "config", None)
    decoder = config is not None and not getattr(config, "is_encoder_decoder", False)
    argument = cache_name(whole) if decoder else None
    if argument is not None:
        require_known_names()
    both_ways = [path for path, module in stage.named_modules() if getattr(module, "is_causal", True) is False]
    if getattr(config, "use_bidirectional_attention", None):
        both_ways.append("the model")
    compiled = compiled_modules(stage)
    states = other_states(stage, assignment.layers, config)
    faults = {
        "its forward takes no past_key_values or cache of one list of layers": argument is None,
        f"{', '.join(both_ways)} attends in both directions": both_ways,
        f"{', '.join(compiled)} is compiled": compiled,
        f"{', '.join(states)} keeps another state than keys and values": states,
        "output_router_logits adds a loss of whole microbatches": getattr(config, "output_router_logits", False),
    }
    if argument is None or any(faults.values()):
        raise CutError(f"a stage does not run in slices: {'; '.join(text for text, found in faults.items() if found)}")
    for module in stage.modules():
        if hasattr(module, "_can_checkpoint_with_cache"):
            # Checkpointed layers drop a cache, which a second run would extend again; it does not extend a slice's.
            module._can_checkpoint_with_cache = True  # type: ignore[assignment]  # noqa: SLF001
    return argument


def other_states(model: nn.Module, layers: Iterable[str], config: Any) -> list[str]:
    """Parts of a model's ``layers`` with another state than keys and values: convolutions, linear attention."""
    parts = {layer: model.get_submodule(layer) for layer in layers}
    convolutions = [
        f"{layer}.{name}"
        for layer, part in parts.items()
        for name, module in vars(part).get("ghost", part).named_modules()  # of another stage's layer, the real one
        if isinstance(module, nn.Conv1d)
    ]
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION - _WITHOUT
    return [*convolutions[:1], *(f"a layer of the kind {kind}" for kind in sorted(kinds))]


def require_length(model: nn.Module, length: int, what: str, error: type[Exception]) -> None:
    """Raise where a rotary module has other frequencies for a text of ``length`` tokens than for its parts."""
    for name, module in model.named_modules():
        found = getattr(module, "rope_type", None)
        for layer_type, rope_type in (found if isinstance(found, Mapping) else {None: found}).items():
            if not isinstance(rope_type, str) or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            limit = getattr(module, "original_max_seq_len", None)  # tokens up to which frequencies are fixed
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            parameters = parameters if layer_type is None else parameters.get(layer_type, {})
            if rope_type == "longrope":
                limit = parameters.get("original_max_position_embeddings", limit)
            if limit is None or length > limit:
                above = "an unknown length" if limit is None else f"{limit} tokens"
                raise error(
                    f"{name or type(model).__name__} has rope_type {rope_type!r}, whose frequencies depend on the "
                    f"length of a forward above {above}; {what} {length}"
                )
