"""The effects of all actions: what each kind does on a rank, one function per kind or family of kinds.

They are called when a program is made, and look up there what the action works on; a step only calls what they return.
`PipelineRuntime.register` puts a function of the user around the effect of a kind, or in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from attrs import evolve, frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan import OFFLOADING, SHARDING, Action, ActionKind, step_text
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.preflight import reducer_name
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.offload import Offload
from pipegrid.schedules.runtime.stages.shared_calls import SharedQueue
from pipegrid.schedules.runtime.stages.stage import for_another_replica
from pipegrid.schedules.runtime.stages.stage_runner import StageRunner

Call: TypeAlias = Callable[[], None]
Effect: TypeAlias = Callable[[Action, Call], None]
"""A function of the user for a kind of action: called with the action, and with what it does by itself."""
PairEffect: TypeAlias = Callable[[tuple[Action, ...], Call, Call], None]
"""A function of the user for pairs: called with both actions, and with what runs the forward and the backward."""


@frozen
class Bound:
    """An action and the call that executes it.

    Attributes:
        run: executes it; waits for its inputs, or for room to send, if nobody has.
        waits: wait for these. Called before ``run`` where that is timed (with hooks, or an `Effect`) or in a batch.
        apart: whether ``waits`` are called in any case.
        after: what follows, such as giving back memory that is read here for the last time.
    """

    action: Action
    run: Call
    waits: tuple[Call, ...] = ()
    apart: bool = False
    after: tuple[Call, ...] = ()


def forward(at: BoundPosition, action: Action) -> Bound:
    """``F``: the stage's forward, on what has arrived."""
    runner, piece = at.runner(action), at.plan.piece_of(action)
    run: Call = partial(StageRunner.forward, runner, piece)
    routes, here = at.plan.routes, at.number // at.plan.positions_each
    if routes is not None and routes.num_replicas > 1 and routes.home(piece) != here:
        run = partial(for_another_replica, runner.stage, run)
    return Bound(action, run, _arrivals(runner.arriving, piece))


def backward(at: BoundPosition, action: Action) -> Bound:
    """``B``: gradients of inputs and parameters at once; ``I``: those of inputs, which the stage before waits for."""
    runner, piece = at.runner(action), at.plan.piece_of(action)
    run = StageRunner.backward if action.kind is ActionKind.B else StageRunner.backward_inputs
    return Bound(action, partial(run, runner, piece), _arrivals(runner.gradients_in, piece))


def backward_weights(at: BoundPosition, action: Action) -> Bound:
    """``W``: the gradients of parameters, later; of a sharded stage once these are gathered (no hook waits there)."""
    run = partial(StageRunner.backward_weights, at.runner(action), at.plan.piece_of(action))
    if action.stage not in at.sharded:
        return Bound(action, run)
    gathered = at.sharded[action.stage].wait
    return Bound(action, in_turn([gathered, run]), (gathered,))


def send(at: BoundPosition, action: Action) -> Bound:
    """``SEND_F``, ``SEND_B``: post the send of what a compute has put into its queue, to each that needs it."""
    queues, piece = at.sends_of(action), at.plan.piece_of(action)
    runs = [partial(SendQueue.send, queue, piece, action) for queue in queues]
    return Bound(action, _at_once(at, runs), tuple([partial(SendQueue.make_room, queue) for queue in queues]))


def receive(at: BoundPosition, action: Action) -> Bound:
    """``RECV_F``, ``RECV_B``: post the receive; the compute that takes the payload waits for it."""
    piece = at.plan.piece_of(action)
    runs = [partial(RecvQueue.receive, queue, piece, action) for queue in at.receives_of(action)]
    return Bound(action, _at_once(at, runs))


def collective(at: BoundPosition, action: Action) -> Bound:
    """``COLLECTIVE``: an exchange among ranks that hold both stages."""
    sends, receives = next(iter(at.sends_of(action)), None), next(iter(at.receives_of(action)), None)
    piece, edge, direction = at.plan.piece_of(action), action.edge, action.direction
    assert edge is not None  # by Action's own validation, as the direction
    assert direction is not None

    def run() -> None:
        """Every position of both stages leaves with its data: a later wait could hold up a member at a later action."""
        payload = None
        if sends is not None:
            sends.make_room()
            payload = sends.payload(piece)
        sending, receiving = at.communicator.collective(payload, edge=edge, direction=direction)
        if receiving is not None:
            receiving.wait(None if receives is None else receives.deadline)
        if sending is not None and sends is not None:
            sends.sent(piece, action, sending)
        if receiving is not None and receives is not None:
            receives.expect(piece, action, receiving)

    return Bound(action, run, () if sends is None else (partial(SendQueue.make_room, sends),))


