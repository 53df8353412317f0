"""Gradients of models against those of the same models elsewhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def full(tensor):
    """The whole of a DTensor; any other tensor, or None, as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(models):
    """Of a model, or of several in turn, as whole tensors on the CPU."""
    each = [models] if isinstance(models, nn.Module) else models
    found = [full(parameter.grad) for model in each for parameter in model.parameters()]
    return [None if gradient is None else gradient.cpu() for gradient in found]


def assert_same_gradients(models, expected, *, rtol=1e-12, atol=1e-15):
    """Of two models, or of two lists of them; one by one."""
    for mine, other in zip(gradients_of(models), gradients_of(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


def assert_same_bits(tensor):
    """On all ranks; as bytes, so that one NaN equals another."""
    bits = tensor.flatten().view(torch.uint8)
    copies = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, bits)
    assert all(torch.equal(copy, bits) for copy in copies)


def difference(found, expected, among=None):
    """The measure of the docs between lists of gradients, the largest over all of them.

    That is the norm of the difference over that of the gradient, of a small gradient over a part of the mean norm of
    ``among`` (by default of ``expected``): some gradients are zero in exact arithmetic. Where none is expected there is
    none.
    """
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    assert [a is None for a in found] == [b is None for b in expected]
    every = [gradient for gradient in among or expected if gradient is not None]
    floor = 1e-3 * torch.cat([gradient.flatten() for gradient in every]).norm() / len(every) ** 0.5
    return max(((a - b).norm() / torch.maximum(b.norm(), floor)).item() for a, b in pairs)
