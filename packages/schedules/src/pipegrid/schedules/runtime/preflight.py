"""Checks before the first message: a plan that this rank can run with its stages, communicator and reducers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipegrid.autograd.fsdp import is_fsdp
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import shown
from pipegrid.core.lanes import LaneSharing
from pipegrid.plans.plan import Action, ActionKind, Plan, actions_of, require_plan
from pipegrid.plans.verify import Proof, dataflow_of, verify
from pipegrid.schedules.runtime.stages.stage import modules_of
from pipegrid.transport.base import Communicator
from pipegrid.transport.job import JobTopology


def prove(plan: Plan | Proof, job: JobTopology) -> Proof:
    """The proof of a plan for the lanes of ``job``: the given one, or made here (else PlanError)."""
    kind = job.lanes
    if not isinstance(plan, Proof):
        return verify(plan, lanes=kind)
    if plan.lanes == kind or not dataflow_of(plan.plan).lanes:
        return plan
    batches = "in_order" if isinstance(kind, LaneSharing) else plan.batches  # an order model says how batches block
    return verify(plan.plan, rendezvous=plan.rendezvous, lanes=kind, batches=batches)


def position_of(plan: Plan, stages: Iterable[int], replica: int | None = None) -> int:
    """The position of ``plan`` that holds exactly ``stages``; with routes, the actor of ``replica`` that does.

    Raises:
        StepArgumentError: there is none; the message lists what each position holds. Or it is not a plan, or has routes
            and no replica is given, or one that it does not have.
    """
    require_plan(plan, error=StepArgumentError)
    wanted, held = frozenset(stages), [frozenset(present) for present in plan.stages_at]
    what, first = "position", 0
    if plan.routes is not None:
        if replica is None or replica not in range(plan.num_replicas):
            raise StepArgumentError(
                f"replica is {shown(replica)}, and the plan has routes; give this rank's, in 0..{plan.num_replicas - 1}"
            )
        what, first = f"in replica {replica} position", replica * plan.positions_each
        held = held[first : first + plan.positions_each]
    if wanted not in held:
        table = ", ".join(f"{what} {position}: {sorted(present)}" for position, present in enumerate(held))
        raise StepArgumentError(f"this rank has stages {sorted(wanted)}, but the plan has {table}")
    return first + held.index(wanted)


def replica_of(job: JobTopology, given: int | None) -> int | None:
    """The replica of this rank: given, or by the communicator's ``job``; StepArgumentError where they differ."""
    known = job.replica
    if None not in (known, given) and known != given:
        raise StepArgumentError(f"replica is {given}, and the communicator is one of replica {known}; leave it out")
    return known if given is None else given


def reducer_name(action: Action) -> int | str:
    """Which reducer a ``REDUCE`` calls: by its group, or by its stage."""
    return action.group if action.group is not None else action.stage


def require_stages(stages: Mapping[int, Any], num_slices: int) -> None:
    """Raise StepArgumentError unless stages have a ``forward`` of two arguments; with slices three, and no shards."""
    names = "microbatch, inputs" if num_slices == 1 else "microbatch, inputs, part"
    for number, stage in stages.items():
        sharded = [name for name, module in modules_of(stage) if is_fsdp(module)] if num_slices > 1 else []
        if sharded:  # gradients come by its keys and values too, past FSDP2's hooks
            raise StepArgumentError(
                f"stage {number} has a module that fully_shard has sharded ({sharded[0]}), and the plan cuts "
                f"microbatches into {num_slices} slices, whose gradients FSDP2 would miss; use one of the two"
            )
        try:
            inspect.signature(stage.forward).bind(*names.split())
        except ValueError:  # a callable in C without a signature
            continue
        except (AttributeError, TypeError) as error:
            raise StepArgumentError(
                f"stage {number} is {shown(stage)}, and this plan calls its forward({names}): {error}"
            ) from None


