"""Fixtures of all folders."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def network():
    """A pipeline in this process; see `Network`."""
    from .kit.threads import Network

    return Network()


@pytest.fixture(scope="module")
def process_group():
    """A world of this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
