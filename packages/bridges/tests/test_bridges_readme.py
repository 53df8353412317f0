"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_samples_cross_to_fewer_replicas_and_gradients_return(readme_example):
    assert sorted(readme_example.splitlines()) == [
        "rank 0: gradients [3.0, 3.0]",
        "rank 1: gradients [3.0, 4.0]",
        "rank 2: gradients [4.0, 4.0]",
        "rank 3: samples of ranks [0.0, 0.0, 1.0]",
        "rank 4: samples of ranks [1.0, 2.0, 2.0]",
    ]
