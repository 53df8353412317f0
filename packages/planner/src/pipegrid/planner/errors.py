"""Errors of the planner."""

from __future__ import annotations


class JobError(ValueError):
    """A job that is malformed or contradicts itself; the text begins with the path in its file.

    Examples:
        >>> Device(flops=400e12, memory="eighty")
        Traceback (most recent call last):
            ...
        pipegrid.planner.errors.JobError: Device.memory is 'eighty'; it must be a number of bytes, or a text such as
            "80GB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)
    """


class NoFitError(JobError):
    """No choice keeps a bound of the job; the text names the bound and the nearest value that fits.

    Attributes:
        memory: bytes per GPU of the choice that needs the least, where memory is the bound.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12, parameters=1e9)], message="8MB")
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="1GB"), links=Network("450GB", "50GB"))
        >>> plan(job, gpus=2, limit=20)
        Traceback (most recent call last):
            ...
        pipegrid.planner.errors.NoFitError: memory is 1 GB per GPU; on 2 GPUs the choice that needs the least takes
            72.1 GB (pp=2, 1f1b: parameters, gradients and optimizer 72, activations 0): give 72.1 GB, or more GPUs
    """

    def __init__(self, message: str, *, memory: float | None = None) -> None:
        super().__init__(message)
        self.memory = memory
