"""The README's example runs with this package and what it declares: no torch."""


def test_a_layout_is_read_and_one_is_balanced(readme_example):
    lines = readme_example.splitlines()
    assert "[33, 34]" in lines  # the layers of one chunk
    assert lines[-1] == "True"  # the balance is proven
