"""Plans as CSV: one row per position, one step per cell.

This is how torch.distributed.pipelining writes its compute-only schedules (``0F0,1F0,...``), and both ways it
is the same file for a chain. An empty cell is an idle slot and is dropped; torch's ``(4F5;3B0)OVERLAP_F_B``
is read as the two computes one after the other. What the rows cannot tell (a graph that is not a chain,
groups) goes before them in lines that start with ``#:`` and are the text form's header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipegrid.schedules.arguments import require_integer
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.plan.plan import Plan, require_plan
from pipegrid.schedules.plan.reading import PlanReader
from pipegrid.schedules.plan.text import header_lines, step_text
from pipegrid.schedules.plan.words import Word, require_text, words

_OVERLAP = re.compile(r"\s*\(\s*([^;()\s]+)\s*;\s*([^;()\s]+)\s*\)\s*OVERLAP_F_B\s*")


def to_csv(plan: Plan) -> str:
    """The plan as CSV; `from_csv` reads it back to an equal plan, and torch reads a chain's computes.

    Raises:
        PlanError: it is no `Plan`.
    """
    require_plan(plan)
    rows = [",".join(step_text(step) for step in steps) for steps in plan.positions]
    body = "\n".join(rows) + "\n"
    try:
        plain = from_csv(body) == plan
    except PlanError:
        plain = False
    return body if plain else "".join(f"#: {line}\n" for line in header_lines(plan)) + body


def from_csv(text: str, *, num_microbatches: int | None = None, num_stages: int | None = None) -> Plan:
    """Read CSV that `to_csv` wrote, or torch's, one row per position.

    ``num_microbatches`` and ``num_stages`` (of a chain) bound what may appear; by default the table tells.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
        PlanError: the parts do not fit each other, or it is no text.
    """
    require_text(text)
    for name, size in (("num_microbatches", num_microbatches), ("num_stages", num_stages)):
        if size is not None:
            require_integer(name, size, "or None, for the table to tell", error=PlanError)
    reader = PlanReader(num_stages=num_stages, num_microbatches=num_microbatches)
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()  # an empty row in the middle is a position that does nothing; at the end it is nothing
    row = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith("#:"):
            reader.header.read(words(line, line_number=number, start=2))
            continue
        if line.startswith("#"):
            continue
        reader.position(Word(str(row), number, 1), _cells(line, number))
        row += 1
    return reader.plan(num_lines=len(lines) + 1)


def _cells(line: str, line_number: int) -> Iterator[Word]:
    column = 1
    for cell in line.split(","):
        pair = _OVERLAP.fullmatch(cell)
        if pair is not None:
            for part in (1, 2):
                yield Word(pair[part], line_number, column + pair.start(part))
        elif "OVERLAP" in cell:
            start = len(cell) - len(cell.lstrip())
            raise Word(cell.strip(), line_number, column + start).error(
                "a cell of its own for each step; a pair is written (4F5;3B0)OVERLAP_F_B"
            )
        else:
            for match in re.finditer(r"\S+", cell):
                yield Word(match[0], line_number, column + match.start())
        column += len(cell) + 1
