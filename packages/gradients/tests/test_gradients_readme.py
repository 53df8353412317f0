"""The README's example runs with this package and what it declares."""

import math

import pytest


@pytest.mark.thorough
def test_two_modules_on_grids_of_their_own_have_one_norm(readme_example):
    norm = math.sqrt(8 * 3.0**2 + 6 * 3.0**2)  # sums over two encoders (1 + 2), and of one decoder
    assert sorted(readme_example.splitlines()) == [
        f"rank {rank}: norm {norm:.4f}, gradient {3.0 / norm:.4f}" for rank in range(3)
    ]
