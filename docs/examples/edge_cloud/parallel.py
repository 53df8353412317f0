"""The digit reader's decoder with its heads and its perceptron shared out over tensor-parallel ranks.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
section 3: columns of the first linear layer, rows of the second, and the conjugate functions f and g around them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from digit_reader.language import Decoder


class _Enter(torch.autograd.Function):
    """f: hand on the copies; sum their gradients, of which every rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """g: sum the partial results; hand on the gradient, of which every rank has a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


class _Column(nn.Linear):
    """Some of the outputs of a linear layer: rows of its weight."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Every rank has the whole input, and makes its own outputs."""
        entered: Tensor = _Enter.apply(x, self.group)  # type: ignore[no-untyped-call]
        return super().forward(entered)


class _Row(nn.Linear):
    """Some of the inputs of a linear layer: columns of its weight."""

    group: ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Every rank has its own inputs, and gets the whole output."""
        left: Tensor = _Leave.apply(super().forward(x), self.group)  # type: ignore[no-untyped-call]
        return left


def share_of(name: str, value: Tensor, rank: int, ranks: int) -> Tensor:
    """What one of ``ranks`` tensor-parallel ranks holds of a decoder's parameter ``name`` (or of its gradient).

    The query, key and value of a head stay together; norms are whole everywhere.
    """
    if name.endswith("query_key_value.weight"):
        return torch.cat([part.chunk(ranks)[rank] for part in value.chunk(3)])
    if name.endswith("perceptron.0.weight"):
        return value.chunk(ranks)[rank]
    if name.endswith(("attention.output.weight", "perceptron.2.weight")):
        return value.chunk(ranks, dim=1)[rank]
    return value


def parallelise(decoder: Decoder, group: ProcessGroup) -> Decoder:
    """The decoder, changed into this rank's share of it.

    Raises:
        ValueError: the heads do not divide among the ranks.
    """
    rank, ranks = group.rank(), group.size()
    attention = decoder.block.attention
    if attention.heads % ranks:
        raise ValueError(f"{attention.heads} heads do not divide among {ranks} tensor-parallel ranks")
    attention.heads //= ranks
    for name, layer in list(decoder.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        share = share_of(f"{name}.weight", layer.weight.detach(), rank, ranks)
        kind = _Row if share.shape[1] < layer.in_features else _Column
        part = kind(share.shape[1], share.shape[0], bias=False, dtype=share.dtype)
        part.group = group
        with torch.no_grad():
            part.weight.copy_(share)
        parent, _, leaf = name.rpartition(".")
        setattr(decoder.get_submodule(parent), leaf, part)
    return decoder
