"""A place inside of a backward."""

from __future__ import annotations

import torch
from torch import nn


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class Reach(nn.Module):
    """The identity; calls ``call`` in its backward."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return _Reaching.apply(x, self.call)
