"""Orders from JSON that any program can write, and of a lowered plan.

A document has ``ranks``, per rank a list of steps, and optionally ``placement``, the rank of each stage (by default the
rank that names the stage in a step of its own). ``"..."`` at the start or end of a list says that it is a fragment. A
step is one of::

    "0SEND_F1"                         an action as in torch's CSV; the peer of a message is the next stage, or as in
                                       "0SEND_F1>3"
    ["SEND_F", 0, 1, 2]                kind, stage, microbatch, and for a message the rank at the other end
    {"send": "mask 0", "to": 3}        a message of any name; also {"receive": "mask 0", "from": 0}
    {"compute": "loss 0", "needs": ["mask 0"]}
    {"batch": [...]}                   messages that are launched together

A message of any name may have ``"group"`` (by default all messages go through one), and ``"holds": true`` where the
program waits for it at once (`torch.distributed.send`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from pipegrid.schedules.errors import PlanError, PlanFieldError
from pipegrid.schedules.orders.orders import Launch, Message, Orders
from pipegrid.schedules.plan import Action, ActionKind, Plan, actions_of, load_json, step_text
from pipegrid.schedules.plan.actions import parse_action
from pipegrid.schedules.plan.csv import with_peer
from pipegrid.schedules.plan.dataflow import BACKWARD, FORWARD, dataflow_of
from pipegrid.topology.fields import Index, checked

_OVERLAP = re.compile(r"\(([^()]*)\)\s*OVERLAP_F_B", re.ASCII)
_READS = {ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.I: BACKWARD}
_CUT = "..."
_WAY = {"send": "to", "receive": "from"}

_Part: TypeAlias = Action | Launch
"""A step that is no batch; a launch is one that is complete as it is."""


def orders_from_json(text: str) -> Orders:
    """Read orders.

    Raises:
        PlanError: text that is not such a document; the ``path`` of a `PlanFieldError` leads to the part.
    """
    document = load_json(text)
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list) or not document["ranks"]:
        raise PlanFieldError('orders are an object with "ranks", a list of the steps of each rank', path="ranks")
    if unknown := document.keys() - {"ranks", "placement"}:
        name = min(unknown)
        raise PlanFieldError(f"orders have ranks and placement, not {name!r}", path=name)
    rows = []
    for rank, row in enumerate(document["ranks"]):
        if not isinstance(row, list):
            raise _error(row, f"ranks[{rank}]", "a list of steps")
        begins, ends = row[:1] != [_CUT], row[1:][-1:] != [_CUT]
        rows.append(
            (list(_parsed(row[not begins : len(row) - (not ends)], f"ranks[{rank}]", not begins)), begins, ends)
        )
    steps = [steps for steps, _, _ in rows]
    places = _placement(document.get("placement"), steps)
    return Orders(
        tuple(tuple(_launches(own, places, rank)) for rank, own in enumerate(steps)),
        begins=tuple(begins for _, begins, _ in rows),
        ends=tuple(ends for _, _, ends in rows),
    )


def is_orders(text: str) -> bool:
    """Whether ``text`` is a document of orders, right or wrong: a JSON object with ``ranks``."""
    try:
        document = load_json(text)
    except PlanError:
        return False
    return isinstance(document, dict) and "ranks" in document


def orders_of_plan(plan: Plan, *, lanes: bool = False, batched: bool = True) -> Orders:
    """The orders of a lowered plan, with a rank for each position.

    ``lanes``: each lane is a group of its own, as pipegrid's communicators make them; by default all messages go
    through one group, as those of torch.distributed.pipelining do. ``batched``: a lone message is a batch of one.

    A collective among positions is a batch of messages, from each member to each, in a group of its own. What the
    ranks of one position do among themselves (``UNSHARD``, ``REDUCE_GRAD``, ...) is no launch of its own here.

    Raises:
        PlanError: a plan of computes alone.
    """
    if not plan.has_communication:
        raise PlanError("a plan of computes has no messages; lower adds them")
    routes = {(flow.edge, flow.direction): flow.routes for flow in dataflow_of(plan).crossing if flow.group is None}
    groups = {group.name: group.positions for group in plan.groups}
    calls: dict[tuple[str, int], int] = {}

    def messages_of(action: Action, position: int) -> Iterator[Message]:
        if action.kind.is_message:
            for source, destination in routes[action.edge, action.direction]:  # type: ignore[index]  # of a message
                group = f"{action.direction} {source}>{destination}" if lanes else "default"
                if action.kind.is_send and source == position:
                    yield Message("send", destination, _label(action), group)
                elif action.kind.is_receive and destination == position:
                    yield Message("receive", source, _label(action), group)
        elif action.group is not None:
            call = calls[action.group, position] = calls.get((action.group, position), -1) + 1
            for other in groups[action.group]:
                if other != position:
                    yield Message("send", other, f"{action.group} {call}", f"group {action.group}")
                    yield Message("receive", other, f"{action.group} {call}", f"group {action.group}")

    rows = []
    for position, steps in enumerate(plan.positions):
        row = []
        for step in steps:
            actions = actions_of(step)
            messages = tuple(message for action in actions for message in messages_of(action, position))
            if messages:
                row.append(Launch(step_text(step), messages, batched=batched or len(messages) > 1))
            elif actions[0].kind.is_compute:
                row.append(Launch(step_text(step), needs=_needs(actions[0], plan.graph.stage_edges)))
        rows.append(tuple(row))
    whole = (True,) * plan.num_positions
    return Orders(tuple(rows), begins=whole, ends=whole)


def _label(action: Action) -> str:
    """What a message carries, in words that both of its ends have."""
    part = "" if action.slice is None else f".{action.slice}"
    return f"{action.direction} {action.edge} {action.microbatch}{part}"


def _error(found: Any, path: str, expected: str) -> PlanFieldError:
    return PlanFieldError(f"{path} is {json.dumps(found):.120}; it must be {expected}", path=path)


# ---- Steps of a document


def _parsed(steps: Sequence[Any], path: str, first: int) -> Iterator[_Part | list[_Part]]:
    for number, step in enumerate(steps, start=first):
        where = f"{path}[{number}]"
        if isinstance(step, str) and (pair := _OVERLAP.fullmatch(step)):
            yield from (_part(word.strip(), where) for word in pair[1].split(";"))
        elif isinstance(step, dict) and step.keys() == {"batch"} and isinstance(step["batch"], list) and step["batch"]:
            yield [_part(one, f"{where}.batch[{index}]") for index, one in enumerate(step["batch"])]
        else:
            yield _part(step, where)


def _part(step: Any, path: str) -> _Part:
    word = step
    if isinstance(step, list) and 3 <= len(step) <= 4 and isinstance(step[0], str):
        kind, stage, microbatch, *peer = step
        word = f"{stage}{kind}{microbatch}" + "".join(f"{'<' if 'RECV' in kind else '>'}{one}" for one in peer)
    if isinstance(word, str):
        try:
            return parse_action(with_peer(word))
        except PlanError as error:
            raise PlanFieldError(f"{path}: {error}", path=path) from None
    if isinstance(step, dict):
        return _named(step, path)
    raise _error(step, path, 'an action such as "0SEND_F1", a list [kind, stage, microbatch, peer stage], or an object')


def _named(step: Mapping[str, Any], path: str) -> Launch:
    """A compute or a message with a name of its own."""
    if step.keys() <= {"compute", "needs"} and isinstance(step.get("compute"), str):
        return Launch(step["compute"], needs=frozenset(map(str, step.get("needs", ()))))
    for way, rank in _WAY.items():
        if step.keys() >= {way, rank} and step.keys() <= {way, rank, "group", "holds"}:
            peer = checked(step[rank], Index, f"{path}.{rank}", partial(PlanFieldError, path=path))
            message = Message(way, peer, str(step[way]), str(step.get("group", "default")))  # type: ignore[arg-type]
            return Launch(f"{way}({step[way]}) {rank} {peer}", (message,), holds=step.get("holds") is True)
    raise _error(step, path, 'an object with "compute", with "send" and "to", with "receive" and "from", or "batch"')


def _placement(given: Any, rows: Sequence[Iterable[_Part | list[_Part]]]) -> Mapping[int, int]:
    """The rank of each stage."""
    places: dict[int, int] = {}
    if given is not None:
        places = dict(
            enumerate(checked(given, tuple[Index, ...], "placement", partial(PlanFieldError, path="placement")))
        )
    for rank, steps in enumerate(rows):
        for action in _actions(steps):
            if places.setdefault(action.stage, rank) != rank:
                text = f"{action} of rank {rank}: stage {action.stage} is on rank {places[action.stage]}"
                raise PlanFieldError(text, path=f"ranks[{rank}]")
    return places


def _actions(steps: Iterable[_Part | list[_Part]]) -> Iterator[Action]:
    for step in steps:
        yield from (one for one in (step if isinstance(step, list) else [step]) if isinstance(one, Action))


def _launches(steps: Sequence[_Part | list[_Part]], places: Mapping[int, int], rank: int) -> Iterator[Launch]:
    edges = {action.edge for action in _actions(steps) if action.edge is not None}

    def messages_of(part: _Part) -> tuple[Message, ...]:
        if isinstance(part, Launch):
            return part.messages
        if not part.kind.is_message:
            return ()
        if part.peer is None or part.peer not in places:
            text = f"{part}: no step says which rank has stage {part.peer}; give placement, the rank of each stage"
            raise PlanFieldError(text, path="placement")
        return (Message("send" if part.kind.is_send else "receive", places[part.peer], _label(part)),)

    for step in steps:
        if isinstance(step, list):
            texts = [part.text if isinstance(part, Launch) else str(part) for part in step]
            messages = tuple(message for part in step for message in messages_of(part))
            if len(messages) < len(step):
                raise PlanFieldError(
                    f"ranks[{rank}]: [{' '.join(texts)}] is no batch; messages are batched, and nothing else",
                    path=f"ranks[{rank}]",
                )
            yield Launch(f"[{' '.join(texts)}]", messages, batched=True)
        elif isinstance(step, Launch):
            yield step
        elif messages := messages_of(step):
            yield Launch(str(step), messages)
        elif step.kind.is_compute:
            yield Launch(str(step), needs=_needs(step, edges))


def _needs(action: Action, edges: Iterable[Any]) -> frozenset[str]:
    """The labels of the messages that a compute reads, of those that come along ``edges``."""
    direction = _READS.get(action.kind)
    part = "" if action.slice is None else f".{action.slice}"
    return frozenset(
        f"{direction} {edge} {action.microbatch}{part}"
        for edge in edges
        if direction is not None and action.stage == (edge.destination if direction is FORWARD else edge.source)
    )
