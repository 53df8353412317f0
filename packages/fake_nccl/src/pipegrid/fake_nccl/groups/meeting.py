"""The barrier of a communicator's members at its creation and at its end: none passes before all have arrived."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pipegrid.fake_nccl.device import FakeDevice

_LOOK_SECONDS = 0.002


def global_ranks(options: Any) -> list[int]:
    """The members of a group, as ranks of the default group."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


class Meeting:
    """One barrier of all members of a group with those ``options``, as torch gives them; ``point`` is its name."""

    def __init__(self, point: str, options: Any) -> None:
        self._name, self._here = options.group_id, options.group_rank
        self._ranks = global_ranks(options)
        self._store = dist.PrefixStore(f"fake_nccl/{point}", options.store)  # type: ignore[attr-defined]  # untyped

    def come(self) -> None:
        """Record the arrival of this rank."""
        self._store.set(str(self._here), "1")

    def wait(self, given_up: Callable[[], bool]) -> bool:
        """Arrive, and wait for the others; False where ``given_up`` is true first."""
        self.come()
        members = [str(index) for index in range(len(self._ranks))]
        while len(members) > 1 and not self._store.check(members):
            if given_up():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def connect(self, seconds: float, how: str = "") -> None:
        """Arrive, and wait for the others as a communicator's creation does, for ``seconds`` at most.

        ``how`` they connect, at the end of the error's text.

        Raises:
            DistBackendError: some did not arrive.
        """
        end = time.monotonic() + seconds  # of a clock that a test may move
        if not self.wait(lambda: time.monotonic() > end):
            missing = [rank for index, rank in enumerate(self._ranks) if not self._store.check([str(index)])]
            raise dist.DistBackendError(
                f"rank {self._ranks[self._here]}, group {self._name}: ranks {missing} did not come to connect within "
                f"{seconds:g} s{how}"
            )


class Ending(Meeting):
    """The end of one rank's communicator of a group.

    ``ncclCommDestroy`` may wait for the members on its node, without a deadline; here it always does, until each has
    begun a destroy or an abort. ``ncclCommAbort`` from another thread ends that wait; after it, the communicator's
    memory is free, and an abort a violation.
    """

    def __init__(self, options: Any, device: FakeDevice) -> None:
        super().__init__("end", options)
        self._device = device
        self._aborted = threading.Event()
        self._destroyed = False

    def meet(self) -> None:
        """Wait until all members destroy the group, or an abort, or the end of the test."""
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has left, with all others here
            if not self.wait(lambda: self._aborted.is_set() or self._device.closed):
                return
        self._destroyed = True

    def abort(self) -> None:
        """Note an abort."""
        if self._destroyed:
            self._device.violations.append(
                f"abort() of group {self._name} after its destroy; ncclCommAbort would free its communicator twice"
            )
        self._aborted.set()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.come()
