"""The README's example runs with this package and what it declares."""

from pathlib import Path

import pytest


@pytest.mark.thorough
def test_it_prints_what_its_comments_say(readme_example):
    example = (Path(__file__).parents[1] / "README.md").read_text().rpartition("```python\n")[2]
    assert readme_example.splitlines() == [line.split("# ")[1] for line in example.splitlines() if "print(" in line]
