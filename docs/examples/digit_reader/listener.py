"""The signal's encoder: what a strip sounds like to a short sequence of tokens. Layer by layer, so it can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from digit_reader.blocks import Block
from digit_reader.initial import initialise
from digit_reader.sizes import Sizes
from digit_reader.strips import SIGNAL

SAMPLES: Final = 4
"""Samples per token, half a digit; each token hears ten, so no digit falls between two."""
SIGNAL_TOKENS: Final = SIGNAL // SAMPLES


class Ear(nn.Module):
    """Signals ``[batch, SIGNAL]`` to tokens ``[batch, SIGNAL_TOKENS, hidden]``, by two convolutions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.windows = nn.Sequential(
            nn.Conv1d(1, sizes.channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv1d(sizes.channels, sizes.hidden, kernel_size=2 * SAMPLES, stride=SAMPLES, padding=SAMPLES // 2),
        )
        self.position = nn.Parameter(torch.empty(SIGNAL_TOKENS, sizes.hidden))

    def forward(self, signals: Tensor) -> Tensor:
        """Hear ``signals``."""
        tokens: Tensor = self.windows(signals.unsqueeze(1)).transpose(1, 2) + self.position
        # What a stage sends is contiguous; the sum keeps the strides of the convolution.
        return tokens.contiguous()


class Context(nn.Module):
    """A block in which every token hears the whole signal."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.block = Block(sizes.hidden, sizes.heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens, one layer on."""
        out: Tensor = self.block(tokens)
        return out


_LAYERS: Final[dict[str, type[Ear | Context]]] = {"ear": Ear, "context": Context}
NAMES: Final = tuple(_LAYERS)


class SignalEncoder(nn.Module):
    """The layers ``names`` of the encoder: all of them, or one stage's.

    Signals ``[batch, SIGNAL]`` become tokens ``[batch, SIGNAL_TOKENS, hidden]``. Parameters are called and
    initialised alike however the encoder is cut.
    """

    def __init__(self, names: Sequence[str], sizes: Sizes, *, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            layer = _LAYERS[name](sizes)
            initialise(layer, name=f"signal.{name}", seed=seed)
            self.layers[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers on ``x``: signals on the first stage, tokens on the next."""
        for layer in self.layers.values():
            x = layer(x)
        return x
