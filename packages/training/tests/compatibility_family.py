"""A row of the compatibility table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import nn

from pipegrid.training import Names

ROWS = 2
LAYOUTS = {2: "Et|tttL", 3: "Et|tt|tL", 4: "Et|t|t|tL"}
LAYOUTS_OF_TWO = {2: "Eee|eettttL", 3: "Eee|eet|tttL", 4: "Eee|ee|tt|ttL"}


@frozen
class Family:
    """A family of models.

    Attributes:
        make: the whole model, of 4 layers, or of 4 in its encoder and 4 in its decoder.
        batch: the arguments of a microbatch, by its seed.
        prompt: of a text to go on with, by its seed and its length; None where the model itself cannot generate.
        names: where its layers are; None where `cut` finds them.
        layouts: by number of stages.
        dtype: of parameters; float32 where an operator of the model has no other (grouped matrix products of experts).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    prompt: Callable[[int, int], dict[str, torch.Tensor]] | None = None
    names: Names | None = None
    layouts: dict[int, str] = LAYOUTS
    dtype: torch.dtype = torch.float64
