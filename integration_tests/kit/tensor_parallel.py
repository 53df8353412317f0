"""Column- and row-parallel linear layers for tests, with and without sequence parallelism (axis 0 is the sequence).

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (the functions f and g); Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2 (their sequence-parallel counterparts).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .models import Model


def summed(tensor, group):
    total = tensor.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def gathered(tensor, group):
    """The parts of all ranks of the group, joined along the sequence."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def own_part(tensor, group):
    return tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


class Conjugate(torch.autograd.Function):
    """``there`` for a tensor, and ``back`` for its gradient."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


class Block(Model):
    """``x + gelu(x A + a) B + b``: A and a cut by columns, B by rows, b whole; the weights depend on ``number`` only.

    Args:
        number: of the block in the model.
        width: of x.
        group: the tensor-parallel ranks; None is the unsharded block.
        device: where the parameters live.
        cut: the input and the output are this rank's part of the sequence.
        config: of a step function.
    """

    def __init__(self, number, width, group=None, *, device="cpu", cut=False, config=None):
        super().__init__(config)
        self.group, self.cut = group, cut and group is not None
        generator = torch.Generator().manual_seed(number)

        def drawn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5

        inner = 12
        whole = {"A": drawn(width, inner), "a": drawn(inner), "B": drawn(inner, width), "b": drawn(width)}
        for name, value in whole.items():
            self.register_parameter(name, nn.Parameter(self.share(name, value).to(device, copy=True)))

    def share(self, name, value):
        """This rank's shard of a whole parameter, or of its gradient."""
        if self.group is None or name == "b":
            return value
        dim = {"A": 1, "a": 0, "B": 0}[name]
        return value.chunk(dist.get_world_size(self.group), dim)[dist.get_rank(self.group)]

    def spread(self, x):
        """From what the stage holds at its boundary to the input of the columns."""
        return gathered(x, self.group) if self.cut else x.view_as(x)

    def collect(self, x):
        """From the partial sums of the rows to what the stage holds at its boundary."""
        total = summed(x, self.group)
        return own_part(total, self.group) if self.cut else total

    def forward(self, x):
        inner = nn.functional.gelu(Conjugate.apply(x, self.spread, self.collect) @ self.A + self.a)  # f
        return x + Conjugate.apply(inner @ self.B, self.collect, self.spread) + self.b  # g

    def gradient(self, name):
        """The gradient of this rank's shard: of ``b``, each rank of a cut sequence has seen a part of the rows."""
        found = self.get_parameter(name).grad
        return summed(found, self.group) if name == "b" and self.cut else found
