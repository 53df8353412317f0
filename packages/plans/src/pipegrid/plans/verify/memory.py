"""The memory of one position's plan: the most microbatches whose activations are live, and those offloaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.errors import PlanFault
from pipegrid.plans.plan import OFFLOADING, Action, ActionKind, Plan, actions_of
from pipegrid.plans.plan.dataflow import dataflow_of

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
OFFLOAD, RELEASE, RELOAD = ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD
_LOADS, _FREES, _FREES_INPUTS = (F, RELOAD), (B, W, RELEASE), (B, I, RELEASE)


class Peaks(NamedTuple):
    """The most microbatches live at once on a position, a stage counted as its share of the position's stages.

    ``live``: from ``F`` until ``B`` or ``W``; ``inputs``: until ``B`` or ``I``.
    """

    live: float
    inputs: float


def peaks_of(plan: Plan, position: int) -> Peaks:
    """The peaks of ``position``, whose actions are right.

    What goes to the host counts until its ``RELEASE``, which waits for the copy, and from its ``RELOAD``, which starts
    one. A stage without a backward holds its activations for as long as its forward runs.
    """
    # A stage's share of the position, in whole numbers of a unit small enough for all its stages.
    unit = plan.num_slices * math.lcm(*(plan.stages_beside[stage] for stage in plan.stages_at[position]))
    sizes = {stage: unit // (plan.num_slices * plan.stages_beside[stage]) for stage in plan.stages_at[position]}
    forward_only = frozenset(plan.forward_only)
    live = inputs = most = most_inputs = 0
    for step in plan.positions[position]:
        for action in (step,) if isinstance(step, Action) else step:
            if action.edge is not None:  # a message
                continue
            kind = action.kind
            if kind in _LOADS:
                size = sizes[action.stage]
                live, inputs = live + size, inputs + size
                most, most_inputs = max(most, live), max(most_inputs, inputs)
                if kind is F and action.stage in forward_only:
                    live, inputs = live - size, inputs - size
                continue
            if kind in _FREES:
                live -= sizes[action.stage]
            if kind in _FREES_INPUTS:
                inputs -= sizes[action.stage]
    return Peaks(most / unit, most_inputs / unit)


def kept_by_action(plan: Plan, position: int) -> Iterator[tuple[list[Edge], list[Edge]]]:
    """Per action of ``position``, the edges past stages whose payloads it keeps from then on, and up to then.

    One that comes by message is kept from its receive (without one, the ``F`` of the stage that it comes to) until the
    ``B`` or ``I`` of that stage, behind which its gradient leaves (of a stage without a backward, its ``F``). Other
    stages of the position take it from that one, and add no copy, unless that has no backward: then the stage behind
    keeps its own copy from that ``F`` on. What a trained stage made here is part of its activations.
    """
    into, copied = dict[tuple[int, int], list[Edge]](), dict[tuple[int, int], list[Edge]]()
    skips, frozen = set(plan.graph.skips), plan.forward_only
    for flow in dataflow_of(plan).flows if skips else ():
        if flow.edge not in skips or flow.direction is Direction.BACKWARD or position not in flow.destinations:
            continue
        is_local = flow.group is None and flow.origins(position) == (position,)
        for piece in flow.pieces if not is_local or flow.producer in frozen else ():
            into.setdefault((flow.consumer, piece), []).append(flow.edge)
            if is_local:
                copied.setdefault((flow.producer, piece), []).append(flow.edge)
    there: set[tuple[Edge, int]] = set()
    for action in plan.actions(position):
        piece, came, gone = plan.piece_of(action), list[Edge](), list[Edge]()
        if action.kind is ActionKind.RECV_F and action.edge in skips:
            came = [action.edge] if action.edge is not None else []
        elif action.kind is F:
            came = into.get((action.stage, piece), []) + copied.get((action.stage, piece), [])
        if action.kind in (B, I) or (action.kind is F and action.stage in frozen):
            gone = into.get((action.stage, piece), [])
        yield [edge for edge in came if (edge, piece) not in there], gone
        there.update((edge, piece) for edge in came)


def peak_kept(plan: Plan, position: int) -> float:
    """The most payloads of edges that skip stages which ``position`` keeps at any time (`kept_by_action`).

    A slice counts as its part of a microbatch.
    """
    kept = most = 0
    for came, gone in kept_by_action(plan, position):
        kept += len(came)
        most = max(most, kept)
        kept -= len(gone)
    return most / plan.num_slices


# Activations that are copied out, freed and copied back between a forward and its backward

_State: TypeAlias = Literal["on the device", "going out", "on the host", "back"]
_NEEDS: dict[ActionKind, _State] = {OFFLOAD: "on the device", RELEASE: "going out", RELOAD: "on the host"}
_GIVES: dict[ActionKind, _State] = {F: "on the device", OFFLOAD: "going out", RELEASE: "on the host", RELOAD: "back"}


def check_offloading(plan: Plan, position: int) -> list[PlanFault]:
    """The faults of ``OFFLOAD``, ``RELEASE``, ``RELOAD``: once each, in this order, between forward and backward."""
    states: dict[tuple[int, int], _State] = {}
    faults: list[PlanFault] = []
    for index, step in enumerate(plan.positions[position]):
        for action in actions_of(step):
            faults += [PlanFault(rule, text, position, index) for rule, text in _faults(plan, action, states)]
            if action.kind in _GIVES:
                states[action.stage, plan.piece_of(action)] = _GIVES[action.kind]
    return faults


def _faults(plan: Plan, action: Action, states: dict[tuple[int, int], _State]) -> Iterator[tuple[str, str]]:
    kind = action.kind
    if kind in (B, I):
        state = states[action.stage, plan.piece_of(action)]
        if state in ("going out", "on the host"):
            yield "dependency", f"{action} needs {_named(action, RELOAD)} before it; its activations are {state}"
    elif kind in OFFLOADING:
        if plan.num_slices > 1:
            yield "unneeded", f"{action}: later slices read what a slice keeps; a plan with slices offloads nothing"
            return
        if action.stage in plan.forward_only:
            yield "unneeded", f"{action}: stage {action.stage} has no backward, and keeps nothing"
            return
        found = states.get((action.stage, plan.piece_of(action)))
        if found == _NEEDS[kind]:
            return
        if found is None:
            yield "dependency", f"{action} needs {_named(action, F)} before it"
        elif kind is not OFFLOAD and found in ("on the device", "going out"):
            before = OFFLOAD if found == "on the device" else RELEASE
            yield "dependency", f"{action} needs {_named(action, before)} before it"
        else:
            yield "duplicate", f"{action}: the activations are {found} already"


def _named(action: Action, kind: ActionKind) -> str:
    return f"{action.stage}{kind}{action.microbatch}"
