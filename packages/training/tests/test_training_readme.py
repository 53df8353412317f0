"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_two_ranks_train(readme_example):
    assert "losses fall: True" in readme_example
