"""The example of the README, with this package and what it declares alone: no torch."""


def test_it_runs(readme_example):
    assert "bubble" in readme_example
