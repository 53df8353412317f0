"""Groups of a bridge's own, and its collectives: waited for with a deadline, ended by an abort."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from pipegrid.topology import GroupSpec, create_groups, destroy_groups, discard_groups
from pipegrid.transport.backends import lift_timeout, nccl_options
from pipegrid.transport.collectives import waiting
from pipegrid.transport.collectives.gathering import gather_text
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import CollectiveFailedError, text_of
from pipegrid.transport.streams import has_streams
from pipegrid.transport.waits import aborts

_ABORT_SECONDS = 2.0


def own_groups(
    specs: Iterable[GroupSpec],
    *,
    backend: str | None,
    deadline: float,
    timeout: timedelta | None = None,
    max_ctas: int | None = P2PConfig().max_ctas,
) -> dict[GroupSpec, dist.ProcessGroup]:
    """Create and connect groups for waits of ``deadline`` seconds; ``timeout`` is the groups' own, by default longer.

    On NCCL they have the options of lanes: a stream of high priority, and at most ``max_ctas`` thread blocks.

    Past a group's own timeout gloo fails a collective as if a rank had died, and torch's watchdog ends a process with a
    device: the error of the deadline must be earlier.
    """
    own = timeout or timedelta(seconds=deadline + waiting.BACKSTOP_SECONDS)
    backend = backend or dist.get_backend_config()
    moving = dict(part.split(":") for part in backend.split(",")).get("cuda", "") if ":" in backend else backend
    groups = create_groups(specs, backend=backend, timeout=own, pg_options=nccl_options(moving, max_ctas))
    for group in groups.values():
        if timeout is None and dist.get_backend(group) != "gloo":
            lift_timeout(group)
    return groups


@define(eq=False)
class CollectiveWaits:
    """Waits for the collectives of the communicator ``name``, whose tensors are on ``device``.

    Attributes:
        deadline: seconds that a wait may take.
        task: the error's text for a wait that fails, with {} for the other ranks.
        failure: an error beside the collectives that may be the cause; None while there is none.
        ended: why the communicator was ended.
        pending: collectives that a stream was ordered after, with their ranks.
        lost: the first of those that failed, with its error.
        stuck: a wait failed, so that a collective may be under way that never ends unless it is aborted.
    """

    name: str
    rank: int
    device: torch.device
    deadline: float
    task: str
    failure: Callable[[], object | None] = lambda: None
    ended: str | None = None
    pending: waiting.PendingCollectives[Sequence[int]] = field(factory=waiting.PendingCollectives)
    lost: tuple[Sequence[int], RuntimeError] | None = None
    stuck: bool = False

    def end(self, reason: str) -> None:
        """Fail all waits, those under way and later ones."""
        self.ended = self.ended or reason

    def wait(
        self,
        work: Any,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        *,
        end: float | None = None,
        host: bool = False,
        task: str | None = None,
    ) -> None:
        """Return when the collective among ``ranks`` is done (on CUDA: when the current stream is ordered after it).

        ``work`` is None where it was done at once, ``task`` where it is the communicator's. With ``host``, CUDA holds
        the host as well: the caller reads the result, and a read has no deadline. The wait fails at ``end``, in
        `time.monotonic` seconds; None is after the deadline.

        Raises:
            CollectiveFailedError: a rank died or did not join in time, or the communicator was ended. On a device,
                also where a collective waited for before has failed since.
        """
        if work is None:
            return
        self.check()
        began, on_device = time.monotonic(), has_streams(self.device)
        end = began + self.deadline if end is None else end
        failed = waiting.finish(work, group, on_device=on_device, host=host, end=end, given_up=lambda: self.ended)
        if on_device and (failed is None or failed.why != "lost"):
            self.pending.add(ranks, work, group)
        if failed is not None:
            raise self._error(ranks, failed, end - began, task) from failed.error

    def gather_text(
        self, text: str, ranks: Sequence[int], group: dist.ProcessGroup, *, task: str | None = None
    ) -> dict[int, str]:
        """The ``text`` of each of ``ranks``, by rank; holds the host, as `wait` with ``host=True``."""
        return gather_text(
            text, group, self.device, lambda work, _: self.wait(work, ranks, group, host=True, task=task)
        )

    def check(self) -> None:
        """Raise `CollectiveFailedError` if a collective that was waited for on a device has ended with an error."""
        self.lost = self.lost or self.pending.failed()
        if self.lost is not None:
            ranks, error = self.lost
            raise self._error(ranks, waiting.NotDone.of(error), self.deadline) from error

    def _error(
        self, ranks: Sequence[int], failed: waiting.NotDone, seconds: float, task: str | None = None
    ) -> CollectiveFailedError:
        """The error of a collective among ``ranks``, for which this rank waited for ``seconds``."""
        self.stuck = True  # also after an end: the abort that follows it may not have begun
        cause = {
            "late": f"not within {seconds:.3g} s; one of them has failed, or waits for another rank itself",
            "given up": f"the communicator was ended here: {failed.text}",
            "aborted": f"the communicator was ended here ({failed.text})",
            "lost": f"a rank died, or its connection was closed ({failed.text})",
        }[failed.why]
        others = [rank for rank in ranks if rank != self.rank]
        failure = self.failure()
        lane = "" if failure is None else f" (a lane of this edge failed: {text_of(failure).splitlines()[0]})"
        return CollectiveFailedError(
            f"rank {self.rank}, {self.name}: {(task or self.task).format(others)}: {cause}{lane}"
        )


def close_groups(
    groups: Mapping[GroupSpec, dist.ProcessGroup],
    *,
    failed: bool,
    seconds: float,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Destroy groups after ``beside``, with their other members, within ``seconds``; abort them if ``failed``.

    A destroy would wait for a collective that is stuck, and for a member that is gone.
    """
    abort_groups(groups.values() if failed else (), "it was closed", beside=beside)
    if failed:
        discard_groups(groups)
    else:
        destroy_groups(groups, seconds=seconds)


def abort_groups(
    groups: Iterable[dist.ProcessGroup], reason: str, *, beside: Callable[[], None] = lambda: None
) -> None:
    """End the collectives under way in all ``groups`` at once, while ``beside`` runs; wait for 2 s at most."""
    listed = list(groups)
    begun = aborts.abort_groups(listed, reason)
    beside()  # before the cut: it tells other ranks the reason
    waiting.host_collectives.cut(listed)
    limit = time.monotonic() + _ABORT_SECONDS
    for one in begun:
        one.ended.wait(max(0.0, limit - time.monotonic()))
