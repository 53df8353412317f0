"""The README's example runs with this package and what it declares."""

import pytest


@pytest.mark.thorough
def test_the_rank_that_waits_says_who_failed_and_where_all_were(readme_example):
    first, *places = readme_example.splitlines()
    assert first == "rank 1, step 2: the data has ended"
    assert any("rank 0: step 2, all-reduce" in place for place in places)
    assert any("rank 1: step 2, forward" in place for place in places)
