"""Actions: what a position computes, sends and receives, and the token that each is written as.

An action is a compute (``F`` forward, ``B`` full backward, ``I`` and ``W`` its input-gradient and
weight-gradient halves), one end of a message (``SEND_F`` and ``RECV_F`` for an activation, ``SEND_B`` and
``RECV_B`` for a gradient), or a collective (``REDUCE`` of a stage's gradients, ``COLLECTIVE`` in a group). Of a stage
whose parameters are sharded over its replicas, ``UNSHARD`` gathers them, ``RESHARD`` frees them, and ``REDUCE_GRAD``
reduce-scatters the gradients since the last one: the names of torch.distributed.pipelining. Between a forward and its
backward, ``OFFLOAD`` starts to copy what the forward has saved to the host, ``RELEASE`` waits for that and frees it on
the device, and ``RELOAD`` starts to copy it back.

Its token reads stage, kind, microbatch (and its slice, where microbatches are cut along the sequence), then the stage
at the other end, the arrow pointing the way the data goes, then the group::

    3F7              forward of stage 3, microbatch 7
    3F7.2            of its slice 2
    3SEND_F7>4       stage 3 sends microbatch 7's activation to stage 4
    4RECV_F7<3       stage 4 receives it
    4SEND_B7>3       and sends the gradient back
    3REDUCE@tied     stage 3's gradients are reduced in the group "tied"
    3COLLECTIVE7>4@bridge   stage 3's activation goes to stage 4 by a collective in the group "bridge"
    3UNSHARD         the parameters of stage 3 are gathered over its replicas
    3OFFLOAD7        the activations of stage 3 and microbatch 7 go to the host
    (3F7;1B4)        a pair: a forward and a backward (B or I) that run together
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from itertools import product
from typing import Annotated, TypeAlias

from attrs import frozen

from pipegrid.core.edge import Direction, Edge
from pipegrid.core.fields import Index, Rule, checked, instance, shown
from pipegrid.plans.errors import PlanError

_GROUP_NAME = re.compile(r"[A-Za-z0-9_.:\-]+")


def _group_name(value: object) -> str:
    if not isinstance(value, str) or _GROUP_NAME.fullmatch(value) is None:
        raise ValueError
    return value


GroupName: TypeAlias = Annotated[str, Rule(_group_name, "a group name: letters, digits and any of _ . : -")]
"""The name of a group, which is a word of a plan's text."""


class ActionKind(enum.StrEnum):
    """The kinds of action; a kind is its own text."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    COLLECTIVE = "COLLECTIVE"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OFFLOAD = "OFFLOAD"
    RELEASE = "RELEASE"
    RELOAD = "RELOAD"

    F_B = enum.nonmember("F_B")  # no kind of an action: the name of a pair, two of them

    @classmethod
    def _missing_(cls, value: object) -> ActionKind:
        raise PlanError(f"{shown(value)} is not a kind of action; the kinds are {', '.join(cls)}")

    __hash__ = str.__hash__  # equal to Enum's, and many times faster

    @property
    def is_compute(self) -> bool:
        """Whether the kind computes: ``F``, ``B``, ``I`` or ``W``."""
        return self in COMPUTES

    @property
    def is_send(self) -> bool:
        """Whether the kind sends a message."""
        return self in SENDS

    @property
    def is_receive(self) -> bool:
        """Whether the kind receives a message."""
        return self in RECEIVES

    @property
    def is_at_source(self) -> bool:
        """Whether this end of a message is at the source of its edge; a gradient flows against the edge."""
        return self in AT_SOURCE

    @property
    def is_message(self) -> bool:
        """Whether the kind is one end of a message between two positions."""
        return self in MESSAGES

    @property
    def is_communication(self) -> bool:
        """Whether the kind needs other ranks: all but computes, copies to the host and ``RESHARD``."""
        return self not in _ALONE_ON_A_RANK


COMPUTES = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
MESSAGES = SENDS | RECEIVES
MESSAGE_KINDS = {
    Direction.FORWARD: (ActionKind.SEND_F, ActionKind.RECV_F),
    Direction.BACKWARD: (ActionKind.SEND_B, ActionKind.RECV_B),
}
"""Per direction, the kind of a message's two ends: send, receive."""
AT_SOURCE = frozenset({ActionKind.SEND_F, ActionKind.RECV_B})
SHARDING = frozenset({ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD})
OFFLOADING = frozenset({ActionKind.OFFLOAD, ActionKind.RELEASE, ActionKind.RELOAD})
_ALONE_ON_A_RANK = COMPUTES | OFFLOADING | {ActionKind.RESHARD}
ALONE = COMPUTES | SHARDING | OFFLOADING
"""Kinds that are no part of a batch."""


