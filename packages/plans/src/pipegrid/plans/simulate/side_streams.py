"""Streams beside the computes of a position: collectives of sharded stages over its replicas, and copies to the host.

Each is a stream: what is started on it runs in order, and the computes that need a result wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import define, field

from pipegrid.plans.plan import Action, ActionKind

Slots: TypeAlias = list[float | None]
"""Per piece (a microbatch, or a slice of one), the time at which a result or a message is there; None: not yet."""

OFFLOAD, RELEASE, RELOAD = ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD


@define(eq=False)
class ShardStream:
    """Gathers of parameters and reductions of their gradients, one after the other.

    Attributes:
        durations: seconds by kind and stage.
        num_pieces: of the plan.
        unsharded: by stage, when it is gathered: for all pieces, the last ``UNSHARD`` so far.
    """

    durations: Mapping[ActionKind, Sequence[float]]
    num_pieces: int
    unsharded: dict[int, Slots] = field(factory=dict)
    _free: float = 0.0

    def run(self, action: Action, now: float) -> tuple[float, float]:
        """Start and end of an action; a ``RESHARD`` frees memory at once."""
        if action.kind is ActionKind.RESHARD:
            return now, now
        start = max(now, self._free)
        self._free = start + self.durations[action.kind][action.stage]
        if action.kind is ActionKind.UNSHARD:
            self.unsharded.setdefault(action.stage, [])[:] = [self._free] * self.num_pieces
        return start, self._free


@define(eq=False)
class CopyStreams:
    """Copies of activations to the host and back: a stream each way.

    ``seconds``: of a whole microbatch, by stage; ``reloaded``: by stage, when the activations of each piece are back.
    """

    seconds: Sequence[float]
    reloaded: dict[int, Slots]
    _free: dict[ActionKind, float] = field(factory=dict)
    _copied: dict[tuple[int, int], float] = field(factory=dict)

    def run(self, action: Action, piece: int, length: float, now: float) -> tuple[float, float]:
        """Start and end of an action on ``piece``, a ``length`` part of a microbatch; a ``RELEASE`` awaits its copy."""
        kind, stage = action.kind, action.stage
        copied = self._copied.get((stage, piece), now)
        if kind is RELEASE:
            return now, max(now, copied)
        start = max(now, self._free.get(kind, 0.0), copied if kind is RELOAD else now)
        done = self._free[kind] = start + self.seconds[stage] * length
        if kind is OFFLOAD:
            self._copied[stage, piece] = done
        else:
            self.reloaded[stage][piece] = done
        return start, done
