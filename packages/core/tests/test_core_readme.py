"""The example of the README, with this package and what it declares alone: no torch."""


def test_it_runs(readme_example):
    first, second = readme_example.splitlines()
    assert first == "Shape.stages is 0; it must be an integer of at least 1"
    assert second == "['0>1', '1>2']"
