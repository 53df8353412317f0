"""Fixtures."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def store():
    return dist.HashStore()
