"""Running a ``COLLECTIVE`` of a plan: what a stage on the very ranks of another one exchanges with it.

An edge that a group carries joins stages that share ranks but hold the data in different ways, such as an encoder
on ``dp 2`` over a language model on ``pp 2``. All positions of both stages come to the action together, and leave
it when what travels has arrived, as the proof of the plan has it: whoever waited later instead could make another
member wait for something that comes after.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from pipegrid.schedules.errors import PlanMismatchError
from pipegrid.schedules.plan.actions import ActionKind
from pipegrid.schedules.plan.plan import actions_of

if TYPE_CHECKING:
    from pipegrid.schedules.plan.plan import Plan
    from pipegrid.transport.edge import Direction, Edge
    from pipegrid.transport.protocol import Handle, ReceiveHandle


@runtime_checkable
class CollectiveCommunicator(Protocol):
    """A communicator that can exchange among all ranks of two stages, some of which hold both."""

    def collective(
        self, payload: Any, *, edge: Edge, direction: Direction
    ) -> tuple[Handle | None, ReceiveHandle | None]:
        """Start the exchange; the send where this rank gives something, and the receive where it gets something."""
        ...


def exchange(
    communicator: Any, payload: Any, edge: Edge, direction: Direction, *, deadline: float | None
) -> tuple[Handle | None, ReceiveHandle | None]:
    """Execute a collective that `check_collectives` has passed: what this rank sends, and what has arrived for it."""
    sending, receiving = cast("CollectiveCommunicator", communicator).collective(
        payload, edge=edge, direction=direction
    )
    if receiving is not None:
        receiving.wait(deadline)
    return sending, receiving


def check_collectives(plan: Plan, position: int, communicator: Any) -> None:
    """Refuse a plan whose collectives are not those that the communicator's modules need.

    Raises:
        PlanMismatchError: an edge that the communicator serves as a collective, without a group that carries it; a
            ``COLLECTIVE`` in a batch, or one that moves nothing along an edge; a communicator without collectives.
    """
    held = plan.stages_at[position]
    _check_shared(plan, held, getattr(communicator, "collective_edges", ()))
    collectives = []
    for step in plan.positions[position]:
        found = [action for action in actions_of(step) if action.kind is ActionKind.COLLECTIVE]
        collectives += found
        if found and isinstance(step, tuple):
            raise PlanMismatchError(
                f"position {position} has {found[0]} in a batch; it waits until data has arrived, for which the rest "
                "of the batch would have to be issued: let it stand alone"
            )
    if collectives and not isinstance(communicator, CollectiveCommunicator):
        raise PlanMismatchError(
            f"position {position} has {collectives[0]}, but a {type(communicator).__name__} has no collective(); "
            "modules that share ranks run on a MultiModulePipelineCommunicator"
        )
    for action in collectives:
        if action.edge is None:
            raise PlanMismatchError(
                f"position {position} has {action}, which moves nothing along an edge; a runtime does not know what it "
                "is for: leave it out, or name the edge"
            )


def _check_shared(plan: Plan, held: Collection[int], needed: Collection[Edge]) -> None:
    for edge in plan.graph.stage_edges:
        if edge in plan.collective_edges or (edge.source not in held and edge.destination not in held):
            continue
        sources, destinations = plan.placement[edge.source], plan.placement[edge.destination]
        shared = sources != destinations and not set(sources).isdisjoint(destinations)
        if shared or edge in needed:
            (source, _), (destination, _) = map(plan.graph.module_of, (edge.source, edge.destination))
            raise PlanMismatchError(
                f"edge {edge} joins {source!r} on positions {list(sources)} and {destination!r} on positions "
                f"{list(destinations)}, where ranks of one position exchange among themselves: what crosses is a "
                f"COLLECTIVE. Lower the plan with collectives={{Edge({edge.source}, {edge.destination}): 'a name'}}"
            )
