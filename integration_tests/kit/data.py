"""Random tensors that depend on a seed alone: the same on every rank and in one process."""

from __future__ import annotations

import torch


def normal(seed, *shape, device="cpu"):
    """In float64, from a standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def coins(seed, *shape, device="cpu"):
    """Zeros and ones, such as which tokens count."""
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(device)
