"""Orders from JSON that any program can write, from torch's CSV, and from its schedule objects.

A document has ``ranks``, per rank a list of steps, and optionally ``placement``, the rank of each stage (by default the
rank that names the stage in a step of its own). ``"..."`` at the start or end of a list says that it is a fragment. A
step is one of::

    "0SEND_F1"                         an action as in torch's CSV; the peer of a message is the next stage, or as in
                                       "0SEND_F1>3"
    "0WAIT_SEND_F1"                    the host waits until that send has ended
    "(1F1;1B0)"                        a forward and a backward that run together
    ["SEND_F", 0, 1, 2]                kind, stage, microbatch, and for a message the rank at the other end
    {"send": "mask 0", "to": 3}        a message of any name; also {"receive": "mask 0", "from": 0}
    {"compute": "loss 0", "needs": ["mask 0"]}
    {"batch": [...]}                   messages that are launched together

A message of any name may have ``"group"`` (by default all messages go through one), and ``"holds": true`` where the
program waits for it at once (`torch.distributed.send`). A compute of a stage reads the messages of its microbatch that
come along the edges on which its rank receives; one with a name reads its ``"needs"``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from pipegrid.core.fields import Index, Name, checked
from pipegrid.plans.errors import PlanError
from pipegrid.plans.orders.of_plan import label_of, needs_of, ways_of
from pipegrid.plans.orders.orders import Launch, MessageEnd, Orders
from pipegrid.plans.plan import Action, Plan, from_csv, load_json, step_text
from pipegrid.plans.plan.actions import parse_action
from pipegrid.plans.plan.csv import awaited_by, with_peer
from pipegrid.plans.plan.parts import parse_step

_CELL = re.compile(r"\([^()]*\)\s*OVERLAP_F_B|\[[^\[\]]*\]|[^\s,]+", re.ASCII)
_MESSAGE = re.compile(r"\d+(?:SEND|RECV)_", re.ASCII)
_CUT = "..."

_Part: TypeAlias = Action | Launch
"""A step that is no batch; a launch is one that is complete as it is."""
_Step: TypeAlias = _Part | list[_Part] | tuple[Action, ...]
"""A part, a batch, or a pair of computes."""


def orders_from_json(text: str) -> Orders:
    r"""Read orders.

    Raises:
        PlanError: text that is not such a document; its ``path`` leads to the part.

    Examples:
        >>> text = '{"ranks": [["0F0", "0SEND_F0>1"], ["1RECV_F0<0", "1F0"]]}'
        >>> orders_from_json(text) == orders_from_csv("0F0,0SEND_F0\n1RECV_F0,1F0", batched=False)
        True
    """
    document = load_json(text)
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list) or not document["ranks"]:
        raise PlanError('orders are an object with "ranks", a list of the steps of each rank', path="ranks")
    if unknown := document.keys() - {"ranks", "placement"}:
        name = min(unknown)
        raise PlanError(f"orders have ranks and placement, not {name!r}", path=name)
    rows = []
    for rank, row in enumerate(document["ranks"]):
        if not isinstance(row, list):
            raise _error(row, f"ranks[{rank}]", "a list of steps")
        begins, ends = row[:1] != [_CUT], row[1:][-1:] != [_CUT]
        own = row[not begins : len(row) - (not ends)]
        rows.append((list(_parsed(own, f"ranks[{rank}]", not begins)), begins, ends))
    steps = [steps for steps, _, _ in rows]
    places = _placement(document.get("placement"), steps)
    return Orders(
        tuple(tuple(_launches(own, places, rank)) for rank, own in enumerate(steps)),
        begins=tuple(begins for _, begins, _ in rows),
        ends=tuple(ends for _, _, ends in rows),
    )


def orders_from_csv(text: str, *, batched: bool = True) -> Orders:
    """The orders of torch's CSV with its waits for sends, which plans leave out; ``batched`` as in `orders_of_plan`.

    Raises:
        PlanError: what is wrong with it, as `from_csv` has it; or a header, which torch does not write.
    """
    from_csv(text)
    lines = text.rstrip().splitlines()
    if any(line.startswith("#:") for line in lines):
        raise PlanError("a table with a header is a plan of pipegrid, not torch's CSV; orders_of_plan has its orders")

    def step_of(cell: str) -> str | dict[str, list[str]]:
        is_batch = cell.startswith("[") or (batched and _MESSAGE.match(cell))
        return {"batch": cell.strip("[]").split()} if is_batch else cell

    rows = [[step_of(cell) for cell in _CELL.findall(line)] for line in lines if not line.startswith("#")]
    return orders_from_json(json.dumps({"ranks": rows}))


def is_orders(text: str) -> bool:
    """Whether ``text`` is a document of orders, right or wrong: a JSON object with ``ranks``."""
    try:
        document = load_json(text)
    except PlanError:
        return False
    return isinstance(document, dict) and "ranks" in document


def _error(found: Any, path: str, expected: str) -> PlanError:
    return PlanError(f"{path} is {json.dumps(found):.120}; it must be {expected}", path=path)


# ---- Steps of a document


def _parsed(steps: Sequence[Any], path: str, first: int) -> Iterator[_Step]:
    for number, step in enumerate(steps, start=first):
        where = f"{path}[{number}]"
        if isinstance(step, str) and step.startswith("("):
            try:
                yield parse_step(step.removesuffix("OVERLAP_F_B").strip())
            except PlanError as error:
                raise PlanError(f"{where}: {error}", path=where) from None
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
            awaited = awaited_by(word)
            action = parse_action(with_peer(awaited or word))
            if awaited is None or not action.kind.is_send:  # reductions and waits for them are no launches
                return action
            return Launch(word, waits=frozenset({label_of(action)}))
        except PlanError as error:
            raise PlanError(f"{path}: {error}", path=path) from None
    if isinstance(step, dict):
        return _named(step, path)
    raise _error(step, path, 'an action such as "0SEND_F1", a list [kind, stage, microbatch, peer stage], or an object')


def _named(step: Mapping[str, Any], path: str) -> Launch:
    """A compute or a message with a name of its own."""
    expected = 'an object with "compute", with "send" and "to", with "receive" and "from", or "batch"'
    check = partial(checked, error=partial(PlanError, path=path))
    if step.keys() <= {"compute", "needs"} and "compute" in step:
        needs: tuple[str, ...] = check(step.get("needs", ()), tuple[Name, ...], f"{path}.needs")
        return Launch(check(step["compute"], Name, f"{path}.compute"), needs=frozenset(needs))
    way: Literal["send", "receive"] = "send" if "send" in step else "receive"
    rank = "to" if way == "send" else "from"
    if not step.keys() >= {way, rank}:
        raise _error(step, path, expected)
    if not step.keys() <= {way, rank, "group", "holds"} or not isinstance(step.get("holds", False), bool):
        raise _error(step, path, f'{expected}; a message may have "group", and "holds", which is true or false')
    peer = check(step[rank], Index, f"{path}.{rank}")
    name, group = check(step[way], Name, f"{path}.{way}"), check(step.get("group", "default"), Name, f"{path}.group")
    return Launch(f"{way}({name}) {rank} {peer}", (MessageEnd(way, peer, name, group),), holds=step.get("holds", False))


def _placement(given: Any, rows: Sequence[Iterable[_Step]]) -> Mapping[int, int]:
    """The rank of each stage."""
    places: dict[int, int] = {}
    if given is not None:
        places = dict(enumerate(checked(given, tuple[Index, ...], "placement", partial(PlanError, path="placement"))))
    for rank, action in ((rank, action) for rank, steps in enumerate(rows) for action in _actions(steps)):
        if places.setdefault(action.stage, rank) != rank:
            text = f"{action} of rank {rank}: stage {action.stage} is on rank {places[action.stage]}"
            raise PlanError(text, path=f"ranks[{rank}]")
    return places


def _actions(steps: Iterable[_Step]) -> Iterator[Action]:
    for step in steps:
        yield from (one for one in (step if isinstance(step, (list, tuple)) else [step]) if isinstance(one, Action))


def _launches(steps: Sequence[_Step], places: Mapping[int, int], rank: int) -> Iterator[Launch]:
    came = {way for action in _actions(steps) if action.kind.is_receive for way in ways_of(action)}

    def messages_of(part: _Part) -> tuple[MessageEnd, ...]:
        if isinstance(part, Launch):
            return part.messages
        if not part.kind.is_message:
            return ()
        if part.peer is None or part.peer not in places:
            text = f"{part}: no step says which rank has stage {part.peer}; give placement, the rank of each stage"
            raise PlanError(text, path="placement")
        return (MessageEnd("send" if part.kind.is_send else "receive", places[part.peer], label_of(part)),)

    for step in steps:
        if isinstance(step, list):
            texts = [part.text if isinstance(part, Launch) else str(part) for part in step]
            messages = tuple(message for part in step for message in messages_of(part))
            if len(messages) < len(step):
                what = f"ranks[{rank}]: [{' '.join(texts)}] is no batch; messages are batched, and nothing else"
                raise PlanError(what, path=f"ranks[{rank}]")
            yield Launch(f"[{' '.join(texts)}]", messages, batched=True)
        elif isinstance(step, Launch):
            yield step
        elif isinstance(step, tuple):
            yield Launch(step_text(step), needs=frozenset().union(*[needs_of(action, came) for action in step]))
        elif messages := messages_of(step):
            yield Launch(str(step), messages)
        elif step.kind.is_compute:
            yield Launch(str(step), needs=needs_of(step, came))


# ---- Schedule objects of torch


def plan_of_torch(schedule: Any) -> Plan:
    """The plan that a schedule object of torch 2.11 to 2.15 runs, with the messages that it has.

    Those of torch 2.15 also wait for their sends (``4WAIT_SEND_F7``): `orders_of_torch` has these waits, a plan none.

    Raises:
        PlanError: it has no order that it runs. A schedule of one stage (`ScheduleGPipe`, `Schedule1F1B`) runs a loop
            of its own, and keeps an order for pictures: take `gpipe` or `one_f_one_b`.
        PlanSyntaxError: it has an action that plans do not have.
    """
    return from_csv(_csv_of_torch(schedule))


def orders_of_torch(schedule: Any, *, batched: bool = True) -> Orders:
    """The launches of each rank of a schedule object of torch on its one group, and where it waits for its sends.

    torch launches each message alone; what is proved of batches of one (``batched``), whose lines are longer, holds of
    these as well.

    Raises:
        PlanError: as `plan_of_torch`.
    """
    return orders_from_csv(_csv_of_torch(schedule), batched=batched)


def _csv_of_torch(schedule: Any) -> str:
    """The table that a schedule object runs."""
    name = type(schedule).__name__
    if any(base.__name__ == "PipelineScheduleSingle" for base in type(schedule).__mro__):
        why = "runs a loop of its own, and its pipeline_order is for pictures"
        raise PlanError(f"{name} {why}; take the plan of the same name")
    table = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if not table:
        raise PlanError(f"{name} tells no order; it has neither pipeline_order_with_comms nor pipeline_order")
    rows = [",".join("" if action is None else str(action) for action in table[rank]) for rank in sorted(table)]
    return "\n".join(rows) + "\n"
