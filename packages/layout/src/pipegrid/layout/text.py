"""Stages as text: the canonical layout string, the shortest readable one, and tables in words.

In the canonical string runs are folded at three levels, each only where that makes the text shorter: equal layers
(``t*3``), equal stages (``(tt|)*29``), and repeated sequences of such runs (``((tt|)*3,(t|)*2)*5``). The result
depends on the stages alone, so equal layouts have equal texts, and it parses back to the same stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from pipegrid.layout.grammar import LayoutGrammar

_LONGEST_PERIOD = 32  # runs of stages in one repeated sequence; keeps the fold linear in the number of runs


def write(stages: Sequence[tuple[str, ...]], grammar: LayoutGrammar) -> str:
    """The canonical layout string of ``stages`` (kinds of layer per stage, in model order)."""
    texts = {stage: write_stage(stage, grammar) for stage in set(stages)}
    # Every stage but the last is written with its separator, so that a run of them is one repeat.
    closed = [f"{texts[stage]}|" for stage in stages[:-1]]
    return _join([*_fold([_repeat(text, len(list(run))) for text, run in groupby(closed)]), texts[stages[-1]]])


def write_stage(stage: Sequence[str], grammar: LayoutGrammar) -> str:
    """The layers of one stage: ``Et*3``."""
    return _join([_repeat(grammar.symbol(kind), len(list(run))) for kind, run in groupby(stage)])


def _join(parts: Sequence[str]) -> str:
    """The parts concatenated; a comma separates a count from the part after it, for the eye only."""
    pieces = [""]
    for part in filter(None, parts):
        pieces += [",", part] if pieces[-1][-1:].isdigit() and part[0] != "|" else [part]
    return "".join(pieces)


def _repeat(text: str, count: int) -> str:
    """``text`` ``count`` times, folded where that is not longer (a single letter) or is shorter (a group)."""
    if len(text) == 1:
        folded = f"{text}*{count}"
        return folded if len(folded) <= count else text * count
    folded = f"({text})*{count}"
    return folded if len(folded) < len(text) * count else text * count


def _fold(runs: list[str]) -> list[str]:
    """Fold repeated sequences of runs, from the left, at each place the one that saves most."""
    result = []
    start = 0
    while start < len(runs):
        saved, text, size = 0, runs[start], 1
        for period in range(2, min(_LONGEST_PERIOD, (len(runs) - start) // 2) + 1):
            count = _count(runs, start, period)
            if count > 1:
                folded = f"({_join(runs[start : start + period])})*{count}"
                plain = _join(runs[start : start + period * count])
                if len(plain) - len(folded) > saved:
                    saved, text, size = len(plain) - len(folded), folded, period * count
        result.append(text)
        start += size
    return result


def _count(runs: list[str], start: int, period: int) -> int:
    """Number of consecutive repetitions of the ``period`` runs from ``start`` on."""
    if runs[start] != runs[start + period]:
        return 1
    count = 1
    while runs[start + period * count : start + period * (count + 1)] == runs[start : start + period]:
        count += 1
    return count


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


def name_layers(layers: Sequence[str]) -> str:
    """The layers of a stage in words: ``embedding,decoder*3``."""
    runs = [(kind, len(list(run))) for kind, run in groupby(layers)]
    return ",".join(f"{kind!s}*{count}" if count > 1 else str(kind) for kind, count in runs) or "(empty stage)"
