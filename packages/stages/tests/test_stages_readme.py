"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_stages_compute_what_the_model_computes(readme_example):
    assert "'Ett|ttL': proved" in readme_example
    assert "['layers.2.weight'" in readme_example
    assert "equal" in readme_example.splitlines()[-1]
