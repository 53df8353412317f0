"""A store for what ranks tell each other beside their groups."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipegrid.topology import WorldError, control_store


def test_it_needs_the_default_group():
    with pytest.raises(WorldError, match="init_process_group first"):
        control_store("mine")


@pytest.mark.ranks(2)
def test_ranks_share_it_by_its_label(ranks):
    store, other = control_store("one"), control_store("two")
    if ranks.rank == 0:
        store.set("key", "value")
    assert store.get("key") == b"value"
    assert not other.check(["key"])


@pytest.mark.ranks(2)
def test_a_thread_may_wait_on_it_while_others_use_the_default_store(ranks):
    store = control_store("one")
    waiting = threading.Thread(target=store.wait, args=(["late"], timedelta(seconds=60)))
    waiting.start()
    x = dist.new_group([0, 1])  # meets over the default group's store
    dist.barrier(group=x)
    assert waiting.is_alive()
    ranks.barrier()
    if ranks.rank == 0:
        control_store("one").set("late", "now")
    waiting.join(timeout=30)
    assert not waiting.is_alive()
