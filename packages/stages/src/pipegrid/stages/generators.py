"""The random generators of the process, torch's, that of its device, Python's and numpy's: their states and seeds."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_WORDS = 624  # of a Mersenne Twister
States = dict[str, Any]
"""By kind: ``torch``, ``python``, the type of a device, ``numpy``; without those that the process does not have."""


def capture(device: torch.device | None = None) -> States:
    """The states now; of ``device``, or of the current CUDA device where CUDA is in use."""
    states = capture_torch(device) | {"python": random.getstate()}
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    return states


def capture_torch(device: torch.device | None = None) -> States:
    """The states of torch alone: on the host and on the device."""
    states: States = {"torch": torch.default_generator.get_state()}
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore(states: States, device: torch.device | None = None) -> None:
    """Set the generators to ``states``; kinds that this process does not have are left alone.

    ``device``: the one whose generator is set, where it is of the kind that was captured; None is the current one.
    """
    torch.default_generator.set_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    for kind in states.keys() - {"torch", "python", "numpy"}:
        if device is None or device.type == kind:
            torch.get_device_module(kind).set_rng_state(states[kind], device or kind)
    if "numpy" in states and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(states["numpy"])


@contextmanager
def generators_as_before() -> Iterator[None]:
    """The generators are at the end as they were."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def seed_by(generator: torch.Generator, device: torch.device) -> Callable[[], object]:
    """Seed torch's generators by a draw of ``generator``; returns what sets them to their states before it."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    if device.type == "cpu":  # torch.manual_seed() formats the stack for each kind of device that is not in use yet
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        return partial(torch.default_generator.set_state, state)
    states = capture_torch(device)
    torch.manual_seed(seed)
    return partial(restore, states, device)


@contextmanager
def states_as_before(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """``generators`` are at the end as they were."""
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def as_tensors(states: States) -> dict[str, Tensor]:
    """Captured states as tensors of fixed shapes."""
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


def seed_of(*values: object) -> int:
    """A seed that is a function of ``values``, of 63 bits."""
    digest = hashlib.blake2b("/".join(map(str, values)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a run in another layout: a function of the saved seed, the step and the rank."""
    derived = seed_of(seed, step, rank)
    torch.manual_seed(derived)
    seed_host(derived)


def seed_host(seed: int) -> None:
    """Seed Python's generator and, where it is in use, numpy's."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)
