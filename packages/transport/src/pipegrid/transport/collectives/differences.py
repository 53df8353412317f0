"""Texts for errors about values that should be equal on all ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them shortened: ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def by_text(said: Mapping[int, str]) -> list[str]:
    """``ranks 0-2: text`` for each text of ``said``, by rank."""
    groups: dict[str, list[int]] = {}
    for rank, text in said.items():
        groups.setdefault(text, []).append(rank)
    return [f"{listed(ranks)}: {text}" for text, ranks in groups.items()]


def difference(said: Mapping[int, str]) -> str | None:
    """``ranks 0-2: text; rank 3: another``; None where all ranks say the same."""
    texts = by_text(said)
    return "; ".join(texts) if len(texts) > 1 else None
