"""The proof that a plan runs: nothing missing, nothing twice, everything in time, and no deadlock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from attrs import evolve, field, frozen

from pipegrid.core.fields import Count, checked, shown
from pipegrid.core.lanes import Communicators, LaneSharing
from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.plans.errors import PlanError, PlanFault
from pipegrid.plans.orders.communicators import orders_on, strictest
from pipegrid.plans.orders.of_plan import orders_of_plan
from pipegrid.plans.orders.play import cycles, play
from pipegrid.plans.orders.prove import model_named, prove_order
from pipegrid.plans.plan import Plan, require_plan
from pipegrid.plans.plan.dataflow import dataflow_of
from pipegrid.plans.verify.explain import deadlock
from pipegrid.plans.verify.memory import Peaks, check_offloading, peak_kept, peaks_of
from pipegrid.plans.verify.position import PositionVerifier, check_calls, check_exchanges, check_lanes
from pipegrid.plans.verify.sharding import check_sharding
from pipegrid.plans.verify.table import Batches, Blocking, EventIds, PositionTable


@frozen(slots=False)
class Proof:
    """A plan, and what `verify` has proved of it.

    Attributes:
        plan: the plan that can be run.
        num_actions: of all positions.
        num_messages: between positions.
        rendezvous: the argument of the proof.
        lanes: the argument of the proof.
        batches: the argument of the proof.
        orders: the names of the order models under which it holds; none for computes alone.
        drains: whether it holds if computes wait for the whole device.
        peak_live: per position, the most activations live at once, in microbatches. A stage of n on its position counts
            1/n, from its ``F`` to the end of its ``B`` or ``W``, less the time on the host (``RELEASE`` to ``RELOAD``).
        peak_live_inputs: the same, to the end of its ``B`` or ``I``.
        peak_gathered: per position, the most sharded stages whose parameters are gathered at once.
        peak_kept: per position, the most payloads that have come by edges that skip stages and are kept at once, from
            the receive to the ``B`` or ``I`` of the stage they came to; empty where no edge does.

    Examples:
        >>> proof = verify(lower(gpipe(2, 4)))
        >>> proof.num_messages, proof.drains, proof.peak_live
        (8, True, (4.0, 4.0))
    """

    plan: Plan = field(repr=False)
    num_actions: int
    num_messages: int
    rendezvous: bool
    lanes: Communicators
    batches: Batches
    orders: tuple[str, ...]
    drains: bool
    peak_live: tuple[float, ...]
    peak_live_inputs: tuple[float, ...]
    peak_gathered: tuple[int, ...]
    peak_kept: tuple[float, ...] = ()

    @property
    def num_positions(self) -> int:
        """Positions of the plan."""
        return self.plan.num_positions

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return self.plan.num_microbatches

    @property
    def communicates(self) -> bool:
        """False for a plan of computes alone, where a result is taken to reach other positions at once."""
        return self.plan.has_communication

    @cached_property
    def communicators(self) -> tuple[int, ...]:
        """Per position, the communicators of each of its ranks; on NCCL, each has a stream of its own.

        The formula: communicators of lanes that start or end at the position (a lane has one of its own; with shared
        lanes, each position that it exchanges messages with has one) plus groups it is a member of. A middle position
        of a chain has 4 separate lanes (activations in and out, gradients in and out), or 2 shared ones. A lane that no
        message of the plan uses is not counted; nor are the groups inside modules (tensor, context, data parallel) and
        the pieces of a bridge, which the plan does not name.
        """
        numbers, flows = self.lanes.numbers if isinstance(self.lanes, LaneSharing) else {}, dataflow_of(self.plan)
        opened: set[tuple[int, object]] = set()
        for lane in flows.lanes:
            ends = lane.source, lane.destination
            one = frozenset(ends) if self.lanes == "shared" else numbers.get(lane, lane)
            opened |= {(position, one) for position in ends}
        count = Counter(position for position, _ in opened)
        count.update(position for members in flows.groups.values() for position in members)
        return tuple([count[position] for position in range(self.num_positions)])

    def __str__(self) -> str:
        blocking = "computes alone"
        if self.communicates:
            lanes = "given communicators" if isinstance(self.lanes, LaneSharing) else f"{self.lanes} lanes"
            under = "every order model" if len(self.orders) == len(ORDER_MODELS) else ", ".join(self.orders)
            sends = "even if sends block" if self.rendezvous else "if sends are buffered"
            drained = " and with waits for the whole device" if self.drains else ""
            blocking = f"no deadlock {sends}, {lanes}, under {under}{drained}"
        slices = f" of {self.plan.num_slices} slices" if self.plan.num_slices > 1 else ""
        gathered = max(self.peak_gathered)
        sharded = f"; parameters there for each compute, of at most {gathered} stages at once" if gathered else ""
        kept = f", {max(self.peak_kept):g} payloads of skips kept" if self.peak_kept else ""
        routes = self.plan.routes
        what = f"{self.num_positions} positions, {self.num_microbatches} microbatches{slices}, "
        if routes is not None:
            what = f"{self.num_positions} actors of {routes.num_replicas} replicas, {self.num_microbatches} units, "
        return (
            f"{what}{self.num_actions} actions, {self.num_messages} messages: each once and in time; "
            f"{blocking}{sharded}; at most {max(self.peak_live):g} microbatches live on a position{kept}, "
            f"{max(self.communicators)} communicators per rank"
        )


def verify(
    plan: Plan,
    *,
    rendezvous: bool = True,
    memory_limit: float | Sequence[float] | None = None,
    lanes: Communicators = "separate",
    batches: Batches = "in_order",
    window: int | None = None,
    order: OrderModel | str | None = None,
    drains: bool = True,
) -> Proof:
    """Prove that ``plan`` can be run, or list all its faults.

    Proved: every stage runs each microbatch forward once and backward once (``B``, or ``I`` and later ``W``) on each
    position that holds it; each compute finds its inputs, made before it on its position or received before it; each
    message is sent once and received once, in the same order on its lane; members name a group's collectives in one
    order; the positions of a stage that lies on several do its computes in one order, as their ranks may communicate
    inside it; and no positions wait for each other in a cycle. The slices of a microbatch run forward in the order of
    the sequence, as each reads the keys and values of those before it, and backward in reverse.

    ``rendezvous``: a position goes on from a message only when its partner has come to the other end of it. This is the
    worst that NCCL may do. Without it a send is buffered, a receive is posted, and only the compute that needs the data
    waits. ``lanes``: with ``"separate"``, each ordered pair of positions has a communicator for activations and one for
    gradients, and order matters within each; with ``"shared"``, a pair of positions has one, and their batches must
    match one to one; or what `fewest_communicators` returns for this plan or another: then the proof is under each
    order model, in place of a rule. ``batches``: with ``"in_order"``, the messages of a batch block one after the other
    as written (a GPU that runs one communication kernel at a time, in the order of their launch); with
    ``"simultaneous"``, none of them waits for another of the batch. A batch on a shared lane is one call, and always
    simultaneous.

    That rule is stricter than any backend and covers all order models (`pipegrid.core.order`); with
    ``"simultaneous"`` or shared lanes all but ``"nccl-serial"``; without rendezvous ``"gloo"``. (A message may have
    several routes at one position, between stages on several: then ``"nccl-serial"`` only where it is found to end.)
    ``order``: one model in its place, where a plan that is safe on one backend need not be so on all; ``drains``: then
    also prove that a compute may wait for all that its rank has launched, as a CUDA call that waits for the device does
    (loading a module, cudaFree, cudaHostAlloc). Without ``order`` that is always proved, where there is rendezvous.

    ``window``: the most stages of a position whose parameters may be gathered at once; None sets no limit. A stage with
    an ``UNSHARD`` is proved to be gathered before each of its computes, reduced (``REDUCE_GRAD``) after its last
    backward, and freed at the end.

    ``memory_limit`` holds what is live on the device. Activations that go to the host are proved to be copied out after
    their ``F``, freed, and on their way back before their backward.

    A compute of a stage that lies on several positions starts when all of them have come to it. A plan of computes
    alone is verified as if data reached other positions at once. Time and memory are linear in the number of actions.

    Raises:
        PlanError: ``faults`` has every fault, with position and step; a cycle is printed action by action. Cycles are
            looked for only where nothing else is wrong.

    Examples:
        >>> verify(lower(zero_bubble_v(4, 8))).peak_live
        (4.0, 4.0, 4.0, 4.0)
    """
    require_plan(plan)
    lanes = checked(lanes, Communicators, "lanes", PlanError)
    checked(batches, Batches, "batches", PlanError)
    checked(window, Count | None, "window", PlanError)
    limits = _limits(memory_limit, plan)
    blocking = Blocking(rendezvous=rendezvous, lanes=lanes, batches=batches)
    if order is None and not isinstance(lanes, LaneSharing):
        proof = _proof(plan, blocking, limits, window)
        names, drained = models_covered(plan, blocking) if plan.has_communication else (), rendezvous
    else:
        if batches != "in_order":
            raise PlanError(f"batches is {batches!r} beside order; an order model says how batches block, leave it out")
        proof = evolve(_proof(plan, evolve(blocking, rendezvous=False), limits, window), rendezvous=rendezvous)
        names, drained = _require_ends(plan, blocking, order, drains=drains)
    return evolve(proof, orders=names, drains=drained) if plan.has_communication else proof


def _require_ends(
    plan: Plan, blocking: Blocking, order: OrderModel | str | None, *, drains: bool
) -> tuple[tuple[str, ...], bool]:
    """The names of the order models under which a plan ends, and whether with drains.

    Raises:
        PlanError: it gets stuck under one of them.
    """
    models = tuple(ORDER_MODELS.values()) if order is None else (model_named(order),)
    drained = drains and not all(one.host_waits for one in models)
    if isinstance(blocking.lanes, LaneSharing):
        lacking = [lane for lane in dataflow_of(plan).lanes if lane not in blocking.lanes.numbers]
        if lacking:
            text = f"lane {lacking[0]} is on none of the communicators; give the fewest_communicators of this plan"
            raise PlanError("the plan has 1 fault:", faults=(PlanFault("communicator", text),))
    for model in strictest(models, drains=drained) if plan.has_communication else ():
        require_end(plan, model, blocking, drains=drained and not model.host_waits)
    return tuple(one.name for one in models), drained


def _proof(plan: Plan, blocking: Blocking, limits: Sequence[float], window: int | None) -> Proof:
    """The proof of ``plan`` under one rule of waiting, with a memory limit per position."""
    num_steps = sum(map(len, plan.positions))
    if plan.num_pieces > num_steps:  # before memory is taken for each piece: a compute is a step
        slices = f" of {plan.num_slices} slices" if plan.num_slices > 1 else ""
        message = f"{num_steps} steps cannot be the work of {plan.num_microbatches} microbatches{slices}"
        raise PlanError("the plan has 1 fault:", faults=(PlanFault("missing", message),))
    ids = EventIds(plan)
    verifiers = [
        PositionVerifier(PositionTable(ids, position, blocking), steps) for position, steps in enumerate(plan.positions)
    ]
    shards = any(verifier.shards for verifier in verifiers)
    gathered = check_sharding(plan, window) if shards else [([], 0)] * plan.num_positions
    faults = _twins(plan) + list_faults(ids, verifiers)
    faults += [fault for found, _ in gathered for fault in found]
    peaks: list[Peaks] = []
    for verifier, limit in zip(verifiers, limits, strict=True):
        if not verifier.faults:
            peaks.append(peaks_of(plan, verifier.position))
            faults += check_offloading(plan, verifier.position) if verifier.offloads else []
            live = peaks[-1].live
            if live > limit + 1e-9:
                text = f"{live:g} microbatches are live at once; the limit is {limit:g}"
                faults.append(PlanFault("memory", text, verifier.position))
    if faults:
        raise PlanError(f"the plan has {len(faults)} fault{'s' if len(faults) > 1 else ''}:", faults=faults)
    return Proof(
        plan=plan,
        num_actions=sum(verifier.num_actions for verifier in verifiers),
        num_messages=sum(len(sent) for verifier in verifiers for sent in verifier.sent.values()),
        rendezvous=blocking.rendezvous,
        lanes=blocking.lanes,
        batches=blocking.batches,
        orders=(),
        drains=False,
        peak_live=tuple(peak.live for peak in peaks),
        peak_live_inputs=tuple(peak.inputs for peak in peaks),
        peak_gathered=tuple(peak for _, peak in gathered),
        peak_kept=tuple(peak_kept(plan, place) for place in range(plan.num_positions)) if plan.graph.skips else (),
    )


def _twins(plan: Plan) -> list[PlanFault]:
    """The faults of positions that hold the same stages: a position is *all* ranks that do. Any may be empty."""
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    faults = []
    for position, stages in enumerate(plan.stages_at):
        other = first.setdefault((position // plan.positions_each, stages), position)
        if stages and other != position:
            what = f"holds stages {', '.join(map(str, stages))}, exactly as position {other} does"
            rule = "a position is all the ranks that hold the same stages (replicas act alike), so make the two one"
            faults.append(PlanFault("position", f"{what}; {rule}", position))
    return faults


def _limits(memory_limit: float | Sequence[float] | None, plan: Plan) -> Sequence[float]:
    if isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence):
        return (as_limit(memory_limit),) * plan.num_positions
    if len(memory_limit) != plan.num_positions:
        raise PlanError(f"memory_limit has {len(memory_limit)} numbers; the plan has {plan.num_positions} positions")
    return [as_limit(limit) for limit in memory_limit]


def as_limit(memory_limit: float | None) -> float:
    """``memory_limit`` as a number: infinite for None."""
    if memory_limit is None:
        return math.inf
    is_number = isinstance(memory_limit, int | float) and not isinstance(memory_limit, bool)
    if not is_number or not memory_limit >= 0:  # the comparison is False for nan, too
        raise PlanError(f"memory_limit is {shown(memory_limit)}; give a number from 0, or None for no limit")
    try:
        return float(memory_limit)
    except OverflowError:  # an integer above all floats
        return math.inf


def list_faults(ids: EventIds, verifiers: Sequence[PositionVerifier]) -> list[PlanFault]:
    """Every fault of the steps: of each position, then between positions; cycles last, and only without others."""
    faults = [fault for verifier in verifiers for fault in verifier.faults]
    faults += [*check_lanes(ids, verifiers), *check_calls(ids, verifiers)]
    faults = faults or list(check_exchanges(verifiers))
    if faults:
        return faults
    programs = [verifier.program for verifier in verifiers]
    at = play(programs, ids.size)
    if all(index == len(program.operations) for index, program in zip(at, programs, strict=True)):
        return []
    positions, in_order = [verifier.steps for verifier in verifiers], verifiers[0].table.blocking.in_order
    return [deadlock(cycle, positions, in_order=in_order) for cycle in cycles(programs, at)]


def models_covered(plan: Plan, blocking: Blocking) -> tuple[str, ...]:
    """The names of the order models under which a plan ends that is proved by a rule of blocking.

    With rendezvous a position holds, compute and all, until the other end of what it exchanges has come. Streams hold
    less: what they wait for has come earlier in that play. So it covers each model whose batches start their messages
    in an order no stricter than the rule's, and calls that wait for the whole device. Without rendezvous only a
    compute waits, for its inputs, as on gloo.

    A message between stages that lie on several positions may have several routes at one of them. The rule starts all
    of these at once, and a device that runs one kernel at a time does not: for that model the plan is played.
    """
    if not blocking.rendezvous:
        return ("gloo",)
    names = [name for name, model in ORDER_MODELS.items() if blocking.in_order or model.batched != "rank"]
    if blocking.in_order and any(_fans(flow.routes) for flow in dataflow_of(plan).between_positions):
        for name in [name for name in names if ORDER_MODELS[name].batched == "rank"]:
            try:
                require_end(plan, ORDER_MODELS[name], blocking, drains=True)
            except PlanError:
                names.remove(name)
    return tuple(names)


def _fans(routes: Sequence[tuple[int, int]]) -> bool:
    """Whether several of these routes of one message start or end at a position."""
    return any(count > 1 for count in Counter(end for route in routes for end in route).values())


def require_end(plan: Plan, model: OrderModel, blocking: Blocking, *, drains: bool) -> None:
    """Raise for a plan, right in all else, that hangs under an order model: a cycle is named launch by launch."""
    if isinstance(blocking.lanes, LaneSharing):
        orders = orders_on(plan, blocking.lanes.numbers, model)
    else:
        orders = orders_of_plan(plan, lanes=blocking.lanes)
    prove_order(orders, model, buffered=not blocking.rendezvous, drains=drains)
