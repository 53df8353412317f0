"""One module of a communicator of several, as a communicator of its own: for steps of that module alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from pipegrid.bridges import ModuleGraph, MultiModulePipelineCommunicator, positions_of
from pipegrid.bridges.multimodule import Positions
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.handshake import Handshake
from pipegrid.transport.protocol import Handle, ReceiveHandle


class ModulePart:
    """The lanes inside ``module``: its stages are numbered from 0, as in a job of this module alone."""

    collective_edges: tuple[Edge, ...] = ()
    frozen_modules: tuple[str, ...] = ()

    def __init__(self, whole: MultiModulePipelineCommunicator, module: str) -> None:
        self._whole, self._module = whole, module
        self.graph = ModuleGraph({module: whole.graph.depth(module)})
        self.config, self.device, self.rank = whole.config, whole.device, whole.rank
        self._first = whole.graph.stage(module, 0)

    @property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages of the module."""
        depth = self.graph.num_stages
        return tuple(stage - self._first for stage in self._whole.stages if 0 <= stage - self._first < depth)

    @cached_property
    def positions(self) -> Positions:
        """The positions of the module's stages."""
        name = self._module
        return positions_of(
            self.graph,
            {name: self._whole.module_to_grid_map[name]},
            {name: self._whole.stage_placement[name]},
        )

    def _edge(self, edge: Edge) -> Edge:
        return Edge(edge.source + self._first, edge.destination + self._first)

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> Handle:
        """Start sending along an edge of the module's own stage numbers."""
        return self._whole.isend(payload, edge=self._edge(edge), direction=direction)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveHandle:
        """Start receiving along an edge of the module's own stage numbers."""
        return self._whole.irecv(edge=self._edge(edge), direction=direction, shapes=shapes)

    def batch(self) -> AbstractContextManager[None]:
        """See `MultiModulePipelineCommunicator.batch`."""
        return self._whole.batch()

    def in_order(self) -> AbstractContextManager[None]:
        """See `MultiModulePipelineCommunicator.in_order`."""
        return self._whole.in_order()

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """See `MultiModulePipelineCommunicator.neighbours`."""
        return self._whole.neighbours(map(self._edge, edges))

    def abort(self, reason: str) -> None:
        """End all lanes of the whole communicator."""
        self._whole.abort(reason)