def reduce(at: BoundPosition, action: Action) -> Bound:
    """``REDUCE``: the reducer that the runtime was given for this group or stage."""
    return Bound(action, at.reducers[reducer_name(action)])


def shard(at: BoundPosition, action: Action) -> Bound:
    """``UNSHARD``: start to gather the stage's parameters; ``RESHARD``: free them; ``REDUCE_GRAD``: reduce-scatter."""
    of = at.sharded[action.stage]
    effects = {ActionKind.UNSHARD: of.unshard, ActionKind.RESHARD: of.reshard, ActionKind.REDUCE_GRAD: of.reduce}
    return Bound(action, effects[action.kind])


def offload(at: BoundPosition, action: Action) -> Bound:
    """``OFFLOAD``: copy what a forward has saved to the host; ``RELEASE``: free it here; ``RELOAD``: copy it back."""
    flight, piece = at.runner(action).flight, at.plan.piece_of(action)
    if action.kind is ActionKind.OFFLOAD:
        return Bound(action, partial(flight.offload, piece))
    move = Offload.free if action.kind is ActionKind.RELEASE else Offload.back

    def run() -> None:
        move(flight.offloads[piece])

    return Bound(action, run)


EFFECTS: Mapping[ActionKind, Callable[[BoundPosition, Action], Bound]] = {
    ActionKind.F: forward,
    ActionKind.B: backward,
    ActionKind.I: backward,
    ActionKind.W: backward_weights,
    ActionKind.SEND_F: send,
    ActionKind.SEND_B: send,
    ActionKind.RECV_F: receive,
    ActionKind.RECV_B: receive,
    ActionKind.COLLECTIVE: collective,
    ActionKind.REDUCE: reduce,
    **dict.fromkeys(SHARDING, shard),
    **dict.fromkeys(OFFLOADING, offload),
}


def bind(at: BoundPosition, action: Action, registered: Mapping[ActionKind, Effect]) -> Bound:
    """An action with its effect, inside of the function registered for its kind."""
    bound = EFFECTS[action.kind](at, action)
    effect = registered.get(action.kind)
    return bound if effect is None else evolve(bound, run=partial(_call, effect, action, bound.run), apart=True)


def _call(effect: Effect, action: Action, run: Call) -> None:
    """Call ``effect``, which may leave out or repeat a reduction alone: other actions feed each other, once."""
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        if calls == 1 or action.kind is ActionKind.REDUCE:
            run()

    effect(action, counted)
    if calls != 1 and action.kind is not ActionKind.REDUCE:
        raise StepArgumentError(
            f"the function registered for {action.kind} called run() {calls} times at {action}; it is called once for "
            "every kind but REDUCE"
        )


def together(effect: PairEffect, pair: tuple[Action, ...], runs: Sequence[Call]) -> None:
    """Call ``effect``, which may interleave both computes and runs each once."""
    calls = [0, 0]

    def counted(half: int) -> None:
        calls[half] += 1
        if calls[half] == 1:
            runs[half]()

    effect(pair, partial(counted, 0), partial(counted, 1))
    if calls != [1, 1]:
        raise StepArgumentError(
            f"the function registered for pairs called forward() {calls[0]} times and backward() {calls[1]} times at "
            f"{step_text(pair)}; it calls each once"
        )


def in_turn(calls: Sequence[Call]) -> Call:
    """One call of several."""

    def run() -> None:
        for call in calls:
            call()

    return run


def batched(at: BoundPosition, calls: Sequence[Call]) -> Call:
    """One call of several, whose transfers start as one batch."""
    batch, inside = at.communicator.batch, in_turn(calls)

    def run() -> None:
        with batch():
            inside()

    return run


def _at_once(at: BoundPosition, runs: Sequence[Call]) -> Call:
    """The call of an action of one message, or of several, none of which waits for another."""
    if len(runs) == 1:
        return runs[0]
    return batched(at, runs) if at.communicator.batches else in_turn(runs)


def _arrivals(queues: Iterable[RecvQueue | SharedQueue], piece: int) -> tuple[Call, ...]:
    return tuple([partial(queue.wait, piece) for queue in queues if not queue.local])
