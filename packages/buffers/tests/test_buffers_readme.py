"""The example of the README, with this package and what it declares alone: no torch."""


def test_it_prints_the_slots_of_each_position(readme_example):
    assert "a pool per edge" in readme_example
    assert readme_example.splitlines()[-1].split() == ["all", "96", "40", "31", "1,040,187,392"]
