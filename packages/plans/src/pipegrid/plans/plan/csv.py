"""Plans as CSV, for exchange with torch: one row per position, one step per cell.

The format is that of torch.distributed.pipelining (``0F0,1F0,...``), compute-only or lowered: there a message has no
peer (``1SEND_F0``), which in a chain is the next stage. An empty cell is an idle slot. The header, where one is needed,
comes first in lines of ``#:``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from attrs import evolve

from pipegrid.core.fields import Count, checked_arguments
from pipegrid.core.graph import chain
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.actions import COMPUTES, MESSAGES, SHARDING, Action, ActionKind
from pipegrid.plans.plan.parts import Step, Text, Token, actions_of, is_pair, step_text
from pipegrid.plans.plan.plan import Plan, header_lines, require_plan
from pipegrid.plans.plan.text import Reader

_PEERLESS = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B)\d{1,9}", re.ASCII)
_NEXT = {"SEND_F": (">", 1), "RECV_F": ("<", -1), "SEND_B": (">", -1), "RECV_B": ("<", 1)}
_WAIT = re.compile(r"(\d{1,9})WAIT_(SEND_[FB]\d.*|REDUCE_GRAD)", re.ASCII)


def to_csv(plan: Plan) -> str:
    """The plan as CSV; `from_csv` reads it back to an equal plan, and torch reads the computes of a chain."""
    require_plan(plan)
    rows = [",".join(map(_cell, steps)) or "," for steps in plan.positions]  # "," is a row of idle slots
    header = [] if _is_implied_by_its_table(plan) else [f"#: {line}" for line in header_lines(plan)]
    return "\n".join([*header, *rows]) + "\n"


def _cell(step: Step) -> str:
    """A step as torch has it, where it does."""
    return f"{step_text(step)}OVERLAP_F_B" if is_pair(step) else step_text(step)


def to_torch(plan: Plan, *, waits: bool = False) -> str:
    """The plan as CSV that torch's runtime loads: of computes as ``compute_only``, lowered as ``compute_comms``.

    In a lowered plan the messages of a batch follow one another. A stage begins with ``UNSHARD`` and ends with
    ``RESHARD``, which FSDP needs, unless the plan has its own; before that comes ``REDUCE_GRAD``, where torch scales
    gradients, in the place of a ``REDUCE`` if the plan has one.

    Args:
        plan: of computes or lowered.
        waits: a lowered plan has a wait for each send and reduction: torch 2.15 loads no other, earlier ones have none.

    Raises:
        PlanError: a plan that torch does not run: no chain, a stage on several positions, routes, slices, forwards
            alone, or actions other than computes, messages, a ``REDUCE`` of each stage, ``UNSHARD`` and ``RESHARD``.

    Examples:
        >>> print(to_torch(lower(gpipe(2, 1))))
        0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD
        1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD
    """
    require_plan(plan)
    for there, name in (
        (plan.graph != chain(plan.num_stages), "modules beside each other, or edges that skip stages"),
        (any(len(places) > 1 for places in plan.placement), "a stage on several positions"),
        (plan.routes is not None, "routes"),
        (plan.num_slices > 1, "slices"),
        (plan.forward_only, "stages without a backward"),
    ):
        if there:
            raise PlanError(f"torch.distributed.pipelining runs no plan with {name}")
    rows = []
    for position in range(plan.num_positions):
        cells: list[str] = []
        for step in plan.positions[position]:
            cells += [_cell(step)] if is_pair(step) else map(_torch_cell, actions_of(step))
        for stage in plan.stages_at[position] if plan.has_communication else ():
            cells += [f"{stage}REDUCE_GRAD"] if f"{stage}REDUCE_GRAD" not in cells else []
            if f"{stage}UNSHARD" not in cells:
                first = next(n for n, cell in enumerate(cells) if cell.lstrip("(").startswith(f"{stage}F"))
                cells = [*cells[:first], f"{stage}UNSHARD", *cells[first:], f"{stage}RESHARD"]
        if twice := [cell for cell, count in Counter(cells).items() if count > 1 and cell.endswith("REDUCE_GRAD")]:
            raise PlanError(f"position {position} has {twice[0]} several times; torch scales gradients at each")
        rows.append(",".join(_with_waits(cells) if waits else cells))
    return "\n".join(rows) + "\n"


def _with_waits(cells: Iterable[str]) -> Iterator[str]:
    """An activation is waited for after the backward of its microbatch, which shows that it came; a gradient last."""
    sent: list[str] = []
    for cell in cells:
        yield cell
        if cell.endswith("REDUCE_GRAD"):
            yield cell.replace("REDUCE", "WAIT_REDUCE")
        elif "SEND" in cell:
            sent.append(cell)
        elif (activation := re.sub("[BI]", "SEND_F", re.sub(r".*;|\).*", "", cell))) in sent:  # the second of a pair
            sent.remove(activation)
            yield activation.replace("SEND", "WAIT_SEND")
    yield from (cell.replace("SEND", "WAIT_SEND") for cell in sent)


def _torch_cell(action: Action) -> str:
    if action.kind in MESSAGES:
        return f"{action.stage}{action.kind}{action.microbatch}"
    if action.kind is ActionKind.REDUCE and action.group is None:
        return f"{action.stage}REDUCE_GRAD"
    if action.kind in COMPUTES or action.kind in SHARDING:
        return str(action)
    raise PlanError(f"torch.distributed.pipelining has no action such as {action}")


@checked_arguments(PlanError)
def from_csv(text: Text, *, num_microbatches: Count | None = None, num_stages: Count | None = None) -> Plan:
    """Read CSV, one row per position, written by `to_csv` or by torch.

    ``num_microbatches`` and ``num_stages`` (of a chain) bound the table; by default the table implies them. torch's
    ``(4F5;3B0)OVERLAP_F_B`` is a pair. The waits of torch 2.15 for sends and reductions (``4WAIT_SEND_F7``) are left
    out: a runtime waits for its sends by itself. By the rule of `verify` no position goes on from a send before its
    receive, so its proof holds with them; `orders_from_csv` keeps them.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts contradict each other; the line where known.

    Examples:
        >>> from_csv(to_csv(gpipe(2, 4))) == gpipe(2, 4)
        True
    """
    reader = Reader(num_stages=num_stages, num_microbatches=num_microbatches)
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()  # an empty line in the middle is a position that does nothing; at the end it is no row
    for number, line in enumerate(lines, start=1):
        if line.startswith("#:"):
            reader.add_header(Token(line[2:], number, 3))
        elif not line.startswith("#"):
            reader.add_position(_steps(line, number))
    return reader.plan(num_lines=len(lines) + 1)


def _is_implied_by_its_table(plan: Plan) -> bool:
    """Whether the table of steps alone reads back to ``plan``: a chain in which every stage acts at home."""
    stages = plan.num_stages
    acting = [(position, action) for position in range(plan.num_positions) for action in plan.actions(position)]
    forwards = {(action.stage, plan.piece_of(action)) for _, action in acting if action.kind is ActionKind.F}
    trains = any(action.kind is not ActionKind.F for _, action in acting)
    return (
        plan.routes is None
        and plan.graph == chain(stages)
        and not plan.groups
        and plan.forward_only == (() if trains else tuple(range(stages)))
        and len(forwards) == stages * plan.num_pieces
        and all(
            action.kind in COMPUTES
            and action.stage < stages
            and plan.placement[action.stage] == (position,)
            and (action.microbatch or 0) < plan.num_microbatches
            for position, action in acting
        )
    )


def _steps(line: str, line_number: int) -> Iterator[tuple[Token, list[Token]]]:
    """The steps of a row of CSV."""
    column = 1
    under_way: set[str] = set()
    for cell in line.split(","):
        for step, words in Token(cell, line_number, column).steps():
            actions = [evolve(word, text=with_peer(word.text)) for word in words]
            if (awaited := awaited_by(step.text)) is None:
                under_way |= {action.text for action in actions}
                yield step, actions
            elif with_peer(awaited) not in under_way:
                raise step.error(f"{awaited} before it on the row, and one wait for it")
            else:
                under_way.remove(with_peer(awaited))
        column += len(cell) + 1


def awaited_by(text: str) -> str | None:
    """The send or the reduction that a wait of torch's is for; None of any other action."""
    match = _WAIT.fullmatch(text)
    return match and f"{match[1]}{match[2]}"


def with_peer(text: str) -> str:
    """A message of torch's with its peer, which is left out there."""
    match = _PEERLESS.fullmatch(text)
    if match is None:
        return text
    way, step = _NEXT[match[2]]
    return f"{text}{way}{int(match[1]) + step}"
