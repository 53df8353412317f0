"""A slot for each message: lifetimes on one position are intervals, so the first free slot of its size is the fewest.

As many slots of a size are needed as messages of that size are alive at once. Taken in the order of their posts, a
message gets a new slot only where all slots of its size hold one that is alive, so there are never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Index, checked
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan
from pipegrid.plans.plan.dataflow import Dataflow, dataflow_of
from pipegrid.plans.verify import Proof, verify
from pipegrid.search.buffers.buffers import PlanBuffers, PositionBuffers
from pipegrid.search.buffers.lifetimes import lifetimes, posts
from pipegrid.search.buffers.messages import Buffered, BufferKind, SlotArrival


def plan_buffers(
    plan: Plan | Proof,
    *,
    nbytes: int | Mapping[Edge | int, int] = 0,
    ahead: int = 0,
    kinds: Sequence[BufferKind] = ("receives",),
) -> PlanBuffers:
    """The fewest slots for what each position receives, of all its lanes and directions, or has in `kinds`; proved.

    Args:
        plan: a lowered plan, or its proof.
        nbytes: bytes of a message, of all edges or by edge; of activations on the host, by the number of their stage;
            0 is unknown, and all alike. Only messages of one size share a slot. (Messages of one size and different
            dtypes are apart in the memory of a `PipelineRuntime`.)
        ahead: receives that each lane posts before their turn, as ``P2PConfig.receives_ahead`` of a communicator over
            gloo: these slots are taken for longer. 0 where each is posted in its turn.
        kinds: what has slots: ``"receives"`` (a value that skips stages is kept in that of its receive); ``"copies"``,
            which a position keeps of what its stages without a backward give to its later ones; ``"sends"``, each
            copied into its slot; ``"offload"``, activations on the host, in slots of its memory. All others share one
            pool per position.

    Raises:
        PlanError: the plan has faults, or computes alone; or sizes without one of its edges.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> print(plan_buffers(lower(one_f_one_b(3, 6)), nbytes=2**20))
        position  received  a pool per edge  slots      bytes
        --------  --------  ---------------  -----  ---------
        0                6                1      1  1,048,576
        1               12                3      3  3,145,728
        2                6                1      1  1,048,576
        all             24                5      5  5,242,880
        >>> print(plan_buffers(lower(one_f_one_b(3, 6)), kinds=("receives", "sends")))
        position  received  sent  a pool per edge  slots
        --------  --------  ----  ---------------  -----
        0                6     6                4      4
        1               12    12                8      6
        2                6     6                3      3
        all             24    24               15     13
    """
    proof = plan if isinstance(plan, Proof) else verify(plan)
    plan = proof.plan
    flows = dataflow_of(plan)
    if not plan.has_communication and flows.lanes:
        raise PlanError("the plan has computes alone; lower(plan) adds the messages, which need buffers")
    ahead = checked(ahead, Index, "ahead", PlanError)
    kinds = checked(kinds, tuple[BufferKind, ...], "kinds", PlanError)
    positions, by_edge = [], []
    for position in range(plan.num_positions):
        made, apart = (
            position_buffers(
                plan,
                position,
                flows=flows,
                nbytes=nbytes,
                lane_of=lambda message: ((message.peer, message.action.direction), ahead),
                apart=apart,
                kinds=kinds,
            )
            for apart in (None, lambda message: (message.action.edge, message.action.kind, message.action.stage))
        )
        positions.append(made)
        by_edge.append(apart.num_slots)
    return PlanBuffers(tuple(positions), tuple(by_edge))


def position_buffers(
    plan: Plan,
    position: int,
    *,
    lane_of: Callable[[Buffered], tuple[object, int] | None],
    nbytes: int | Mapping[Edge | int, int] = 0,
    flows: Dataflow | None = None,
    apart: Callable[[Buffered], object] | None = None,
    kinds: Sequence[BufferKind] = ("receives",),
) -> PositionBuffers:
    """The fewest slots of one position.

    Args:
        plan: a lowered plan without faults.
        position: of it; with routes, the actor.
        lane_of: the lane of a message that is received, and how many receives of that are posted before their turn;
            None: it has memory of its own.
        nbytes: as of `plan_buffers`.
        flows: `dataflow_of` the plan.
        apart: what messages must have in common to share a slot, beside their size; None: nothing.
        kinds: as of `plan_buffers`.

    Raises:
        PlanError: sizes without one of the edges.

    Examples:
        >>> from pipegrid.plans import lower, one_f_one_b
        >>> position_buffers(lower(one_f_one_b(3, 6)), 1, lane_of=lambda message: (message.peer, 0)).num_slots
        3
    """
    alive = lifetimes(plan, flows or dataflow_of(plan), position, kinds)
    received = {message for message in alive if message.action.kind.is_receive and message.peer != position}
    lanes = {message: lane for message in alive if message in received and (lane := lane_of(message)) is not None}
    posted = {message: life.first for message, life in alive.items()}
    posted |= posts({message: alive[message].first for message in lanes}, lanes)
    lasts = {
        message: life.last
        for message, life in alive.items()
        if life.last is not None and (message in lanes or message not in received)
    }
    size_of = _sizes(nbytes, lasts)
    slots: dict[Buffered, int] = {}
    free: dict[object, list[int]] = {}
    busy: list[tuple[int, int, object]] = []  # last step, slot, what it takes
    numbers = count()
    for message in sorted(lasts, key=posted.__getitem__):
        while busy and busy[0][0] < posted[message]:
            _, slot, kind = heappop(busy)
            heappush(free.setdefault(kind, []), slot)
        kind = message.on_host, size_of[message], None if apart is None else apart(message)
        slots[message] = heappop(free[kind]) if free.get(kind) else next(numbers)
        heappush(busy, (lasts[message], slots[message], kind))
    arrivals = [SlotArrival(message, posted[message], slots[message], size_of[message]) for message in lasts]
    return PositionBuffers(plan, position, arrivals)


def _sizes(nbytes: int | Mapping[Edge | int, int], messages: Iterable[Buffered]) -> dict[Buffered, int]:
    """Bytes of each message, and of what goes to the host."""
    found: dict[Buffered, int] = {}
    known: dict[Edge | int, int] = {}
    for message in messages:
        edge = message.action.edge
        of, name = (message.action.stage, "stage") if edge is None else (edge, "edge")
        if of not in known:
            if isinstance(nbytes, Mapping) and of not in nbytes:
                has = "messages come here or leave" if edge is not None else "activations go to the host"
                raise PlanError(f"nbytes has no size of {name} {of}, whose {has}; give all, or one number")
            size = nbytes[of] if isinstance(nbytes, Mapping) else nbytes
            known[of] = checked(size, Index, f"nbytes of {name} {of}", PlanError)
        found[message] = known[of]
    return found
