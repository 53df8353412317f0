"""The barrier of a communicator's members at its creation and at its end: none passes before all have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_LOOK_SECONDS = 0.002


def global_ranks(options: Any) -> list[int]:
    """The members of a group, as ranks of the default group."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


class Meeting:
    """One barrier of all members of a group.

    Args:
        point: its name, such as ``connect``.
        options: of the group, as torch gives them to a backend.
    """

    def __init__(self, point: str, options: Any) -> None:
        self._name, self._here = options.group_id, options.group_rank
        self._ranks = global_ranks(options)
        self._store = dist.PrefixStore(f"fake_nccl/{point}", options.store)  # type: ignore[attr-defined]  # untyped

    def come(self) -> None:
        """Record the arrival of this rank."""
        self._store.set(str(self._here), "1")

    def are_all_here(self) -> bool:
        """Whether every member has arrived."""
        return len(self._ranks) == 1 or bool(self._store.check([str(index) for index in range(len(self._ranks))]))

    def wait(self, given_up: Callable[[], bool]) -> bool:
        """Arrive, and wait for the others; False where ``given_up`` is true first."""
        self.come()
        while not self.are_all_here():
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
