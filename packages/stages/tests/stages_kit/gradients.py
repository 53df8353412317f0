"""Gradients of stages against those of the whole model in one process."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor


def full(tensor):
    """The whole of a DTensor; any other tensor, or None, as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_errors(parameters, whole):
    """For each of ``parameters``, names and tensors, its name, its gradient, that of ``whole``, and the error.

    The error measure of the docs: the norm of the difference over that of the gradient, of a small gradient over a part
    of the mean norm. Where one of both is missing it counts as zero; parameters without any are left out.
    """
    expected = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    held = [gradient for gradient in expected.values() if gradient is not None]
    floor = 1e-3 * torch.stack([gradient.norm() for gradient in held]).norm() / len(held) ** 0.5
    for name, parameter in parameters:
        own, other = full(parameter.grad), expected[name]
        if own is not None or other is not None:
            ours = torch.zeros_like(other) if own is None else own
            theirs = torch.zeros_like(ours) if other is None else other
            error = ((ours - theirs).norm() / torch.maximum(theirs.norm(), floor)).nan_to_num(math.inf).item()
            yield name, own, other, error


def require_gradients(parameters, whole, error=1e-10):
    """Each of ``parameters`` has the gradient that it has in one process, or none where it has none there."""
    for name, own, other, found in gradient_errors(parameters, whole):
        assert (own is None) == (other is None), name
        assert found < error, (name, found)


def named_in(stages):
    """The parameters of stages with their names."""
    return [named for stage in stages for named in stage.named_parameters()]
