"""The example of the README, with this package and what it declares alone: no torch."""


def test_it_runs(readme_example):
    assert "and no plan is shorter than" in readme_example
    assert "zero_bubble_v" in readme_example
