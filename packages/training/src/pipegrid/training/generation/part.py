"""One module of a communicator of several, as a communicator of its own: for steps of that module alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.plan import as_placement, module_places
from pipegrid.transport.base import Communicator, Port
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.job import JobTopology


class ModulePart(Communicator):
    """The lanes of ``whole`` inside ``module``: its stages are numbered from 0, as in a job of this module alone.

    Args:
        whole: of all modules.
        module: one of them.
        graph: of ``whole``.
    """

    def __init__(self, whole: Communicator, module: str, graph: ModuleGraph) -> None:
        self._whole, self._module, self._graph = whole, module, graph
        self.device, self.rank, self.deadline = whole.device, whole.rank, whole.deadline
        self._first = graph.stage(module, 0)

    @cached_property
    def job(self) -> JobTopology:
        """This rank's stages of the module, and the positions of all of them."""
        whole, name = self._whole.job, self._module
        graph = ModuleGraph({name: self._graph.depth(name)})
        own = [stage - self._first for stage in whole.stages]
        places = None if whole.placement is None else module_places(self._graph, whole.placement, name)
        return JobTopology(
            graph=graph,
            stages=tuple(stage for stage in own if 0 <= stage < graph.num_stages),
            placement=None if places is None else as_placement(places),
            lanes=whole.lanes,
        )

    def _edge(self, edge: Edge) -> Edge:
        return Edge(edge.source + self._first, edge.destination + self._first)

    def port(self, edge: Edge, direction: Direction) -> Port:
        """The lane of an edge of the module's own stage numbers."""
        return self._whole.port(self._edge(edge), direction)

    def batch(self) -> AbstractContextManager[None]:
        """Start the block's sends and receives as a batch of the whole communicator."""
        return self._whole.batch()

    @property
    def batches(self) -> bool:
        """Whether a batch of the whole communicator is more than its messages one by one."""
        return self._whole.batches

    def in_order(self) -> AbstractContextManager[None]:
        """Start transfers of the whole communicator in the order of calls inside the block."""
        return self._whole.in_order()

    def neighbours(self, edges: Iterable[Edge]) -> Sequence[Handshake] | None:
        """The handshakes with the ranks at the other ends of these edges of the module."""
        return self._whole.neighbours(map(self._edge, edges))

    def abort(self, reason: str) -> None:
        """End all lanes of the whole communicator."""
        self._whole.abort(reason)
