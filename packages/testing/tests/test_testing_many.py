"""A test on ranks costs little more than what it does: two hundred of one all-reduce take less than a minute."""

import time

import pytest

MINUTE = 60.0

MANY = """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range({count}))
def test_all_reduce(ranks, i):
    x = torch.full((4,), float(ranks.rank + i))
    dist.all_reduce(x)
    assert x.tolist() == [2.0 * i + 1] * 4
"""


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_many_tests_in_a_row(session, count):
    began = time.monotonic()
    done = session(MANY.format(count=count))
    seconds = time.monotonic() - began
    assert list(done.outcomes.values()) == ["passed"] * count, done.printed
    if count == 200:  # what is promised; on a machine with much else to do, nothing is
        assert seconds < MINUTE
