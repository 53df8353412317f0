"""The README's example runs with this package and what it declares: no torch."""


def test_roles_and_ranks_of_two_modules_are_printed(readme_example):
    assert readme_example.splitlines()[-2:] == ["False False (1, 2)", "[[4, 5, 8, 9], [6, 7, 10, 11]]"]
