"""Initial values that do not depend on how the model is cut: each parameter has a generator of its own."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn


def initialise(layer: nn.Module, *, name: str, seed: int) -> None:
    """Fill the parameters of ``layer``, which is called ``name`` in the whole model.

    The generator of a parameter is seeded by its full name, so a layer starts alike on whichever stage it is
    built. Weights are normal with variance 1 / fan-in, drawn in float64 so that every dtype starts from the same
    numbers; norms start as the identity, biases at zero.
    """
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed}/{name}/{key}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
                drawn = torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator)
                parameter.copy_(drawn / math.sqrt(parameter[0].numel()))
