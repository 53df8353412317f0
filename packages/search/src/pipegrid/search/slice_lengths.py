"""Lengths of sequence slices, and what each of them costs where attention is causal.

A token costs the same in every matrix product of a layer, and its attention as much as there are tokens before it. With
``attention`` as the share that causal attention has in the FLOPs of the whole sequence, the first ``x`` of it (0 to
1) costs ``(1 - attention) x + attention x**2``. A layer of hidden size d with 12 d**2 weights (an MLP of 4 d) costs
24 d**2 FLOPs per token, and 4 d for each token that it attends to: of n tokens, 24 d**2 n + 2 d n**2 in all. So
``attention`` is ``n / (12 d + n)``: 0.08 for 4,096 tokens at d = 4,096, 0.4 for 32,768.

Source: Sun et al. 2024, "Seq1F1B" (arXiv 2406.03488): the computation-wise partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise

from pipegrid.core.fields import Count, checked, checked_arguments
from pipegrid.plans.simulate import CostsError
from pipegrid.plans.simulate.costs import Share


@checked_arguments(CostsError)
def balanced_slices(
    seq_length: Count, num_slices: Count, *, attention: Share, multiple_of: Count = 1
) -> tuple[int, ...]:
    """The lengths of ``num_slices`` slices of equal cost, in tokens: the later, the shorter.

    Args:
        seq_length: tokens of a microbatch's sequence.
        num_slices: k.
        attention: share of causal attention in the FLOPs of the whole sequence.
        multiple_of: each length is a multiple of it (of a tensor-parallel size with sequence parallelism, of the tiles
            of a kernel).

    Examples:
        >>> balanced_slices(4096, 4, attention=0.3, multiple_of=128)
        (1280, 1024, 1024, 768)
    """
    tiles, rest = divmod(seq_length, multiple_of)
    if rest or tiles < num_slices:
        raise CostsError(
            f"a sequence of {seq_length} tokens cannot be cut into {num_slices} slices of a multiple of {multiple_of} "
            "tokens"
        )
    ends = [0]
    linear = 1.0 - attention
    for number in range(1, num_slices):
        cost = number / num_slices
        # The root of attention x**2 + linear x - cost, in a form that holds for attention 0.
        place = 2.0 * cost / (linear + math.sqrt(linear * linear + 4.0 * attention * cost))
        wanted = round(place * tiles)
        ends.append(min(max(wanted, ends[-1] + 1), tiles - (num_slices - number)))  # no slice is empty
    return tuple((end - start) * multiple_of for start, end in pairwise([*ends, tiles]))


@checked_arguments(CostsError)
def slice_times(lengths: Iterable[int], *, attention: Share) -> tuple[float, ...]:
    """The share of each slice in the time of a microbatch, for ``Costs(slice_lengths=..., slice_times=...)``.

    Examples:
        >>> slice_times([2048, 1024, 1024], attention=0.5)
        (0.375, 0.28125, 0.34375)
    """
    sizes = checked(tuple(lengths), tuple[Count, ...], "lengths", CostsError)
    ends = [end / sum(sizes) for end in accumulate(sizes, initial=0)]
    return tuple(
        (1.0 - attention) * (end - start) + attention * (end * end - start * start) for start, end in pairwise(ends)
    )
