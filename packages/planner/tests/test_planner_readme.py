"""The README's example runs with this package and what it declares: no torch."""


def test_the_best_choice_of_a_job_is_printed(readme_example):
    assert readme_example == "dp=16 1f1b 3.69 s\n"
