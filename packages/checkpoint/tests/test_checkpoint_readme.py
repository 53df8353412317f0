"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_a_stage_and_its_optimizer_come_back(readme_example):
    assert readme_example.splitlines() == ["step 1", "as saved: True"]
