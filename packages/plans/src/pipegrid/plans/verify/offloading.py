"""Verification of offloaded activations: copied out, freed and copied back between a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from pipegrid.plans.errors import Fault
from pipegrid.plans.plan import OFFLOADING, Action, ActionKind, Plan, actions_of

F, B, I = ActionKind.F, ActionKind.B, ActionKind.I
OFFLOAD, RELEASE, RELOAD = ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD

_State: TypeAlias = Literal["on the device", "going out", "on the host", "back"]
_NEEDS: dict[ActionKind, _State] = {OFFLOAD: "on the device", RELEASE: "going out", RELOAD: "on the host"}
_GIVES: dict[ActionKind, _State] = {OFFLOAD: "going out", RELEASE: "on the host", RELOAD: "back"}


def check_offloading(plan: Plan, position: int) -> list[Fault]:
    """The faults of ``OFFLOAD``, ``RELEASE``, ``RELOAD``: once each, in this order, between forward and backward."""
    states: dict[tuple[int, int], _State] = {}
    faults: list[Fault] = []
    for index, step in enumerate(plan.positions[position]):
        for action in actions_of(step):
            kind = action.kind
            faults += [Fault(rule, text, position, index) for rule, text in _faults(plan, action, states)]
            if kind in OFFLOADING:
                states[action.stage, plan.piece_of(action)] = _GIVES[kind]
            elif kind is F:
                states[action.stage, plan.piece_of(action)] = "on the device"
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
