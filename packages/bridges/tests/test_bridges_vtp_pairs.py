"""Transfers between stages of every two tensor-parallel sizes are exact to the bit, whatever the lengths."""

from __future__ import annotations

import pytest

from .vtp_ranks import both_ways, cuttable, uneven

CUTS = [(True, True), (True, False), (False, True)]


def transfer(pair, cuts, **settings):
    a, b = pair
    both_ways(pair, uneven(a, b), **settings)
    for flags in cuts:
        both_ways(pair, cuttable(a, b), flags=flags, **settings)


@pytest.mark.ranks(5)
@pytest.mark.parametrize("settings", [{}, {"strict": True}, {"communicators": "shared"}], ids=str)
def test_some_pairs_of_sizes(settings):
    # One world of ranks for all of them: those that a pair does not need go on to the next.
    transfer((2, 3), CUTS[:1], **settings)
    for pair, flags in [((1, 4), CUTS[0]), ((3, 2), CUTS[1]), ((2, 2), CUTS[2])][:: 3 if settings else 1]:
        transfer(pair, [flags], **settings)


EVERY = [(a, False) for a in range(1, 9)] + [(a, True) for a in (3, 8)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("a", "strict"), [pytest.param(*case, marks=pytest.mark.ranks(case[0] + 8, deadline=600)) for case in EVERY]
)
def test_all_pairs_of_sizes_up_to_8(a, strict):
    for b in range(1, 9):
        transfer((a, b), CUTS, strict=strict)