@frozen
class Action:
    """One compute, message end or collective of one stage.

    Attributes:
        kind: what it does.
        stage: the sender for a send, the receiver for a receive; for a ``COLLECTIVE`` along an edge, the stage whose
            result travels.
        microbatch: its number, from 0.
        edge: of a message, from source to destination of the activation, also for a gradient, which flows against it.
        group: the name of the group of a ``REDUCE`` or ``COLLECTIVE``.
        slice: the part of the microbatch's sequence, in a plan with slices.

    Examples:
        >>> str(Action(ActionKind.F, stage=0, microbatch=3)), ActionKind.F.is_compute
        ('0F3', True)
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None
    edge: Edge | None = None
    group: str | None = None
    slice: int | None = None

    def __attrs_post_init__(self) -> None:
        # Fast path: plans have hundreds of thousands of actions.
        if (
            type(self.kind) is not ActionKind
            or type(self.stage) is not int
            or type(self.microbatch) is not int
            or self.group is not None
            or self.slice is not None
        ):
            _check_fields(self)
        elif self.kind not in COMPUTES or self.edge is not None or self.stage < 0 or self.microbatch < 0:
            edge = self.edge
            if (
                self.kind not in MESSAGES
                or type(edge) is not Edge
                or not 0 <= edge.source < edge.destination
                or self.stage != (edge.source if self.kind in AT_SOURCE else edge.destination)
                or self.microbatch < 0
            ):
                _check_fields(self)

    def __str__(self) -> str:
        peer = self.peer
        way = "" if peer is None else f"{'<' if self.kind.is_receive else '>'}{peer}"
        microbatch = "" if self.microbatch is None else self.microbatch
        if self.slice is not None:
            microbatch = f"{microbatch}.{self.slice}"
        group = "" if self.group is None else f"@{self.group}"
        return f"{self.stage}{self.kind}{microbatch}{way}{group}"

    @property
    def peer(self) -> int | None:
        """The stage at the other end of the edge; None without an edge."""
        if self.edge is None:
            return None
        return self.edge.destination if self.stage == self.edge.source else self.edge.source

    @property
    def direction(self) -> Direction | None:
        """The direction along the edge: activations forward, gradients backward; None without an edge."""
        if self.edge is None:
            return None
        forward = (self.stage == self.edge.source) != self.kind.is_receive
        return Direction.FORWARD if forward else Direction.BACKWARD


_SET_FIELDS = tuple(vars(Action)[name].__set__ for name in ("kind", "stage", "microbatch", "edge", "group", "slice"))


def for_microbatches(action: Action, count: int, num_slices: int = 1) -> list[Action]:
    """``action`` for each of ``count`` microbatches, or of their slices; unchecked, which is three times as fast."""
    set_kind, set_stage, set_microbatch, set_edge, set_group, set_slice = _SET_FIELDS
    kind, stage, edge, group = action.kind, action.stage, action.edge, action.group
    pieces: Iterable[tuple[int, int | None]] = ((microbatch, None) for microbatch in range(count))
    if num_slices > 1:
        pieces = product(range(count), range(num_slices))
    made = [Action.__new__(Action) for _ in range(count * num_slices)]
    for copy, (microbatch, part) in zip(made, pieces, strict=True):
        set_kind(copy, kind)
        set_stage(copy, stage)
        set_microbatch(copy, microbatch)
        set_edge(copy, edge)
        set_group(copy, group)
        set_slice(copy, part)
    return made


def for_piece(action: Action, piece: int, num_slices: int) -> Action:
    """``action`` for another piece (see `Plan.piece_of`)."""
    microbatch, part = divmod(piece, num_slices)
    part_or_none = part if num_slices > 1 else None
    return Action(action.kind, action.stage, microbatch, action.edge, action.group, part_or_none)


_FIELDS = {
    "stage": Index,
    "microbatch": Index | None,
    "edge": Annotated[Edge, instance(Edge, "an Edge(source, destination)")] | None,
    "group": GroupName | None,
    "slice": Index | None,
}


def _takes(kind: ActionKind, *, along_edge: bool) -> tuple[set[str], set[str]]:
    """The fields that an action of this kind has to name, and those that it may name as well."""
    if kind in COMPUTES or kind in OFFLOADING:
        return {"microbatch"}, set()
    if kind in MESSAGES:
        return {"microbatch", "edge"}, set()
    if kind in SHARDING:
        return set(), set()
    if kind is ActionKind.REDUCE:  # over all microbatches
        return set(), {"group"}
    return {"group", "microbatch"} if along_edge else {"group"}, {"microbatch", "edge"}


def _check_fields(action: Action) -> None:
    object.__setattr__(action, "kind", ActionKind(action.kind))
    kind, stage = action.kind, action.stage
    for name, rule in _FIELDS.items():
        object.__setattr__(action, name, checked(getattr(action, name), rule, f"{name} of a {kind}", PlanError))
    edge, named = action.edge, {name for name in _FIELDS if name != "stage" and getattr(action, name) is not None}
    needed, possible = _takes(kind, along_edge=edge is not None)
    possible |= {"slice"} & named if "microbatch" in named else set()
    if not needed <= named <= needed | possible:
        lacks, more = ", ".join(sorted(needed - named)), ", ".join(sorted(named - needed - possible))
        raise PlanError(f"{action}: a {kind} {f'needs {lacks}' if lacks else f'takes no {more}'}")
    if edge is not None:
        ends = [edge.source, edge.destination]
        if kind in MESSAGES:
            ends = [edge.source if kind.is_at_source else edge.destination]
        if edge.source >= edge.destination:
            raise PlanError(f"a {kind} of stage {stage} names edge {edge}; edges ascend, as activations flow")
        if stage not in ends:
            where = " or ".join(map(str, ends))
            raise PlanError(f"a {kind} of stage {stage} names edge {edge}; its end is stage {where}")


def forward(stage: int, microbatch: int) -> Action:
    """``F`` of ``stage`` for ``microbatch``."""
    return Action(ActionKind.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """``B``, the whole backward of ``stage`` for ``microbatch``."""
    return Action(ActionKind.B, stage, microbatch)


def input_backward(stage: int, microbatch: int) -> Action:
    """``I``, the input-gradient half of the backward, on which the stage before depends."""
    return Action(ActionKind.I, stage, microbatch)


def weight_backward(stage: int, microbatch: int) -> Action:
    """``W``, the weight-gradient half of the backward, on which no other stage depends."""
    return Action(ActionKind.W, stage, microbatch)


_TOKEN = re.compile(
    r"(?P<stage>\d{1,9})(?P<kind>[A-Za-z_]+)(?:(?P<microbatch>\d{1,9})(?:\.(?P<slice>\d{1,9}))?)?"
    r"(?:(?P<way>[<>])(?P<peer>\d{1,9}))?(?:@(?P<group>[A-Za-z0-9_.:\-]+))?",
    re.ASCII,
)


def parse_action(token: str) -> Action:
    """Read one token, the inverse of ``str(action)``."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        form = "stage, kind, microbatch, then the peer of a message, as in 3F7 or 3SEND_F7>4"
        raise PlanError(f"{shown(token)} is not an action; write {form}")
    kind, stage, edge = ActionKind(match["kind"]), int(match["stage"]), None
    if match["peer"] is not None:
        wanted = "<" if kind.is_receive else ">"
        if match["way"] != wanted:
            raise PlanError(f"{token!r} points the wrong way; a {kind} is written with {wanted!r}")
        peer = int(match["peer"])
        # A gradient travels against its edge: its sender is the edge's destination.
        at_source = kind.is_at_source if kind.is_message else stage < peer
        edge = Edge(stage, peer) if at_source else Edge(peer, stage)
    microbatch, part = (None if number is None else int(number) for number in match.group("microbatch", "slice"))
    return Action(kind, stage, microbatch, edge, match["group"], part)
