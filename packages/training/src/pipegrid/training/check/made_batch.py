"""A small batch for a Hugging Face model, made from its config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.training.errors import CutError

SIZE, LENGTH = 2, 16


def batch_for(model: nn.Module) -> dict[str, Any]:
    """Two samples: texts with padding on the right, images, or sounds, and labels where the model takes them.

    Of a model of images and texts, two texts.

    Args:
        model: may be on the meta device.

    Raises:
        CutError: no model of Hugging Face, or inputs of another kind.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    accepted = set(inspect.signature(model.forward).parameters)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if main == "input_ids":
            return _texts(model, config, accepted)
        if main == "pixel_values" and isinstance(size := _of(config, "image_size"), int):
            images = torch.randn(SIZE, _of(config, "num_channels") or 3, size, size)
            return {"pixel_values": images} | _labels(model, config, accepted, None)
        if main == "input_features" and _of(config, "max_source_positions"):
            sounds = torch.randn(SIZE, config.num_mel_bins, 2 * config.max_source_positions)  # type: ignore[union-attr]
            ids = torch.randint(3, _of(config, "vocab_size"), (SIZE, LENGTH))
            return {"input_features": sounds} | _labels(model, config, accepted, ids)
    raise CutError(f"no batch can be made for {type(model).__name__}, whose main input is {main}; give one")


def _texts(model: nn.Module, config: Any, accepted: set[str]) -> dict[str, Any]:
    words = int(_of(config, "vocab_size"))
    special = {value for each in _configs(config) for name, value in vars(each).items() if name.endswith(_SPECIAL)}
    plain = torch.tensor([word for word in range(min(words, 1000)) if word not in special] or [0])
    ids = plain[torch.randint(0, len(plain), (SIZE, LENGTH))]
    mask = torch.ones_like(ids)
    padding = _of(config, "pad_token_id")
    if "attention_mask" in accepted and padding is not None:
        mask[-1, -LENGTH // 4 :] = 0
        ids[mask == 0] = padding
    made = {"input_ids": ids} | ({"attention_mask": mask} if "attention_mask" in accepted else {})
    return made | _labels(model, config, accepted, ids.masked_fill(mask == 0, -100))


_SPECIAL = ("_token_id", "_token_index")


def _labels(model: nn.Module, config: Any, accepted: set[str], words: Tensor | None) -> dict[str, Tensor]:
    """Labels of the kind that a class of Hugging Face takes, by its name."""
    if "labels" not in accepted:
        return {}
    name = type(model).__name__
    if "TokenClassification" in name and words is not None:
        return {"labels": (words % config.num_labels).masked_fill(words < 0, -100)}
    if "Classification" in name:
        return {"labels": torch.arange(SIZE) % config.num_labels}
    return {} if words is None else {"labels": words}


def _of(config: Any, name: str) -> Any:
    """A setting of the config, or of the first config inside of it that has it."""
    return next((value for each in _configs(config) if (value := getattr(each, name, None)) is not None), None)


def _configs(config: Any) -> list[Any]:
    return [] if config is None else [config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))]
