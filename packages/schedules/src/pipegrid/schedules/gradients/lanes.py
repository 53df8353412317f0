"""Process groups of a module: its data lanes, its tensor-parallel ranks, and how a rank waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.schedules.gradients.main_grad import Modules, named_modules
from pipegrid.schedules.monitor import JobFailedError, under_way
from pipegrid.topology.fields import shown
from pipegrid.transport.opening import resolve_device
from pipegrid.transport.streams import has_streams

if TYPE_CHECKING:
    from pipegrid.schedules.monitor import Monitor

_SLICE = timedelta(seconds=0.1)
_POLL_SECONDS = 0.0001
_REDUCTION = "a reduction of gradients"


class GradientError(ValueError):
    """Gradients cannot be reduced or clipped with these arguments."""


class ReductionTimeoutError(RuntimeError):
    """A collective over gradients did not end within the deadline."""


class ReductionPeerError(RuntimeError):
    """A collective over gradients failed in its backend: a rank of its group has ended or closed its connection."""


def collection_of(collections: Any, name: str) -> Any:
    """The process groups of module ``name``: one collection serves all modules, or there is one per module.

    Raises:
        GradientError: there are several, but none for this module; or ``collections`` is not a collection.
    """
    by_name = collections_by_name(collections)
    if by_name is None:
        if not hasattr(collections, "dp") and not hasattr(collections, "dp_cp"):
            raise GradientError(f"collections is {shown(collections)}; it must have the group `dp` or `dp_cp`")
        return collections
    if name not in by_name:
        raise GradientError(f"no process groups for module {name!r}; there are collections for {sorted(by_name)}")
    return by_name[name]


def described(parameter: torch.nn.Parameter, module: str) -> str:
    """A parameter in an error: its shape and its module."""
    return f"a parameter of shape {tuple(parameter.shape)} in module {module!r}"


def collections_by_name(collections: Any) -> Mapping[str, Any] | None:
    """The collections of several modules by name; None where there is one for all."""
    by_name = collections if isinstance(collections, Mapping) else getattr(collections, "modules", None)
    return by_name if isinstance(by_name, Mapping) else None


def lanes_group(collections: Any, name: str) -> dist.ProcessGroup | None:
    """The group of a module's data lanes, dp x cp; None where it has one lane."""
    collection = collection_of(collections, name)
    group: dist.ProcessGroup | None = getattr(collection, "dp_cp", None)
    if group is not None:
        return group
    cp = getattr(collection, "cp", None)
    if cp is not None and cp.size() > 1:
        raise GradientError(
            f'module {name!r} has {cp.size()} cp ranks, but no dp_cp group; make it: grid.create_pg(["dp", "cp"])'
        )
    data_parallel: dist.ProcessGroup | None = getattr(collection, "dp", None)
    return data_parallel


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter is an expert's, with data lanes of its own: by Megatron's mark, or ours."""
    return getattr(parameter, "allreduce", True) is False or bool(getattr(parameter, "expert", False))


def groups_of(
    parameter: torch.nn.Parameter, collections: Any, name: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The data lanes and the tensor-parallel ranks of a parameter: of an expert's those of the expert view."""
    lanes, collection = lanes_group(collections, name), collection_of(collections, name)
    if not is_expert(parameter):
        return lanes, getattr(collection, "tp", None)
    experts: dist.ProcessGroup | None = getattr(collection, "expt_dp", None)
    if experts is None and size_of(lanes) > 1:
        raise GradientError(
            f"{described(parameter, name)} is an expert's (allreduce=False, expert), and its collection has no expt_dp "
            "group to sum it over: ProcessGroupCollection.from_grid(grid, expert_view=...)"
        )
    return experts, getattr(collection, "expt_tp", None)


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of ``group``; None is one rank."""
    return 1 if group is None else group.size()


def ranks_of(group: dist.ProcessGroup | None) -> frozenset[int]:
    """The global ranks of ``group``; none of None."""
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))


def device_of(modules: Modules, group: dist.ProcessGroup | None) -> torch.device:
    """The device of this rank's collectives: its parameters' or, on a rank without any, that of the group's backend."""
    for _, module in named_modules(modules):
        for parameter in module.parameters():
            return parameter.device
    return resolve_device(None, None, group)[1] if dist.is_initialized() else torch.device("cpu")


@frozen
class _Polled:
    """A device's work for a host that waits in slices: past a wait's own timeout NCCL would end the communicator."""

    work: dist.Work

    def is_completed(self) -> bool:
        """See `torch.distributed.Work`."""
        return self.work.is_completed()

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Wait for the end, then order the current stream after it; raise ``RuntimeError`` past the timeout."""
        began = time.monotonic()
        while not self.work.is_completed():
            if time.monotonic() - began > timeout.total_seconds():
                raise RuntimeError(f"not done after {timeout.total_seconds():.3g} s")
            time.sleep(_POLL_SECONDS)
        self.work.wait()


@frozen
class Waiting:
    """How the host waits for collectives over gradients. On CUDA only the current stream waits, not the host.

    Attributes:
        deadline: seconds for each collective; None leaves it to the group's own timeout.
        monitor: of the job, whose deadline and failures then end a wait.
    """

    deadline: float | None = None
    monitor: Monitor | None = None

    def wait(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """Wait for ``work`` on ``tensor``.

        Raises:
            ReductionTimeoutError: past the deadline.
            ReductionPeerError: the backend lost a rank of the group; on a device, also that of a collective before.
            JobFailedError: with a monitor: another rank failed, or its deadline passed.
        """
        try:
            under_way.check()
            self._wait(work, tensor)
        except (ReductionTimeoutError, JobFailedError):
            raise
        except RuntimeError as error:
            raise ReductionPeerError(
                "a reduction of gradients failed: a rank of its group has ended, or closed its connection "
                f"({' '.join(str(error).split())[:200]})"
            ) from error

    def _wait(self, work: dist.Work, tensor: torch.Tensor) -> None:
        on_device = has_streams(tensor.device)
        if self.monitor is not None:  # which holds the host where it does not watch the device
            held = on_device and self.monitor.progress is None
            self.monitor.wait(_Polled(work) if held else work, _REDUCTION)
            return
        if on_device:
            work.wait()
            return
        start = time.monotonic()
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():  # it failed, or ended just after the slice: its own wait tells
                    work.wait()
                    return
            else:
                return
            if self.deadline is not None and time.monotonic() - start > self.deadline:
                raise ReductionTimeoutError(
                    f"a reduction of gradients did not end within the deadline of {self.deadline:.3g} s: a rank of its "
                    "group has not joined it; rebuild the process groups before the next step"
                )


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[Waiting], None]:
    """Start an all-reduce in place; the result, called, waits for it.

    ``group`` None is the default process group, or nothing to do in one process without one.
    """
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True) if dist.is_initialized() else None
    if work is not None and has_streams(tensor.device):
        under_way.add(_REDUCTION, work, group)

    def wait(waiting: Waiting) -> None:
        if work is not None:
            waiting.wait(work, tensor)

    return wait
