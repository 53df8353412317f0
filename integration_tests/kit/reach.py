"""A place inside of a backward."""

from __future__ import annotations

from torch import nn


class Reach(nn.Module):
    """The identity; calls ``call`` in its backward."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda gradient: self.call())
        return y
