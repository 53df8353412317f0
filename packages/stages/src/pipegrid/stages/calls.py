"""The arguments of a call of the whole model, in the forms in which stages take them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

# Arguments that parts before the layers read; stages behind the first take them where their code differs without.
PIXELS: Final = ("pixel_values", "input_features")


def dropped_by(model: nn.Module) -> tuple[str, ...]:
    """The names of arguments that stages of a model behind the first are not called with."""
    return PIXELS if "inputs_embeds" in accepted_by(model) else ()


def called_with(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional arguments of a call, and those by name, of a dict, a tuple or one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def accepted_by(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a model's forward."""
    return tuple(inspect.signature(model.forward).parameters)


def by_name(accepted: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return {**dict(zip(accepted, args, strict=False)), **kwargs}


def without_cache(accepted: Sequence[str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name as stages are run: without a cache, unless the call asks for one."""
    return {"use_cache": False, **kwargs} if "use_cache" in accepted else dict(kwargs)
