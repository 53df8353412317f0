"""Names of transformers that its releases change: found by signature and attribute, never by a version number.

5.24 renamed ``past_key_values`` to ``cache``. Models take the old name until 5.40; in layers it falls into
``**kwargs``, unread, and attention would be over the new tokens alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import device, nn

from pipegrid.stages.errors import CutError

CACHE_NAMES: Final = ("cache", "past_key_values")  # the argument for keys and values, the newest name first


def version() -> str:
    """``transformers`` and its version, for the text of an error."""
    return f"transformers {importlib.import_module('transformers').__version__}"


def keeps_states(entry: Any) -> bool:
    """Whether an entry of a cache keeps keys and values; that of a layer which reads those of another keeps none."""
    return type(entry).__name__ != "DummyLayer"


def cache_name(model: nn.Module, mask_function: Callable[..., Any] | None = None) -> str | None:
    """The argument by which the forward of ``model`` and its layers take keys and values; None where it takes none.

    ``mask_function`` is transformers' for causal attention, which says what the word ``cache`` means: before 5.24 some
    models (XLM) had an argument of that name that was another thing. Raises CutError where a module takes the other
    name, and would not see what the model passes on, or where this transformers has names that are not known here.
    """
    own = _cache_argument(model.forward)
    if own is None:
        return None
    if mask_function is None:
        mask_function = importlib.import_module("transformers.masking_utils").create_causal_mask
    word = _cache_argument(mask_function)
    if word is None:
        raise CutError(
            f"create_causal_mask of {version()} takes none of {', '.join(CACHE_NAMES)}, so the argument for keys and "
            "values has another name there; use a version of the table in docs/install.md"
        )
    if own == CACHE_NAMES[0] != word:
        return None
    for name, module in model.named_modules():
        other = _cache_argument(module.forward)
        if other not in (None, own):
            raise CutError(
                f"{type(model).__name__} takes {own} and {name} ({type(module).__name__}) takes {other}, so it would "
                f"not read what the model passes on; give both the name of {version()}, {word}"
            )
    return own


def _cache_argument(function: Callable[..., Any]) -> str | None:
    """The first of `CACHE_NAMES` that a function has by name; what falls into ``**kwargs`` is none."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


@functools.cache
def require_known_names() -> None:
    """Raise `CutError` unless models and configs of this transformers have the attributes by which stages decide.

    A model without such an attribute counts as one that does not have the property; so a renamed attribute would be
    overlooked. One small model, on the meta device, and the configs that have the others are asked instead.
    """
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    with device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = (
        (model, "can_generate", "all_tied_weights_keys", "loss_function"),
        (model.model.layers[0].self_attn, "is_causal"),
        (model.model.rotary_emb, "rope_type", "original_max_seq_len"),
        (config, "get_text_config", "rope_parameters", "is_encoder_decoder"),
        (transformers.Gemma3TextConfig(), "layer_types", "use_bidirectional_attention"),
        (transformers.MixtralConfig(), "output_router_logits"),
        (transformers.Qwen2VLModel, "get_rope_index"),
    )
    for owner, *names in expected:
        require_names(owner, *names)


def require_names(owner: Any, *names: str) -> None:
    """Raise `CutError`, with the version, where an object of transformers lacks an attribute."""
    for name in names:
        if not hasattr(owner, name):
            kind = owner if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner)
            raise CutError(
                f"{kind.__name__} of {version()} has no {name}, by which stages decide; use a version of the table in "
                "docs/install.md"
            )
