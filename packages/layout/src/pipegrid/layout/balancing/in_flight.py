"""Microbatches in flight per chunk of a rank at its moments of highest memory, under 1F1B.

After ``f`` chunk forwards and ``b`` chunk backwards of a rank, the activations of ``f - b`` are in flight. 1F1B
(Narayanan et al. 2021, sections 2.2 and 2.3) warms up with ``K - 1`` forwards and then alternates, so the peaks are
the states ``(f, b) = (K + b, b)``. With one chunk ``K = pp - rank``. With ``vpp`` chunks, microbatches go in groups of
``pp`` through chunk 0, then through chunk 1, ..., backwards in reverse, and
``K = 2 (pp - rank - 1) + (vpp - 1) pp + 1``. The counts per chunk change as ``b`` grows: by one, until the chunk of
the forwards or the chunk of the backwards changes. A rank's memory is linear in the counts, so it is highest at one of
these changes, and only the counts there are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge

from pipegrid.core.fields import shown
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.fields import integer, sizes_of_pipeline

Peaks = Sequence[Sequence[Sequence[int]]]
"""Combinations of in-flight microbatches per chunk that occur on each rank, as `in_flight_1f1b` returns them."""


def in_flight_1f1b(pp: int, vpp: int = 1, microbatches: int | None = None) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The peaks of 1F1B, interleaved where ``vpp > 1``.

    Args:
        pp: number of pp ranks.
        vpp: number of chunks per rank.
        microbatches: per step; None for enough to reach the steady state.

    Returns:
        For each rank, the combinations of in-flight microbatches per chunk that occur in a step and that no other
        combination exceeds in every chunk.
    """
    pp, vpp = sizes_of_pipeline(pp, vpp)
    if microbatches is not None:
        microbatches = integer(microbatches, "microbatches", least=1)
    return tuple(_peaks(rank, pp, vpp, microbatches) for rank in range(pp))


def _peaks(rank: int, pp: int, vpp: int, microbatches: int | None) -> tuple[tuple[int, ...], ...]:
    if vpp == 1:
        return ((pp - rank if microbatches is None else min(pp - rank, microbatches),),)
    held = 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
    if microbatches is None:
        # Chunks recur after pp * vpp actions, so later backwards add no combination.
        microbatches = pp * (2 + -(-held // (pp * vpp)))
        last_backward = pp * vpp
    else:
        held = min(held, microbatches * vpp)
        last_backward = microbatches * vpp - held
    changes = [  # numbers of chunk forwards after which the chunk changes: ends of the groups of (at most) pp
        start * vpp + min(pp, microbatches - start) * chunk
        for start in range(0, microbatches, pp)
        for chunk in range(1, vpp + 1)
    ]
    states = {0, last_backward}
    states.update(b for b in changes if b <= last_backward)
    states.update(f - held for f in changes if 0 <= f - held <= last_backward)
    counts = {
        tuple(
            _done(held + b, chunk, pp, vpp, microbatches) - _done(b, vpp - 1 - chunk, pp, vpp, microbatches)
            for chunk in range(vpp)
        )
        for b in states
    }
    covered = {one for one in counts for other in counts if one != other and all(map(ge, other, one))}
    return tuple(sorted(counts - covered))


def _done(actions: int, turn: int, pp: int, vpp: int, microbatches: int) -> int:
    """The number, of the first ``actions`` chunk actions, that are of the chunk with place ``turn`` in a group."""
    groups, rest = divmod(actions, pp * vpp)
    size = min(pp, microbatches - groups * pp)
    return groups * pp + min(max(rest - turn * size, 0), size)


def peaks_of(
    in_flight: Peaks | None, pp: int, vpp: int, microbatches: int | None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """``in_flight`` as tuples or, where it is None, the peaks of 1F1B."""
    if in_flight is None:
        return in_flight_1f1b(pp, vpp, microbatches)
    if microbatches is not None:
        raise LayoutError("give microbatches (for 1F1B) or in_flight (for another schedule), not both")
    try:
        shapes = [{len(peak) for peak in peaks} for peaks in in_flight]
    except TypeError:
        shapes = []
    if shapes != [{vpp}] * pp:
        rule = f"must have, for each of {pp} pp ranks, at least one list of {vpp} whole numbers, one per chunk"
        raise LayoutError(f"in_flight is {shown(in_flight)}; it {rule}")
    return tuple(
        tuple(tuple(integer(count, f"in_flight of pp rank {rank}", least=0) for count in peak) for peak in peaks)
        for rank, peaks in enumerate(in_flight)
    )
