"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby


def align(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Rows of cells as lines with aligned columns; the columns in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def merge_equal(count: int, key: Callable[[int], Hashable]) -> list[tuple[str, int]]:
    """Consecutive indices with equal keys: the label of each run (``"1-13"``) and its first index."""
    merged = []
    for _, run in groupby(range(count), key=key):
        indices = list(run)
        label = str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        merged.append((label, indices[0]))
    return merged


def name_layers(layers: Sequence[str]) -> str:
    """The layers of a stage in words: ``embedding,decoder*3``."""
    runs = [(kind, len(list(run))) for kind, run in groupby(layers)]
    return ",".join(f"{kind!s}*{count}" if count > 1 else str(kind) for kind, count in runs) or "(empty stage)"
