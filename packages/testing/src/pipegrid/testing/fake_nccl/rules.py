"""Settings of the watchdog of torch 2.15's ``nccl``; `pipegrid.testing.fake_nccl.groups.nccl2` keeps its rules."""

from __future__ import annotations

from attrs import frozen


@frozen
class Nccl2Rules:
    """Settings of torch's watchdog.

    Attributes:
        tick: seconds between its looks.
        grace: seconds from a look that sees an error to the end of the process.
        handling: ``TORCH_NCCL_ASYNC_ERROR_HANDLING``; with 0 it ends nothing.
    """

    tick: float = 1.0
    grace: float = 15.0
    handling: int = 3
