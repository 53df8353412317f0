"""One module of a communicator of several, as a communicator of its own: for steps of that module alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cached_property

from pipegrid.schedules.plan import stages_on
from pipegrid.transport.base import Communicator, Port
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.graph import ModuleGraph
from pipegrid.transport.job import JobTopology


class ModulePart(Communicator):
    """The lanes of ``whole`` inside ``module``: its stages are numbered from 0, as in a job of this module alone.

    Args:
        whole: of all modules.
        module: one of them.
        graph: of ``whole``.
    """

    def __init__(self, whole: Communicator, module: str, graph: ModuleGraph) -> None:
        self._whole = whole
        self.device, self.rank, self.deadline = whole.device, whole.rank, whole.deadline
        self._first, self._graph = graph.stage(module, 0), ModuleGraph({module: graph.depth(module)})

    @cached_property
    def job(self) -> JobTopology:
        """This rank's stages of the module, and the positions of all of them."""
        whole, count = self._whole.job, self._graph.num_stages
        own = [stage - self._first for stage in whole.stages]
        return JobTopology(
            graph=self._graph,
            stages=tuple(stage for stage in own if 0 <= stage < count),
            placement=None if whole.placement is None else _renumbered(whole.placement[self._first :][:count]),
            lanes=whole.lanes,
        )

    def _edge(self, edge: Edge) -> Edge:
        return Edge(edge.source + self._first, edge.destination + self._first)

    def port(self, edge: Edge, direction: Direction) -> Port:
        """The lane of an edge of the module's own stage numbers."""
        return self._whole.port(self._edge(edge), direction)

    def batch(self) -> AbstractContextManager[None]:
        """See `Communicator.batch`."""
        return self._whole.batch()

    @property
    def batches(self) -> bool:
        """See `Communicator.batches`."""
        return self._whole.batches

    def in_order(self) -> AbstractContextManager[None]:
        """See `Communicator.in_order`."""
        return self._whole.in_order()

    def neighbours(self, edges: Iterable[Edge]) -> Handshake | None:
        """See `Communicator.neighbours`."""
        return self._whole.neighbours(map(self._edge, edges))

    def abort(self, reason: str) -> None:
        """End all lanes of the whole communicator."""
        self._whole.abort(reason)


def _renumbered(placement: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Positions that hold the same stages as one, numbered in the order of these stages."""
    held = sorted({tuple(stages) for stages in stages_on(placement).values()})
    return tuple(
        tuple(position for position, stages in enumerate(held) if stage in stages) for stage in range(len(placement))
    )
