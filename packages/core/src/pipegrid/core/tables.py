"""Tables for a terminal: plain text, or drawn by rich where it is installed."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Columns as wide as their widest cell, under a ruled header; the columns ``right`` are aligned to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, rule, *rows)
    )


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = (), color: bool = False
) -> str:
    """The table drawn by rich where it is installed, else as `text_table`; ``color``: for a terminal, rich only."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        return text_table(header, rows, right=right)
    drawn = Table()
    for column, name in enumerate(header):
        drawn.add_column(name, no_wrap=True, justify="right" if column in right else "left")
    for row in rows:
        drawn.add_row(*row)
    # As wide as the cells: a cut table says nothing.
    width = sum(max(len(row[column]) for row in (header, *rows)) + 3 for column in range(len(header))) + 1
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip("\n")
