"""The random generators of the process: torch's, that of its device, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

States = dict[str, Any]
"""By kind: ``torch``, ``python``, the type of a device, ``numpy``; without those that the process does not have."""


def capture(device: torch.device | None = None) -> States:
    """The states now; of ``device``, or of the current CUDA device where CUDA is in use."""
    states = capture_torch(device) | {"python": random.getstate()}
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    return states


def capture_torch(device: torch.device | None = None) -> States:
    """Those of torch alone: on the host and on the device."""
    states: States = {"torch": torch.get_rng_state()}
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore(states: States, device: torch.device | None = None) -> None:
    """Set the generators to ``states``; kinds that this process does not have are left alone.

    ``device``: the one whose generator is set, where it is of the kind that was captured; None is the current one.
    """
    torch.set_rng_state(states["torch"])
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
