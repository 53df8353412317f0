"""The image encoder: a strip of pixels to a short sequence of image tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from digit_reader.initial import initialise
from digit_reader.sizes import Sizes
from digit_reader.strips import HEIGHT, WIDTH

COLUMNS: Final = 4
"""Pixel columns per image token; each token sees 11 columns, so neighbours overlap by more than half a digit."""
IMAGE_TOKENS: Final = WIDTH // COLUMNS


class ImageEncoder(nn.Module):
    """Strips ``[batch, HEIGHT, WIDTH]`` to image tokens ``[batch, IMAGE_TOKENS, hidden]``.

    Three convolutions turn every `COLUMNS` columns into one token. To put halves of digits together is left to the
    language model, in which image tokens see each other.
    """

    def __init__(self, sizes: Sizes, *, seed: int) -> None:
        super().__init__()
        channels = sizes.channels
        self.patches = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * channels, sizes.hidden, kernel_size=(HEIGHT // 2, 4), stride=(1, 2), padding=(0, 1)),
        )
        self.position = nn.Parameter(torch.empty(IMAGE_TOKENS, sizes.hidden))
        initialise(self, name="images", seed=seed)

    def forward(self, strips: Tensor) -> Tensor:
        """Read ``strips``."""
        tokens: Tensor = self.patches(strips.unsqueeze(1)).squeeze(2).transpose(1, 2) + self.position
        return tokens
