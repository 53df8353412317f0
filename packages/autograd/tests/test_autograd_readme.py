"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_it_runs(readme_example):
    first, second, third = readme_example.splitlines()
    assert first.endswith("can be sent; None")
    assert second == "after W: (8, 8)"
    assert third == "bit for bit: True"
