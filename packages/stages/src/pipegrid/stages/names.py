"""Dotted names of the parts of a model: its layers, the modules that run before them, and those that run after."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

from attrs import field, frozen
from torch import nn

from pipegrid.core.fields import Name, checked_fields, shown
from pipegrid.stages.errors import CutError
from pipegrid.stages.torch_compat import children_of

ONLY: Final = "layers"  # the kind of a model with one list of layers: whichever kind its layout has


def _by_kind(layers: str | Mapping[str, str]) -> Mapping[str, str]:
    by_kind = {ONLY: layers} if isinstance(layers, str) else layers
    if not isinstance(by_kind, Mapping):
        raise CutError(f"Names.layers is {shown(layers)}; it must be the dotted name of a list of layers, or a dict")
    return MappingProxyType(dict(by_kind))


@frozen(field_transformer=checked_fields(CutError))
class Names:
    """The parts of a model, by the dotted names of its submodules and parameters.

    Attributes:
        layers: the list of layers (``"model.layers"``); of an encoder-decoder model one list per kind of layer, in the
            order in which they run (``{"encoder": "encoder.block", "decoder": "decoder.block"}``).
        embedding: parts that run before a list of layers, and are registered after it.
        head: parts that run after a list of layers, and are registered before it.
        elsewhere: parts that another module of the job runs (the vision tower of a composite model, if its text model
            is cut): on no stage; the forward is called with their results.

    Submodules registered before the layers run before them, and those registered after run after, unless named here. A
    parameter of a module that holds the layers is always named.

    Examples:
        >>> Names(layers="blocks", embedding=["embed"], head=["norm", "head"]).layers
        mappingproxy({'layers': 'blocks'})
    """

    layers: Mapping[str, str] = field(converter=_by_kind)
    embedding: tuple[Name, ...] = ()
    head: tuple[Name, ...] = ()
    elsewhere: tuple[Name, ...] = ()


TABLE: Final = (  # Hugging Face's names, the more specific ones first
    Names({"encoder": "encoder.block", "decoder": "decoder.block"}),  # T5
    Names(  # BART, Whisper; BART registers the embedding's norms after its layers
        {"encoder": "model.encoder.layers", "decoder": "model.decoder.layers"},
        embedding=("model.encoder.layernorm_embedding", "model.decoder.layernorm_embedding"),
    ),
    Names(  # Llama, Qwen, Mistral, Gemma, Phi; Gemma 3n registers what makes its inputs of each layer after the layers
        "model.layers",
        embedding=(
            "model.embed_tokens_per_layer",
            "model.per_layer_model_projection",
            "model.per_layer_projection_norm",
            "model.altup_projections",
        ),
    ),
    # LLaVA, Qwen-VL: the vision tower runs before the layers.
    Names("model.language_model.layers", embedding=("model.image_newline",)),
    Names("transformer.h"),  # GPT-2, GPT-J, Falcon
    Names("gpt_neox.layers"),
    Names("model.decoder.layers", head=("model.decoder.final_layer_norm", "model.decoder.project_out")),  # OPT
    Names("vision_model.encoder.layers"),  # a head over CLIP or SigLIP
    Names("deberta.encoder.layer", embedding=("deberta.encoder.rel_embeddings",)),  # which all layers read
    Names("vit.layers"),  # a head over ViT
    Names("encoder.layers"),  # CLIP, SigLIP
    Names("layers"),  # ViT, the encoder of Whisper, Llama without its head
    Names("h"),  # GPT-2 without its head
)

_INSIDE: Final = ("", "base_model.", "base_model.model.")  # where a model of the table is: itself, or inside of PEFT's
_PROMPTS: Final = "prompt_encoder"  # PEFT registers it after the model, and it runs before the layers
_BESIDE: Final = ("embedding", "head", "elsewhere")
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_names(model: nn.Module, given: Names | None = None, num_layers: int | None = None) -> Names:
    """``given``, of parts that the model has; or the first row of the table whose lists of layers the model has.

    Else the only list that may be one of layers; of several, the only one with ``num_layers`` modules. It is warned of.

    Examples:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])})
        >>> find_names(model, Names("layers")).layers
        mappingproxy({'layers': 'layers'})
    """
    if given is not None:
        return _known(model, given)
    lists = {name for name, _ in _lists(model)}
    for prefix in _INSIDE:
        for names in TABLE:
            if {f"{prefix}{path}" for path in names.layers.values()} <= lists:
                beside = {kind: tuple(f"{prefix}{part}" for part in getattr(names, kind)) for kind in _BESIDE}
                beside["embedding"] += (_PROMPTS,) if prefix and hasattr(model, _PROMPTS) else ()
                return Names({kind: f"{prefix}{path}" for kind, path in names.layers.items()}, **beside)
    candidates = dict(_candidates(model))
    if len(candidates) > 1:
        candidates = {path: layers for path, layers in candidates.items() if len(layers) == num_layers}
    if len(candidates) == 1:
        ((path, layers),) = candidates.items()
        warnings.warn(
            f"the layers of {type(model).__name__} are {path}, {len(layers)} {type(layers[0]).__name__}: no other list "
            f"could be theirs; names=Names({path!r}) says the same",
            stacklevel=2,
        )
        return Names(path)
    there = ", ".join(f"{name} ({len(list(part.children()))})" for name, part in _lists(model)) or "none"
    raise CutError(
        f"{type(model).__name__} has its layers under no name of Hugging Face's; its lists of modules are: {there}; "
        "give names=Names(layers=...)"
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """The outermost lists of several modules of one type with parameters."""
    outer = ""
    for name, part in _lists(model):
        if outer and name.startswith(f"{outer}."):
            continue
        outer, layers = name, list(part.children())
        alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
        if alike and next(layers[0].parameters(), None) is not None:
            yield name, layers


def _known(model: nn.Module, names: Names) -> Names:
    if not isinstance(names, Names):
        raise CutError(f"names is {shown(names)}; give Names(layers=...), such as Names('model.layers')")
    parts = (model.named_modules(remove_duplicate=False), model.named_parameters(remove_duplicate=False))
    there = {name for name, _ in chain(*parts)}
    for kind in _BESIDE:
        for part in getattr(names, kind):
            if part not in there:
                raise CutError(f"Names.{kind} has {part!r}, which {type(model).__name__} has not")
    return names


def layers_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """The dotted names of the layers in the list ``path``."""
    lists = dict(_lists(model))
    if path not in lists:
        raise CutError(
            f"{type(model).__name__} has no list of modules {path!r}; its lists are {', '.join(lists) or 'none'}"
        )
    first: dict[nn.Module, str] = {}
    for key, layer in children_of(lists[path]):
        if first.setdefault(layer, key) != key:
            raise CutError(
                f"{path}.{key} is the same module as {path}.{first[layer]}, and a layer is on one stage; give each "
                "place a module of its own (copy.deepcopy), and make their parameters one (a.weight = b.weight)"
            )
    return tuple(f"{path}.{key}" for key in first.values())


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, part) for name, part in model.named_modules() if name and isinstance(part, _LISTS))
