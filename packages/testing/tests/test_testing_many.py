"""Two hundred tests in a row on the same two workers."""

import pytest
import torch
import torch.distributed as dist


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(200))
def test_all_reduce(ranks, i):
    x = torch.full((4,), float(ranks.rank + i))
    dist.all_reduce(x)
    assert x.tolist() == [2.0 * i + 1] * 4
