"""Plans as text: a table that people write by hand, read and diff.

The text form has a header, then one line per position::

    microbatches 2
    modules enc:1 llm:1
    edges enc>llm
    placement 0 1
    0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] ...
    1: 1RECV_F0<0 1F0 1B0 [1SEND_B0>0 1RECV_F1<0] ...

Header lines may be left out where the table itself tells: without ``modules`` the stages are a chain, without
``placement`` a stage lies where its actions are, without ``microbatches`` there are as many as the highest
number says. ``forward_only``, ``group`` and ``create`` lines are written only where they differ from the
default. ``#`` starts a comment.
"""

from __future__ import annotations

import json
import re

from pipegrid.schedules.plan.actions import Action
from pipegrid.schedules.plan.plan import Group, Plan, Step, default_creation, require_plan
from pipegrid.schedules.plan.reading import PlanReader
from pipegrid.schedules.plan.words import Word, require_text, words

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_POSITION = re.compile(r"\s*(\d+)\s*:", re.ASCII)


def to_text(plan: Plan) -> str:
    """The plan as text; `from_text` reads it back to an equal plan.

    Raises:
        PlanError: it is no `Plan`.
    """
    require_plan(plan)
    lines = header_lines(plan)
    width = len(str(plan.num_positions - 1))
    lines += [
        " ".join([f"{position:>{width}}:", *(step_text(step) for step in steps)])
        for position, steps in enumerate(plan.positions)
    ]
    return "\n".join(lines) + "\n"


def step_text(step: Step) -> str:
    """A step as text: an action's token, or the tokens of a batch in brackets."""
    return str(step) if isinstance(step, Action) else f"[{' '.join(map(str, step))}]"


def from_text(text: str) -> Plan:
    """Read a plan that `to_text` wrote, or a person.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts do not fit each other, say a placement that misses a stage; or it is no text.
    """
    require_text(text)
    reader = PlanReader()
    for number, line in enumerate(text.splitlines(), start=1):
        head = _POSITION.match(line)
        if head is None:
            reader.header.read(words(line, line_number=number))
            continue
        position = Word(head[1], number, head.start(1) + 1)
        reader.position(position, words(line, line_number=number, start=head.end()))
    return reader.plan(num_lines=text.count("\n") + 1)


def header_lines(plan: Plan) -> list[str]:
    """What a table of steps alone does not tell."""
    lines = [
        f"microbatches {plan.num_microbatches}",
        "modules " + " ".join(f"{_name_text(name)}:{depth}" for name, depth in plan.graph.modules),
    ]
    if plan.graph.edges:
        edges = (f"{_name_text(src)}>{_name_text(dst)}" for src, dst in plan.graph.edges)
        lines.append("edges " + " ".join(edges))
    lines.append("placement " + " ".join(",".join(map(str, places)) for places in plan.placement))
    if plan.forward_only:
        lines.append("forward_only " + " ".join(map(str, plan.forward_only)))
    lines += [_group_line(group) for group in plan.groups]
    if plan.creation != default_creation(plan):
        lines += [" ".join(["create", str(position), *map(str, names)]) for position, names in enumerate(plan.creation)]
    return lines


def _group_line(group: Group) -> str:
    words = ["group", group.name, ",".join(map(str, group.positions))]
    if group.edges:
        words += ["edges", ",".join(map(str, group.edges))]
    if group.tied:
        words += ["tied", ",".join(map(str, group.tied))]
    return " ".join(words)


def _name_text(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)
