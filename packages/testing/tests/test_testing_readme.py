"""The README's example runs with this package and what it declares."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough


def test_its_two_tests_pass(session):
    example = (Path(__file__).parents[1] / "README.md").read_text().rpartition("```python\n")[2].removesuffix("```\n")
    done = session(example)
    assert done.outcomes == {"test_all_reduce": "passed", "test_survivor_is_told": "passed"}
