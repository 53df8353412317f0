"""Lengths of slices of equal cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans import Costs, CostsError, seq1f1b, simulate
from pipegrid.search import balanced_slices, slice_times


@given(st.integers(1, 8), st.integers(1, 64), st.floats(0, 1), st.sampled_from([1, 4, 128]))
def test_balanced_slices_cost_the_same_up_to_a_tile(k, tiles, attention, tile):
    tiles += k
    lengths = balanced_slices(tiles * tile, k, attention=attention, multiple_of=tile)
    assert sum(lengths) == tiles * tile
    assert all(length > 0 and length % tile == 0 for length in lengths)
    times = slice_times(lengths, attention=attention)
    assert sum(times) == pytest.approx(1)
    # Each boundary is off by half a tile at most, unless no tile is left for the slices behind it.
    if min(lengths) > tile:
        assert max(abs(time - 1 / k) for time in times) <= (1 + attention) / tiles + 1e-9


def test_later_slices_are_shorter_or_take_longer():
    lengths = balanced_slices(32768, 4, attention=32768 / (12 * 4096 + 32768))
    assert list(lengths) == sorted(lengths, reverse=True)
    times = slice_times([1024] * 4, attention=1.0)  # attention alone: 1, 3, 5, 7 sixteenths
    assert times == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16])
    with pytest.raises(CostsError, match="cannot be cut into 4 slices of a multiple of 128"):
        balanced_slices(384, 4, attention=0.1, multiple_of=128)
    with pytest.raises(CostsError, match="a share from 0 to 1"):
        balanced_slices(384, 4, attention=1.5)


def test_balanced_slices_keep_the_formula_that_equal_lengths_lose():
    attention, p, m, k = 0.4, 4, 4, 4
    equal, balanced = [4096] * k, balanced_slices(4096 * k, k, attention=attention)
    spans = {}
    for name, lengths in (("equal", equal), ("balanced", balanced)):
        costs = Costs(slice_lengths=lengths, slice_times=slice_times(lengths, attention=attention))
        spans[name] = simulate(seq1f1b(p, m, num_slices=k), costs).makespan
    formula = 3 * m + 3 * (p - 1) / k
    assert spans["balanced"] < spans["equal"]
    assert spans["balanced"] == pytest.approx(formula, rel=0.02)
    assert spans["equal"] > 1.02 * formula
