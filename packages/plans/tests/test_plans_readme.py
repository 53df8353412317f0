"""The example of the README, with this package and what it declares alone: no torch."""


def test_it_runs(readme_example):
    assert "no deadlock" in readme_example
    assert "1B0" in readme_example.splitlines()[-1]
