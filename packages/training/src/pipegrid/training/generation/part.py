"""One module of a communicator of several, as a communicator of its own: for steps of that module alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cached_property

from pipegrid.bridges import ModuleGraph, MultiModulePipelineCommunicator, positions_of
from pipegrid.transport.base import Communicator, Port
from pipegrid.transport.control.handshake import Handshake
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.job import JobTopology


class ModulePart(Communicator):
    """The lanes inside ``module``: its stages are numbered from 0, as in a job of this module alone."""

    def __init__(self, whole: MultiModulePipelineCommunicator, module: str) -> None:
        self._whole, self._module = whole, module
        self.device, self.rank, self.deadline = whole.device, whole.rank, whole.deadline
        self._first = whole.graph.stage(module, 0)

    @cached_property
    def job(self) -> JobTopology:
        """This rank's stages of the module, and the positions of all of them."""
        name, whole = self._module, self._whole
        graph = ModuleGraph({name: whole.graph.depth(name)})
        positions = positions_of(graph, {name: whole.module_to_grid_map[name]}, {name: whole.stage_placement[name]})
        own = [stage - self._first for stage in whole.stages]
        return JobTopology(
            graph=graph,
            stages=tuple(stage for stage in own if 0 <= stage < graph.num_stages),
            placement=positions.placement,
            lanes=whole.job.lanes,
        )

    def _edge(self, edge: Edge) -> Edge:
        return Edge(edge.source + self._first, edge.destination + self._first)

    def port(self, edge: Edge, direction: Direction) -> Port:
        """The lane of an edge of the module's own stage numbers."""
        return self._whole.port(self._edge(edge), direction)

    def batch(self) -> AbstractContextManager[None]:
        """See `MultiModulePipelineCommunicator.batch`."""
        return self._whole.batch()

    @property
    def batches(self) -> bool:
        """See `MultiModulePipelineCommunicator.batches`."""
        return self._whole.batches

    def in_order(self) -> AbstractContextManager[None]:
        """See `MultiModulePipelineCommunicator.in_order`."""
        return self._whole.in_order()

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """See `MultiModulePipelineCommunicator.neighbours`."""
        return self._whole.neighbours(map(self._edge, edges))

    def abort(self, reason: str) -> None:
        """End all lanes of the whole communicator."""
        self._whole.abort(reason)
