"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_a_step_that_runs_again_is_one_step(readme_example):
    assert readme_example.splitlines() == [
        "a peer has died: once more",
        "buffers as in one step: True",
        "gradients as in one step: True",
    ]
