"""Transfers between stages of every two tensor-parallel sizes are exact to the bit, whatever the lengths."""

from __future__ import annotations

import itertools

import pytest

from .vtp_ranks import both_ways, cuttable, uneven

CUTS = [(True, True), (True, False), (False, True)]


def transfer(pair, cuts, *, strict=False):
    a, b = pair
    both_ways(pair, uneven(a, b), strict=strict)
    for flags in cuts:
        both_ways(pair, cuttable(a, b), flags=flags, strict=strict)


@pytest.mark.ranks(5)
@pytest.mark.parametrize("strict", [False, True])
def test_some_pairs_of_sizes(strict):
    # One world of ranks for all of them: those that a pair does not need go on to the next.
    transfer((2, 3), CUTS, strict=strict)
    for pair, flags in [((1, 4), CUTS[0]), ((3, 2), CUTS[1]), ((2, 2), CUTS[2])][:: 2 if strict else 1]:
        transfer(pair, [flags], strict=strict)


@pytest.mark.nightly
@pytest.mark.ranks(16, deadline=1200)
@pytest.mark.parametrize("strict", [False, True])
def test_all_pairs_of_sizes_up_to_8(strict):
    for pair in itertools.product(range(1, 9), repeat=2):
        transfer(pair, CUTS, strict=strict)
