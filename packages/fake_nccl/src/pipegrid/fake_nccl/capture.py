"""Graph capture on a fake GPU: launches are recorded and do not run, and waits of works only order.

By the rules of nccl2: a graph keeps its works, with their tensors, as long as it lives; a wait in a capture returns
after ordering, so that it says nothing of the data, which is not there before a replay.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class FakeGraph:
    """A captured graph: the launches recorded in it, in launch order.

    Examples:
        >>> graph, done = FakeGraph(), []
        >>> graph.record(lambda: done.append("all_reduce"))
        >>> graph.replay()
        >>> done
        ['all_reduce']
    """

    _launches: list[Callable[[], object]] = field(factory=list, init=False)

    def record(self, launch: Callable[[], object]) -> None:
        """Keep a launch, with all that it holds."""
        self._launches.append(launch)

    def replay(self) -> None:
        """Launch everything once more."""
        for launch in self._launches:
            launch()
