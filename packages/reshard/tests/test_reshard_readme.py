"""The README's example runs with this package and what it declares: no torch."""

import pytest


@pytest.mark.thorough
def test_it_runs(readme_example):
    assert "1[0:1, 0:16, 0:8] -> 3[2:3, 0:16, 0:8]" in readme_example.splitlines()
