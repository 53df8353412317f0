"""The lanes of one pipeline by edge: where a rank stands among its stages; sends and receives that do not block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pipegrid.transport.config import as_config
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.errors import P2PConfigError, P2PUsageError
from pipegrid.transport.handle import ReceiveTransfer, Transfer
from pipegrid.transport.handshake import Handshake
from pipegrid.transport.lane import Lane
from pipegrid.transport.opening import open_lanes, resolve_device
from pipegrid.transport.payload import is_single_shape
from pipegrid.transport.pipeline_lanes import direction_lane, pipeline_lanes, placed


class EdgeLanes:
    """What `P2PCommunicator` is without its verbs; see there for the arguments."""

    def __init__(
        self,
        pp_group: ProcessGroup | None = None,
        config: Any = None,
        *,
        placement: Sequence[int] | None = None,
        tensor_shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.pp_group = group = _group(pp_group)
        self.config = as_config(config)
        self._ranks = dist.get_process_group_ranks(group)
        self._placement = None if placement is None else placed(placement, len(self._ranks))
        self.rank = dist.get_rank()
        backend, place = resolve_device(None, device, group)
        self._device = place
        specs = pipeline_lanes(self._ranks, placement=self._placement)
        standing = None
        if tensor_shape is not None:
            if not is_single_shape(tensor_shape):
                raise P2PConfigError(
                    f"tensor_shape is {tensor_shape!r}; it must be one shape, a sequence of sizes of at least 0"
                )
            if self.config.pipeline_dtype is None or self.config.shape_mode not in ("agreed", "given"):
                raise P2PConfigError(
                    f"tensor_shape {tuple(tensor_shape)} fixes the messages, which needs pipeline_dtype (it is "
                    f"{self.config.pipeline_dtype}) and shapes that do not vary (they are {self.config.shape_mode!r})"
                )
            example = torch.empty(tuple(tensor_shape), dtype=self.config.pipeline_dtype, device="meta")
            standing = dict.fromkeys(specs, example)
        self.lanes = open_lanes(specs, config=self.config, backend=backend, device=place, standing=standing)
        self._of_edge: dict[tuple[Edge, Direction], Lane] = {}

    # Where this rank stands

    @property
    def device(self) -> torch.device:
        """Where sent tensors must live and received ones do."""
        return self._device

    @property
    def next_rank(self) -> int:
        """The global rank after this one; the first after the last."""
        return self._ranks[(self.current_stage + 1) % self.total_stages]

    @property
    def prev_rank(self) -> int:
        """The global rank before this one; the last before the first."""
        return self._ranks[(self.current_stage - 1) % self.total_stages]

    @property
    def total_stages(self) -> int:
        """Ranks of the pipeline."""
        return len(self._ranks)

    @property
    def current_stage(self) -> int:
        """This rank's place among them, from 0."""
        return self._ranks.index(self.rank)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds the first stage of the pipeline."""
        return self.current_stage == (0 if self._placement is None else self._placement[0])

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds the last stage of the pipeline."""
        return self.current_stage == (self.total_stages - 1 if self._placement is None else self._placement[-1])

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Chunks per rank, as configured."""
        return self.config.virtual_pipeline_model_parallel_size

    # The asynchronous form

    def lane(self, edge: Edge, direction: Direction) -> Lane:
        """The lane that carries the traffic of an edge in a direction.

        Raises:
            P2PUsageError: there is no such edge, or it does not touch this rank; or they are no `Edge` and
                `Direction`.
        """
        try:
            found = self._of_edge.get((edge, direction))
        except TypeError:  # unhashable, as a list in the place of an edge is
            found = None
        if found is None:
            found = self._of_edge[edge, direction] = self._find(edge, direction)
        return found

    def _find(self, edge: Edge, direction: Direction) -> Lane:
        if not isinstance(edge, Edge):
            raise P2PUsageError(f"the edge is {edge!r}; it must be an Edge such as Edge(0, 1)")
        stages = None if self._placement is None else len(self._placement)
        if edge.destination != edge.source + 1 or edge.source < 0 or (stages and edge.destination >= stages):
            many = "" if stages is None else f" of {stages}"
            raise P2PUsageError(
                f"edge {edge} does not lead from a stage{many} to the next one; this pipeline is a chain"
            )
        source, destination = self._rank_of(edge.source), self._rank_of(edge.destination)
        spec = direction_lane(source, destination, direction)
        if spec not in self.lanes:
            raise P2PUsageError(f"edge {edge} runs between ranks {source} and {destination}; this is rank {self.rank}")
        return self.lanes[spec]

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % self.total_stages if self._placement is None else self._placement[stage]]

    def isend(self, payload: Any, *, edge: Edge, direction: Direction) -> Transfer:
        """Start sending along ``edge`` (forward) or against it (backward). See `Lane.isend`."""
        return self.lane(edge, direction).isend(payload)

    def irecv(self, *, edge: Edge, direction: Direction, shapes: Any = None) -> ReceiveTransfer:
        """Start receiving the next message of ``edge`` in that direction. See `Lane.irecv`."""
        return self.lane(edge, direction).irecv(shapes)

    def batch(self) -> AbstractContextManager[None]:
        """Issue the sends and receives that this thread starts inside as one simultaneous batch."""
        return self.lanes.batch()

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """The ranks at the other ends of ``edges``, to tell them before a step what this rank runs in it.

        Raises:
            P2PUsageError: there is no such edge, or it does not touch this rank.
        """
        return self.lanes.neighbours(self.lane(edge, Direction.FORWARD).peer for edge in edges)

    def renew_shapes(self) -> None:
        """Let the next message of every lane agree on shapes anew; all ranks call it between two steps.

        Raises:
            P2PUsageError: see `Lane.renew`; no lane was renewed then.
        """
        for lane in self.lanes.values():
            lane.require_renewable()
        for lane in self.lanes.values():
            lane.renew()

    def abort(self, reason: str) -> None:
        """End all lanes at once and tell the neighbours why."""
        self.lanes.abort(reason)

    def close(self) -> None:
        """End the lanes and free their groups. Twice is harmless."""
        self.lanes.close()


def _group(given: Any) -> ProcessGroup:
    group = dist.group.WORLD if given is None else given
    if isinstance(group, ProcessGroup):
        return group
    raise P2PConfigError(
        f"pp_group is {given!r}; it must be a process group that this rank ({dist.get_rank()}) is in, or None for the "
        f"world; torch gives ranks outside a new group something else: make the communicator on its members only"
    )
