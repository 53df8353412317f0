"""Objects with the verbs of a communicator that do not derive from `Communicator`. No torch.

This is the one place that looks for optional members. All else uses `Communicator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipegrid.core.fields import index_of
from pipegrid.transport.base import Communicator, Port, Verbs
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.job import JobTopology

if TYPE_CHECKING:
    from pipegrid.core.edge import Direction, Edge

_METHODS = (
    "port_across",
    "collective",
    "batch",
    "in_order",
    "patient",
    "neighbours",
    "neighbours_across",
    "check",
    "abort",
    "close",
)


class AdaptedCommunicator(Communicator):
    """An object with some of a communicator's members, or None, which has none.

    Attributes:
        given: the object.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.rank, self.device = getattr(given, "rank", None), getattr(given, "device", None)
        vars(self).update({name: _method(given, name) for name in _METHODS if callable(getattr(given, name, None))})
        config = getattr(given, "config", None)
        self.deadline = float(getattr(given, "deadline", None) or getattr(config, "deadline", None) or self.deadline)
        self.exchanges = callable(getattr(given, "collective", None))
        self.fixed_shapes = getattr(config, "shape_mode", "header") not in ("header", "learned")

    @property
    def batches(self) -> bool:
        """As the object says."""
        return bool(getattr(self.given, "batches", True))

    def lacks(self, *verbs: str) -> tuple[Any, str] | None:
        """As the object has them or not."""
        return next(((self.given, verb) for verb in verbs if not callable(getattr(self.given, verb, None))), None)

    @property
    def job(self) -> JobTopology:
        """The object's own, or one of what it says of its stages."""
        given = self.given
        own = getattr(given, "job", None)
        if isinstance(own, JobTopology):
            return own
        ends = [index_of(getattr(given, name, None)) for name in ("total_stages", "current_stage")]
        graph = getattr(given, "graph", None) if hasattr(given, "stages") else None
        if graph is None:
            placement = _one_each(getattr(given, "placement", None))
        else:
            placement = getattr(getattr(given, "positions", None), "placement", None)
        total, here = ends if None not in ends else (0, 0)
        grids = getattr(given, "module_to_grid_map", None)
        forward = getattr(given, "forward_edges", None)
        return JobTopology(
            total_stages=total or 0,
            current_stage=here or 0,
            graph=graph,
            stages=tuple(getattr(given, "stages", ())),
            placement=placement,
            distance_to_sink=getattr(given, "distance_to_sink", None),
            num_chunks=getattr(given, "virtual_pipeline_model_parallel_size", None),
            collective_edges=tuple(getattr(given, "collective_edges", ())),
            forward_edges=None if forward is None else tuple(forward),
            payload_edges=frozenset(getattr(given, "payload_edges", ())),
            frozen_modules=tuple(getattr(given, "frozen_modules", ())),
            dims=None if grids is None else {name: dims_of(grid) for name, grid in grids.items()},
            lanes=getattr(getattr(given, "config", None), "communicators", "separate"),
        )

    def port(self, edge: Edge, direction: Direction) -> Port:
        """The object's verbs for the edge; its `port` where it has no verbs."""
        if self.lacks("isend", "irecv") is None:
            along = {"edge": edge, "direction": direction}
            return Verbs(partial(self.given.isend, **along), partial(self.given.irecv, **along))
        if self.lacks("port") is None:
            found: Port = self.given.port(edge, direction)
            return found
        raise P2PUsageError(f"the communicator {self.given!r} has neither port(edge, direction) nor isend and irecv")

    def describe(self) -> Mapping[str, Any]:
        """`Lane.describe` of each lane, where the object has any."""
        lanes = getattr(self.given, "lanes", None) or {}
        return {str(spec): lane.describe() for spec, lane in lanes.items()}


def as_communicator(given: Any) -> Communicator:
    """``given``, if it derives from `Communicator`, else an `AdaptedCommunicator` for it; also for None."""
    return given if isinstance(given, Communicator) else AdaptedCommunicator(given)


def _method(given: Any, name: str) -> Callable[..., Any]:
    """The method that the object has at the time of a call."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(given, name)(*arguments, **named)

    return call


def dims_of(grid: Any) -> dict[str, int]:
    """The sizes of a grid by dim."""
    return dict(zip(grid.dim_names, grid.shape, strict=True))


def _one_each(places: Any) -> tuple[tuple[int, ...], ...] | None:
    return None if places is None else tuple((place,) for place in places)
