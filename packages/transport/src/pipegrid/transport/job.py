"""The facts of a job that a plan needs: one value, which every communicator has. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.core.lanes import Communicators


@frozen
class JobTopology:
    """The stages of a job and where they are, as one rank sees them.

    All but ``current_stage``, ``stages`` and ``replica`` is the same on every rank.

    Attributes:
        total_stages: pipeline ranks on the longest path through the modules; 0 is not known: without a ``graph`` such
            a job serves a `PipelineRuntime` and no step function.
        current_stage: this rank's place on that path, from 0.
        graph: the modules; None is a chain of one module, whose stages a step function deals out to ``total_stages``
            positions.
        stages: the stages of ``graph`` on this rank, ascending; empty without a graph.
        placement: the positions of each stage; None is one position per stage, or those of the schedule.
        distance_to_sink: stages between this rank and the last one of the longest path; None: that of a chain.
        num_chunks: stages of each rank in an interleaved schedule; None leaves it to the models.
        collective_edges: the edges whose payload moves by a ``COLLECTIVE``: those between modules that share ranks.
        forward_edges: the edges declared without backward; None where backwards are not declared.
        payload_edges: the edges whose payload is declared, and checked where it is sent.
        frozen_modules: modules that get no gradient.
        dims: the sizes of each module's grid, by dim; None where they are not known.
        lanes: what a plan is proved for: which lanes share a communicator.
        slices: whether a message may hold a slice of a microbatch.
        replica: of this rank, where it is known.
    """

    total_stages: int = 0
    current_stage: int = 0
    graph: ModuleGraph | None = None
    stages: tuple[int, ...] = ()
    placement: tuple[tuple[int, ...], ...] | None = None
    distance_to_sink: int | None = None
    num_chunks: int | None = None
    collective_edges: tuple[Edge, ...] = ()
    forward_edges: tuple[Edge, ...] | None = None
    payload_edges: frozenset[Edge] = frozenset()
    frozen_modules: tuple[str, ...] = ()
    dims: Mapping[str, Mapping[str, int]] | None = field(default=None, hash=False)
    lanes: Communicators = "separate"
    slices: bool = True
    replica: int | None = None
