"""The states of the random generators as tensors of fixed shapes, and seeds of a run in another layout."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from typing import Any

import torch
from torch import Tensor

from pipegrid.training.generators import States

_WORDS = 624  # of a Mersenne Twister


def as_tensors(states: States) -> dict[str, Tensor]:
    """Captured states as tensors."""
    made = {kind: state for kind, state in states.items() if isinstance(state, Tensor)}
    _, words, gauss = states["python"]
    made["python"] = torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64)
    if "numpy" in states:
        _, keys, at, has_gauss, cached = states["numpy"]
        made["numpy"] = torch.tensor([*keys.tolist(), at, has_gauss, cached], dtype=torch.float64)
    return made


def of_tensors(tensors: dict[str, Tensor]) -> States:
    """The states that `as_tensors` was called with."""
    states: States = dict(tensors)
    *words, gauss = tensors["python"].tolist()
    states["python"] = (3, tuple(map(int, words)), None if math.isnan(gauss) else gauss)
    if "numpy" in tensors:
        held = tensors["numpy"].tolist()
        keys = [int(word) for word in held[:_WORDS]]
        states["numpy"] = ("MT19937", keys, int(held[_WORDS]), int(held[_WORDS + 1]), held[_WORDS + 2])
    return states


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a run in another layout: a function of the saved seed, the step and the rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(derived)
    random.seed(derived)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(derived % 2**32)
