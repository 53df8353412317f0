"""Checks before the first message: a plan that this rank can run with its stages, communicator and reducers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from torch.nn.parallel import DistributedDataParallel

from pipegrid.bridges import VTPCommunicator
from pipegrid.schedules.errors import PlanMismatchError, ReductionError, RuntimeArgumentError
from pipegrid.schedules.fsdp import is_fsdp
from pipegrid.schedules.plan import SHARDING, Action, ActionKind, actions_of, require_plan
from pipegrid.schedules.runtime.hooks import Hook
from pipegrid.schedules.runtime.stage import modules_of
from pipegrid.schedules.verify import Proof, dataflow_of, verify
from pipegrid.topology.fields import Index, Seconds, checked, instance, shown

if TYPE_CHECKING:
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.edge import Direction, Edge
    from pipegrid.transport.protocol import Handle, ReceiveHandle

_Stages = Annotated[Any, instance(Mapping, "a dict of this rank's stages by global number")]
_Hook = Annotated[Any, instance(Hook, "a hook with before(action) and after(action)")]


def check_arguments(plan: Any, stages: Any, hooks: Any, loss_scale: Any, deadline: Any) -> None:
    """Raise for the arguments of a runtime whose mistakes would show only inside a step.

    Raises:
        RuntimeArgumentError: which argument, and what to give in its place.
    """
    error = RuntimeArgumentError
    if not isinstance(plan, Proof):
        require_plan(plan, error=error)
    checked(stages, _Stages, "stages", error)
    for number, stage in stages.items():
        if not callable(getattr(stage, "forward", None)):
            raise RuntimeArgumentError(
                f"stage {number} is {shown(stage)}, without a forward(microbatch, inputs) that returns Forwarded"
            )
    num_slices = (plan.plan if isinstance(plan, Proof) else plan).num_slices
    if num_slices > 1:
        for number, stage in stages.items():
            _require_sliced(number, stage, num_slices)
    checked(hooks, tuple[_Hook, ...], "hooks", error)
    if loss_scale is not None and not callable(loss_scale):
        raise RuntimeArgumentError(f"loss_scale is {shown(loss_scale)}; give a function from a loss to the scaled loss")
    if deadline is not None:
        checked(deadline, Seconds, "deadline", error)


def _require_sliced(number: int, stage: Any, num_slices: int) -> None:
    """Raise for a stage that cannot run slices.

    Raises:
        RuntimeArgumentError: its forward takes no third argument, or `fully_shard` has sharded a module of it.
    """
    try:
        inspect.signature(stage.forward).bind(None, None, None)
    except TypeError:
        raise RuntimeArgumentError(
            f"the plan cuts microbatches into {num_slices} slices, and the forward of stage {number} takes "
            f"{inspect.signature(stage.forward)}; it is called as forward(microbatch, inputs, part), and keeps keys "
            "and values for the later slices with part.update"
        ) from None
    name = next((name for name, module in modules_of(stage) if is_fsdp(module)), None)
    if name is not None:
        raise RuntimeArgumentError(
            f"stage {number} has a module that fully_shard has sharded ({name}), and the plan cuts microbatches into "
            f"{num_slices} slices: gradients come into a slice's backward by its keys and values too, past the hooks "
            "of FSDP2. Run a plan without slices, or unsharded modules"
        )


def prove(plan: Plan | Proof, communicator: Any) -> Proof:
    """The proof of a plan for the lanes of ``communicator``: the given one, or made here.

    Raises:
        PlanError: the plan has faults.
    """
    kind: Literal["separate", "shared"] = getattr(getattr(communicator, "config", None), "communicators", "separate")
    if not isinstance(plan, Proof):
        return verify(plan, lanes=kind)
    if plan.lanes == kind or not dataflow_of(plan.plan).lanes:
        return plan
    return verify(plan.plan, rendezvous=plan.rendezvous, lanes=kind, batches=plan.batches)


def position_of(plan: Plan, stages: Iterable[int]) -> int:
    """The position of ``plan`` that holds exactly ``stages``.

    Raises:
        PlanMismatchError: there is none; the message lists what each position holds. Or it is not a plan.
    """
    require_plan(plan, error=PlanMismatchError)
    wanted = frozenset(checked(tuple(stages), tuple[Index, ...], "stages", PlanMismatchError))
    held = [frozenset(present) for present in plan.stages_at]
    for position, present in enumerate(held):
        if present == wanted:
            return position
    table = ", ".join(f"position {position}: {sorted(present)}" for position, present in enumerate(held))
    raise PlanMismatchError(f"this rank has stages {sorted(wanted)}, but no position of the plan holds these; {table}")


def reducer_name(action: Action) -> int | str:
    """Which reducer a ``REDUCE`` calls: by its group, or by its stage."""
    return action.group if action.group is not None else action.stage


def require_runnable(plan: Plan, position: int, communicator: Any, reducers: Collection[int | str]) -> None:
    """Raise unless ``position`` of the plan can be run with these reducers and this communicator.

    Raises:
        PlanMismatchError: computes alone, a ``REDUCE`` without its reducer, a plan and a communicator that disagree on
            which edges carry gradients, messages but no communicator, a reducer for a group or stage that the plan
            does not reduce, or as `check_collectives`.
    """
    if not plan.has_communication and dataflow_of(plan).lanes:
        raise PlanMismatchError(
            f"the plan has computes alone, but its {plan.num_positions} positions feed each other: nothing would be "
            "sent. Add the messages with lower(plan), and verify the result"
        )
    if plan.num_slices > 1 and isinstance(communicator, VTPCommunicator):
        raise PlanMismatchError(
            f"the plan cuts microbatches into {plan.num_slices} slices, and a VTPCommunicator moves whole ones; run a "
            "plan without slices, or stages of one tensor-parallel size over a P2PCommunicator"
        )
    check_collectives(plan, position, communicator)
    _require_same_gradients(plan, getattr(communicator, "forward_edges", None))
    for action in plan.actions(position):
        if _reduces(action) and reducer_name(action) not in reducers:
            name = reducer_name(action)
            raise PlanMismatchError(
                f"position {position} has {action}, but there is no reducer for {name!r}; pass "
                f"reducers={{{name!r}: function}}"
            )
    for action in plan.actions(position):
        if communicator is None and action.kind.is_communication and not (_reduces(action) or action.kind in SHARDING):
            raise PlanMismatchError(
                f"position {position} has {action}, but communicator is None; pass a PipelineCommunicator, such as "
                "P2PCommunicator(pp_group, config)"
            )
    if reducers:
        reduced = {reducer_name(a) for p in range(plan.num_positions) for a in plan.actions(p) if _reduces(a)}
        unknown = [name for name in reducers if name not in reduced]
        if unknown:
            raise PlanMismatchError(
                f"there are reducers for {unknown}, but the plan has a REDUCE only for {sorted(map(str, reduced))}: "
                "no action would call them. Give the plan its groups (with_reduce, or lower(plan, tied=...)), or leave "
                "them out"
            )


def require_messenger(plan: Plan, position: int, communicator: Any) -> None:
    """Raise unless a position with messages has a communicator that sends and receives.

    Raises:
        RuntimeArgumentError: which verb it lacks.
    """
    action = next((action for action in plan.actions(position) if action.kind.is_message), None)
    if action is None:
        return
    for verb in ("isend", "irecv", "batch"):
        if isinstance(communicator, type) or not callable(getattr(communicator, verb, None)):
            raise RuntimeArgumentError(
                f"communicator is {shown(communicator)}, without {verb}(), and position {position} has {action}; pass "
                "a PipelineCommunicator, such as P2PCommunicator(pp_group, config)"
            )


def _reduces(action: Action) -> bool:
    return action.kind is ActionKind.REDUCE


def _require_same_gradients(plan: Plan, without: Collection[Edge] | None) -> None:
    """Raise for a gradient along an edge declared ``without`` backward, and for a declared one that is never sent."""
    if without is None or not plan.gradient_edges:
        return
    for edge in plan.graph.stage_edges:
        (source, _), (destination, _) = map(plan.graph.module_of, (edge.source, edge.destination))
        if edge in without and edge in plan.gradient_edges:
            raise PlanMismatchError(
                f"edge {edge} ({source!r} -> {destination!r}) was declared without backward, but the plan sends a "
                f"gradient along it: name {source!r} in the plan's forward_only, if all edges that leave it are "
                "declared so; or declare this one with backward=True, and detach where nothing shall be learnt"
            )
        if source != destination and edge not in without and edge not in plan.gradient_edges:
            raise PlanMismatchError(
                f"edge {edge} ({source!r} -> {destination!r}) was declared with backward, but the plan sends no "
                "gradient along it: declare it EdgeOptions(backward=False)"
            )


@runtime_checkable
class CollectiveCommunicator(Protocol):
    """A communicator that can exchange among all ranks of two stages, some of which hold both."""

    def collective(
        self, payload: Any, *, edge: Edge, direction: Direction
    ) -> tuple[Handle | None, ReceiveHandle | None]:
        """Start the exchange; the send where this rank gives something, and the receive where it gets something."""
        ...


def check_collectives(plan: Plan, position: int, communicator: Any) -> None:
    """Raise unless the plan's collectives are those that the communicator's modules need.

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
                "of the batch would have to be issued: make it a step of its own"
            )
    if collectives and not isinstance(communicator, CollectiveCommunicator):
        raise PlanMismatchError(
            f"position {position} has {collectives[0]}, but a {type(communicator).__name__} has no collective(); "
            "modules that share ranks run on a MultiModulePipelineCommunicator"
        )
    for action in collectives:
        if action.edge is None:
            raise PlanMismatchError(
                f"position {position} has {action}, which moves nothing along an edge, so a runtime has nothing to "
                "execute for it: leave it out, or name the edge"
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


def require_right_wrappers(plan: Plan, position: int, stages: Mapping[int, Any]) -> None:
    """Raise for a `DistributedDataParallel` in a stage whose backwards do not directly follow their own forwards.

    It prepares in each forward for the next backward, which it takes for that forward's own, and has none in halves.

    Raises:
        ReductionError: there is one; the message names it, and what to do in its place.
    """
    for number, stage in stages.items():
        if number in plan.forward_only or _one_at_a_time(plan, position, number):
            continue
        for name, module in modules_of(stage):
            if isinstance(module, DistributedDataParallel):
                raise ReductionError(
                    f"stage {number} has a DistributedDataParallel ({name}), which decides in a forward whether the "
                    "next backward reduces; in this plan other forwards come between, or the backward is split, so it "
                    "would reduce the wrong gradients. Give the stage the bare module, and call reduce_gradients(...) "
                    "over its data lanes once after the step; or choose a plan with one stage, whose backwards follow "
                    "their forwards at once"
                )


def _one_at_a_time(plan: Plan, position: int, stage: int) -> bool:
    """Whether each forward of ``stage`` is followed by its own backward, a whole one, before its next forward."""
    order = [(a.kind, a.microbatch) for a in plan.actions(position) if a.stage == stage and a.kind.is_compute]
    return order == [(kind, microbatch) for _, microbatch in order[::2] for kind in (ActionKind.F, ActionKind.B)]