def require_runnable(plan: Plan, position: int, communicator: Communicator, reducers: Collection[int | str]) -> None:
    """Raise StepArgumentError unless ``position`` of the plan can be run with these reducers and this communicator."""
    if not plan.has_communication and dataflow_of(plan).lanes:
        raise StepArgumentError(
            f"the plan has computes alone, but its {plan.num_positions} positions feed each other: lower(plan) adds "
            "the messages"
        )
    job = communicator.job
    if plan.num_slices > 1 and not job.slices:
        raise StepArgumentError(
            f"the plan cuts microbatches into {plan.num_slices} slices, and a {type(communicator).__name__} moves "
            "whole ones"
        )
    reduced = [
        {reducer_name(action) for action in plan.actions(each) if action.kind is ActionKind.REDUCE}
        for each in range(plan.num_positions)
    ]
    if not reduced[position] <= set(reducers) <= set().union(*reduced):
        raise StepArgumentError(
            f"there are reducers for {list(reducers)}; position {position} has a REDUCE for "
            f"{sorted(map(str, reduced[position]))}, and the plan for {sorted(map(str, set().union(*reduced)))}"
        )
    _require_edges(plan, job)
    _require_actions(plan, position, communicator)


def _require_edges(plan: Plan, job: JobTopology) -> None:
    """Raise for messages between modules that share ranks, and for gradients on other edges than the job declares."""
    declares = job.forward_edges is not None and bool(plan.gradient_edges)
    for edge in plan.graph.stage_edges:
        sources, destinations = set(plan.placement[edge.source]), set(plan.placement[edge.destination])
        shared = sources != destinations and not sources.isdisjoint(destinations)
        if (shared or edge in job.collective_edges) and edge not in plan.collective_edges:
            raise StepArgumentError(
                f"the modules of edge {edge} share ranks, which exchange among themselves by a COLLECTIVE: lower the "
                f"plan with collectives={{{edge!r}: 'a name'}}"
            )
        (source, _), (destination, _) = map(plan.graph.module_of, (edge.source, edge.destination))
        declared, sent = edge not in (job.forward_edges or ()), edge in plan.gradient_edges
        if declares and declared != sent and (sent or source != destination):
            raise StepArgumentError(
                f"edge {edge} ({source!r} -> {destination!r}) was declared with{'' if declared else 'out'} backward, "
                f"but the plan sends {'a' if sent else 'no'} gradient along it: name {source!r} in the plan's "
                "forward_only exactly where the edges that leave it are EdgeOptions(backward=False)"
            )


def _require_actions(plan: Plan, position: int, communicator: Communicator) -> None:
    """Raise for messages without ports, and for a ``COLLECTIVE`` without an exchange, an edge or a step of its own."""
    lacks_ports = type(communicator).port is Communicator.port
    for step in plan.positions[position]:
        for action in actions_of(step):
            if action.kind.is_message and lacks_ports:
                raise StepArgumentError(
                    f"position {position} has {action}, and communicator is {_shown(communicator)}, without port(); "
                    "pass P2PCommunicator(pp_group, config)"
                )
            if action.kind is not ActionKind.COLLECTIVE:
                continue
            if action.edge is None or isinstance(step, tuple):
                raise StepArgumentError(
                    f"position {position} has {action} {'in a batch' if isinstance(step, tuple) else 'without an edge'}"
                    "; a COLLECTIVE moves data along an edge, in a step of its own"
                )
            if not communicator.exchanges:
                raise StepArgumentError(
                    f"position {position} has {action}, and communicator is {_shown(communicator)}, without "
                    "collective(); pass a MultiModulePipelineCommunicator"
                )


def _shown(communicator: Communicator) -> str:
    return "None" if type(communicator) is Communicator else shown(communicator)


def bare_stages(plan: Plan, position: int, stages: Iterable[int]) -> list[int]:
    """Those of ``stages`` whose whole backwards do not directly follow their own forwards: see `require_bare`."""
    found = []
    for stage in stages:
        order = [(a.kind, a.microbatch) for a in plan.actions(position) if a.stage == stage and a.kind.is_compute]
        in_turn = [(kind, microbatch) for _, microbatch in order[::2] for kind in (ActionKind.F, ActionKind.B)]
        if stage not in plan.forward_only and order != in_turn:
            found.append(stage)
    return found
