"""Forwards under autocast, where the config asks for it, in a dtype that autocast has."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.megatron.config import option


def autocast(config: Any, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The context of one forward of ``model``.

    Raises:
        StepArgumentError: as `require_autocast`.
    """
    if not option(config, "enable_autocast"):
        return contextlib.nullcontext()
    device, dtype = require_autocast(config, model)
    return torch.autocast(device, dtype=dtype)


def require_autocast(config: Any, model: torch.nn.Module) -> tuple[str, torch.dtype | None]:
    """The device type and the dtype (None: the device's default) of a forward under autocast.

    Raises:
        StepArgumentError: ``enable_autocast`` with a dtype that autocast does not have: torch would go on without it.
    """
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    dtype = option(config, "autocast_dtype") or option(config, "pipeline_dtype")
    if option(config, "enable_autocast") and dtype not in (None, torch.float16, torch.bfloat16):
        name = "autocast_dtype" if option(config, "autocast_dtype") else "pipeline_dtype"
        raise StepArgumentError(
            f"enable_autocast is set and {name} is {dtype}; autocast computes in torch.float16 or torch.bfloat16: set "
            "config.autocast_dtype to one of them, or enable_autocast=False"
        )
    return device, dtype
