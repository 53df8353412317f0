"""A pipeline over all ranks of a test."""

import pytest
import torch.distributed as dist

from pipegrid.transport import P2PCommunicator

from .stages import config, in_turn


@pytest.fixture
def communicator(request, ranks):
    settings = getattr(request, "param", {})
    made = P2PCommunicator(dist.group.WORLD, config(**settings))
    with in_turn(ranks, made):
        yield made
    made.close()
