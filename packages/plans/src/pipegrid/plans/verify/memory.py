"""The memory of one position's plan: the most microbatches whose activations are live at once."""

from __future__ import annotations

import math
from typing import NamedTuple

from pipegrid.core.edge import Edge
from pipegrid.plans.plan import Action, ActionKind, Plan

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W
_LOADS = (F, ActionKind.RELOAD)
_FREES = (B, W, ActionKind.RELEASE)
_FREES_INPUTS = (B, I, ActionKind.RELEASE)


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


def peak_kept(plan: Plan, position: int) -> float:
    """The most payloads that have come to ``position`` by edges that skip stages, and are kept, at any time.

    One is kept from its receive until the ``B`` or ``I`` of the stage that it came to, behind which its gradient leaves
    (of a stage without a backward, its ``F``). Other stages of the position take it from that one, and add no copy. A
    slice counts as its part of a microbatch.
    """
    skips, kept, most = set(plan.graph.skips), set[tuple[Edge, int]](), 0
    into: dict[int, list[Edge]] = {}
    for edge in skips:
        into.setdefault(edge.destination, []).append(edge)
    for action in plan.actions(position):
        piece = plan.piece_of(action)
        if action.kind is ActionKind.RECV_F and action.edge is not None and action.edge in skips:
            kept.add((action.edge, piece))
            most = max(most, len(kept))
        elif action.kind in ((F,) if action.stage in plan.forward_only else (B, I)):
            kept.difference_update([(edge, piece) for edge in into.get(action.stage, ())])
    return most / plan.num_slices
