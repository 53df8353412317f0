"""The states of the random generators of a process as tensors of fixed shapes: torch, its device, Python, numpy."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from typing import Any

import torch
from torch import Tensor

_WORDS = 624  # of a Mersenne Twister


def capture(device: torch.device) -> dict[str, Any]:
    """The states now; `as_tensors` makes tensors of them, at leisure."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy"] = numpy.get_state()
    return states


def as_tensors(states: dict[str, Any]) -> dict[str, Tensor]:
    """Captured states as tensors."""
    made = {kind: state for kind, state in states.items() if isinstance(state, Tensor)}
    _, words, gauss = states["python"]
    made["python"] = torch.tensor([*words, math.nan if gauss is None else gauss], dtype=torch.float64)
    if "numpy" in states:
        _, keys, at, has_gauss, cached = states["numpy"]
        made["numpy"] = torch.tensor([*keys.tolist(), at, has_gauss, cached], dtype=torch.float64)
    return made


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Set the generators to saved states; kinds that this process does not have are left alone."""
    torch.set_rng_state(states["torch"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type], device)
    *words, gauss = states["python"].tolist()
    random.setstate((3, tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    numpy: Any = sys.modules.get("numpy.random")
    if "numpy" in states and numpy is not None:
        held = states["numpy"].tolist()
        keys = [int(word) for word in held[:_WORDS]]
        numpy.set_state(("MT19937", keys, int(held[_WORDS]), int(held[_WORDS + 1]), held[_WORDS + 2]))


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a run in another layout: a function of the saved seed, the step and the rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(derived)
    random.seed(derived)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(derived % 2**32)
