"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_a_proved_plan_runs_on_two_processes(readme_example):
    proof, *ranks = readme_example.splitlines()
    assert "no deadlock even if sends block" in proof
    assert sorted(ranks) == ["rank 0: gradients of stages [0, 3]", "rank 1: gradients of stages [1, 2]"]
