"""What the layers of a Hugging Face model keep of earlier tokens, and how far their positions go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WITHOUT = frozenset({"moe", "mlp"})
"""Kinds of layers that keep nothing."""


def other_states(model: nn.Module, layers: Iterable[str], config: Any) -> list[str]:
    """What of a model's ``layers`` keeps another state than keys and values: convolutions, linear attention."""
    convolutions = [
        f"{layer}.{name}"
        for layer in layers
        for name, module in _real(model.get_submodule(layer)).named_modules()
        if isinstance(module, nn.Conv1d)
    ]
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION - _WITHOUT
    return [*convolutions[:1], *(f"a layer of the kind {kind}" for kind in sorted(kinds))]


def require_length(model: nn.Module, length: int, what: str, error: type[Exception]) -> None:
    """Raise where a rotary module has other frequencies for a text of ``length`` tokens than for its parts."""
    for name, rope_type, limit in _limits(model):
        if limit is None or length > limit:
            raise error(
                f"{name} has rope_type {rope_type!r}, whose frequencies depend on the length of a forward above "
                f"{'an unknown length' if limit is None else f'{limit} tokens'}; {what} {length}"
            )


def _real(layer: nn.Module) -> nn.Module:
    """A layer, or what a layer of another stage was made from."""
    found: nn.Module = vars(layer).get("ghost", layer)
    return found


def _limits(model: nn.Module) -> Iterator[tuple[str, str, int | None]]:
    """The rotary modules with frequencies by length: name, kind, and the tokens up to which they are fixed."""
    for name, module in model.named_modules():
        found = getattr(module, "rope_type", None)
        by_layer = found if isinstance(found, Mapping) else {None: found}
        for layer_type, rope_type in by_layer.items():
            if not isinstance(rope_type, str) or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            limit = getattr(module, "original_max_seq_len", None)
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            parameters = parameters if layer_type is None else parameters.get(layer_type, {})
            if rope_type == "longrope":
                limit = parameters.get("original_max_position_embeddings", limit)
            yield name or type(model).__name__, rope_type, limit
