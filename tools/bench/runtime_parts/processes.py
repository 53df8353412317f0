"""The rank processes of a benchmark: one torch thread each, joined by a backend, and what they report."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

Join: TypeAlias = Callable[[int, int, Any], AbstractContextManager[None]]
"""Joins a rank of so many ranks by a store, for a block."""

PATIENCE_SECONDS = 300.0  # without a report of any rank
# What ranks import, by names that a server finds without the program's path; before Python 3.12.8 it has no program.
_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "pipegrid.bridges.multimodule",
    "pipegrid.schedules.megatron",
)


@contextmanager
def over_gloo(rank: int, ranks: int, store: Any) -> Iterator[None]:
    """The default process group is gloo's inside the block."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


class Reports:
    """What the ranks report, each in its own order: some are ahead of others."""

    def __init__(self, results: Any, processes: Iterable[Any], ranks: int) -> None:
        self._results = results
        self._processes = processes
        self._waiting: list[deque[Any]] = [deque() for _ in range(ranks)]

    def next(self) -> list[Any]:
        """The next report of each rank.

        Raises:
            RuntimeError: a rank died, or nothing came for too long.
        """
        return [self._next_of(rank) for rank in range(len(self._waiting))]

    def first(self) -> Any:
        """The next report of rank 0, where the others make none.

        Raises:
            RuntimeError: as `next`.
        """
        return self._next_of(0)

    def slowest(self) -> list[float]:
        """Of the next report of each rank, one figure for each step, the largest of each step.

        Raises:
            RuntimeError: as `next`.
        """
        return [max(step) for step in zip(*self.next(), strict=True)]

    def _next_of(self, rank: int) -> Any:
        waited = 0.0
        while not self._waiting[rank]:
            try:
                other, report = self._results.get(timeout=1.0)
            except queue.Empty:
                waited += 1.0
                if waited > PATIENCE_SECONDS or any(process.exitcode for process in self._processes):
                    raise RuntimeError(f"rank {rank} did not report; look at the ranks' output above") from None
            else:
                self._waiting[other].append(report)
                waited = 0.0
        return self._waiting[rank].popleft()


@contextmanager
def on_ranks(ranks: int, work: Callable[..., None], *arguments: Any, join: Join = over_gloo) -> Iterator[Reports]:
    """Run ``work(report, *arguments)`` on ``ranks`` processes; the block reads what they give to ``report``.

    The ranks are forked by a server that has imported what the program imports: that takes seconds.

    Raises:
        RuntimeError: a rank failed, though it may have reported everything before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        shared = (ranks, str(Path(directory) / "store"), join, results, work, arguments)
        processes = [context.Process(target=_rank, args=(rank, *shared), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        yield Reports(results, processes, ranks)
        for process in processes:
            process.join()
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            raise RuntimeError(f"ranks {failed} failed after their last report; look at the ranks' output above")


def _rank(
    rank: int, ranks: int, path: str, join: Join, results: Any, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with join(rank, ranks, FileStore(path, ranks)):
        work(lambda report: results.put((rank, report)), *arguments)
