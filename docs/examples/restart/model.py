"""A small regression: eight layers, cut into stages anywhere, and samples that are functions of their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor, nn

LAYERS, WIDTH = 8, 16


class Stage(nn.Module):
    """Some of the layers, under their ids in the whole model: parameters have the same names in every layout."""

    def __init__(self, number: int, stages: int, config: object = None) -> None:
        super().__init__()
        self.number, self.config = number, config
        ids = range(number * LAYERS // stages, (number + 1) * LAYERS // stages)
        self.blocks = nn.ModuleDict({str(layer): _block(layer) for layer in ids})
        self.received: Sequence[Tensor] = ()

    def set_input_tensor(self, received: Sequence[Tensor]) -> None:
        """Take the activations that have arrived."""
        self.received = received

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, WIDTH]`` to the same."""
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return x


def _block(layer: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(layer)
    block = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH)
    return block


def samples(numbers: range) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[rows, WIDTH]`` of the samples with these numbers."""
    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers]
    x = torch.stack(rows)
    return x, torch.sin(3.0 * x.roll(1, dims=1))


@define
class Position:
    """The data position: the number of the first sample that no step has seen."""

    next: int = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint stores."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint was saved."""
        self.next = state["next"]
