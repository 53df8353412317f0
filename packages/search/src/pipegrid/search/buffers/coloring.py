"""A slot for each message: lifetimes on one position are intervals, so the first free slot of its size is the fewest.

As many slots of a size are needed as messages of that size are alive at once. Taken in the order of their posts, a
message gets a new slot only where all slots of its size hold one that is alive, so there are never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Index, checked
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan
from pipegrid.plans.plan.dataflow import Dataflow, dataflow_of
from pipegrid.plans.verify import Proof, verify
from pipegrid.search.buffers.buffers import PlanBuffers, PositionBuffers
from pipegrid.search.buffers.lifetimes import lifetimes, posts
from pipegrid.search.buffers.messages import ReceivedMessage, SlotArrival


def plan_buffers(plan: Plan | Proof, *, nbytes: int | Mapping[Edge, int] = 0, ahead: int = 0) -> PlanBuffers:
    """The fewest slots in which the messages of each position can arrive, of all its lanes and directions, proved.

    Args:
        plan: a lowered plan, or its proof.
        nbytes: bytes of a message, of all edges or by edge; 0 is unknown, and all alike. Only messages of one size
            share a slot. (Messages of one size and different dtypes are apart in the memory of a `PipelineRuntime`.)
        ahead: receives that each lane posts before their turn, as ``P2PConfig.receives_ahead`` of a communicator over
            gloo: these slots are taken for longer. 0 where each is posted in its turn.

    Raises:
        PlanError: the plan has faults, or computes alone; or sizes without one of its edges.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> print(plan_buffers(lower(one_f_one_b(3, 6)), nbytes=2**20))
        position  messages  a pool per edge  slots      bytes
        --------  --------  ---------------  -----  ---------
        0                6                1      1  1,048,576
        1               12                3      3  3,145,728
        2                6                1      1  1,048,576
        all             24                5      5  5,242,880
    """
    proof = plan if isinstance(plan, Proof) else verify(plan)
    plan = proof.plan
    flows = dataflow_of(plan)
    if not plan.has_communication and flows.lanes:
        raise PlanError("the plan has computes alone; lower(plan) adds the messages, which need buffers")
    ahead = checked(ahead, Index, "ahead", PlanError)
    positions, by_edge = [], []
    for position in range(plan.num_positions):
        made, apart = (
            position_buffers(
                plan,
                position,
                flows=flows,
                nbytes=nbytes,
                lane_of=lambda message: ((message.sender, message.receive.direction), ahead),
                apart=apart,
            )
            for apart in (None, lambda message: (message.receive.edge, message.receive.direction))
        )
        positions.append(made)
        by_edge.append(apart.num_slots)
    return PlanBuffers(tuple(positions), tuple(by_edge))


def position_buffers(
    plan: Plan,
    position: int,
    *,
    lane_of: Callable[[ReceivedMessage], tuple[object, int] | None],
    nbytes: int | Mapping[Edge, int] = 0,
    flows: Dataflow | None = None,
    apart: Callable[[ReceivedMessage], object] | None = None,
) -> PositionBuffers:
    """The fewest slots of one position.

    Args:
        plan: a lowered plan without faults.
        position: of it; with routes, the actor.
        lane_of: the lane of a message, and how many receives of that are posted before their turn; None: it has memory
            of its own.
        nbytes: as of `plan_buffers`.
        flows: `dataflow_of` the plan.
        apart: what messages must have in common to share a slot, beside their size; None: nothing.

    Raises:
        PlanError: sizes without one of the edges.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> position_buffers(lower(one_f_one_b(3, 6)), 1, lane_of=lambda message: (message.sender, 0)).num_slots
        3
    """
    alive = lifetimes(plan, flows or dataflow_of(plan), position)
    lanes = {message: lane for message in alive if (lane := lane_of(message)) is not None}
    posted = posts({message: alive[message].received for message in lanes}, lanes)
    lasts = {message: last for message in lanes if (last := alive[message].last) is not None}
    size_of = _sizes(nbytes, (message.receive.edge for message in lasts))
    slots: dict[ReceivedMessage, int] = {}
    free: dict[object, list[int]] = {}
    busy: list[tuple[int, int, object]] = []  # last step, slot, what it takes
    count = 0
    for message in sorted(lasts, key=posted.__getitem__):
        while busy and busy[0][0] < posted[message]:
            _, slot, kind = heappop(busy)
            heappush(free.setdefault(kind, []), slot)
        kind = size_of[message.receive.edge], None if apart is None else apart(message)
        there = free.get(kind)
        if there:
            slot = heappop(there)
        else:
            slot, count = count, count + 1
        slots[message] = slot
        heappush(busy, (lasts[message], slot, kind))
    arrivals = [
        SlotArrival(message, posted[message], slots[message], size_of[message.receive.edge]) for message in lasts
    ]
    return PositionBuffers(plan, position, arrivals)


def _sizes(nbytes: int | Mapping[Edge, int], edges: Iterable[Edge | None]) -> dict[Edge | None, int]:
    """Bytes of a message of each edge."""
    found: dict[Edge | None, int] = {}
    for edge in edges:
        size = nbytes
        if isinstance(nbytes, Mapping):
            if edge is None or edge not in nbytes:
                raise PlanError(
                    f"nbytes has no size of edge {edge}, whose messages come here; give all edges, or one number"
                )
            size = nbytes[edge]
        found[edge] = checked(size, Index, f"nbytes of edge {edge}", PlanError)
    return found
