"""Tests on ranks, seen from inside: what a test body is given, and what is left of the test before it."""

import contextlib
import logging
import os
import random
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.testing import Ranks

MAIN_PID = os.getpid()


def gathered(ranks: Ranks, text: str) -> list[str]:
    """What every rank says; through the store, since torch's own way with objects needs numpy."""
    ranks.store.set(f"gathered/{ranks.rank}", text)
    ranks.barrier()
    return [ranks.store.get(f"gathered/{rank}").decode() for rank in range(ranks.world_size)]


@pytest.mark.ranks(2)
def test_each_rank_is_a_process_of_its_own_with_one_thread_to_compute(ranks):
    pids = gathered(ranks, str(os.getpid()))
    assert len(set(pids)) == ranks.world_size == dist.get_world_size() == 2
    assert str(os.getppid()) not in pids
    assert ranks.rank == dist.get_rank()
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(1, 3, 4)
def test_a_mark_with_several_sizes_runs_the_test_once_for_each(ranks, request):
    x = torch.full((2,), float(ranks.rank))
    dist.all_reduce(x)
    n = ranks.world_size
    assert x.tolist() == [n * (n - 1) / 2] * 2
    assert request.node.name.endswith(f"[{n} ranks]")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [lambda x: x + 1, threading.Lock()], ids=["lambda", "lock"])
def test_parameters_need_not_be_picklable(ranks, value):
    assert value(1) == 2 if callable(value) else value.acquire(blocking=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [0, 1])
def test_ranks_draw_the_same_numbers_whatever_each_of_them_drew_before(ranks, before):
    drawn = gathered(ranks, f"{random.random()} {torch.rand(2).tolist()}")
    assert len(set(drawn)) == 1
    for _ in range(before + ranks.rank):
        torch.rand(1), random.random()


@pytest.fixture(scope="module")
def counter(ranks):
    assert ranks.rank == dist.get_rank()
    return []


@pytest.fixture
def pair(ranks):
    return dist.new_group([0, 1]), f"of rank {ranks.rank}"


@pytest.mark.ranks(3)
def test_a_fixture_may_use_the_ranks_and_make_groups(ranks, pair):
    group, name = pair
    assert name == f"of rank {ranks.rank}"
    if ranks.rank < 2:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(2))
def test_every_fixture_ends_with_the_test_whatever_its_scope(counter, i):
    counter.append(i)
    assert counter == [i]


@pytest.mark.ranks(2)
def test_pytests_own_fixtures_act_on_the_rank(ranks, monkeypatch, capsys, caplog, tmp_path):
    monkeypatch.setenv("PIPEGRID_TEST_RANK", str(ranks.rank))
    assert os.environ["PIPEGRID_TEST_RANK"] == str(ranks.rank)
    sys.stdout.write(f"{ranks.rank}\n")
    assert capsys.readouterr().out == f"{ranks.rank}\n"
    logging.getLogger().warning("said on rank %d", ranks.rank)
    assert caplog.messages == [f"said on rank {ranks.rank}"]
    assert len(set(gathered(ranks, str(tmp_path)))) == 2


@pytest.mark.ranks(2)
def test_ranks_share_a_directory_and_a_store(ranks):
    assert len(set(gathered(ranks, str(ranks.shared_path)))) == 1
    if ranks.rank == 0:
        (ranks.shared_path / "note").write_text("from 0")
        ranks.store.set("key", "value")
    ranks.barrier()
    assert (ranks.shared_path / "note").read_text() == "from 0"
    assert ranks.store.get("key") == b"value"


@pytest.mark.ranks(2)
def test_the_shared_directory_and_the_store_are_new_for_each_test(ranks):
    assert list(ranks.shared_path.iterdir()) == []
    assert not ranks.store.check(["key"])


def listening():
    """Where this process listens for TCP connections: addresses and ports, as the kernel writes them."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            sockets.add(str(descriptor.readlink()))
    tables = [Path("/proc/self/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


@pytest.mark.ranks(2)
@pytest.mark.skipif(not Path("/proc/self/net/tcp6").exists(), reason="reads /proc/self/net")
def test_ranks_listen_on_the_loopback_device_only_and_on_ports_that_the_kernel_chose():
    dist.barrier()
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = listening()
    assert found
    for address, port in found:
        assert address == "0100007F"
        assert lowest <= int(port, 16) <= highest


class TestMethods:
    @pytest.mark.ranks(2)
    def test_a_method_runs_as_a_function_does(self, ranks):
        assert isinstance(self, TestMethods)
        assert isinstance(ranks, Ranks)


@pytest.mark.ranks(2)
def test_defaults_of_the_settings(ranks, request):
    option = request.config.getoption
    assert ranks.backend == (option("--backend") or "gloo")
    assert ranks.deadline == (option("--deadline") or 60)
    assert ranks.strict_sends is bool(option("--strict-sends"))
    assert ranks.device.type == ("cuda" if ranks.backend == "nccl" else "cpu")


@pytest.mark.ranks(2, backend="gloo", deadline=33, strict_sends=True)
def test_the_mark_chooses_settings(ranks):
    assert (ranks.backend, ranks.deadline, ranks.strict_sends) == ("gloo", 33, True)
    assert dist.get_backend() == "gloo"


@pytest.mark.ranks(2)
def test_the_sessions_warning_filters_hold_on_ranks():
    with pytest.raises(UserWarning, match="an error here as there"):
        warnings.warn("an error here as there", UserWarning, stacklevel=1)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:let pass:UserWarning")
def test_the_tests_own_warning_filters_hold_on_ranks():
    warnings.warn("let pass", UserWarning, stacklevel=1)


@pytest.mark.ranks(2)
@settings(max_examples=5, derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=1, max_size=4))
def test_derandomized_properties_draw_the_same_on_every_rank(ranks, values):
    x = torch.tensor(values)
    dist.all_reduce(x)
    assert x.tolist() == [ranks.world_size * value for value in values]


@pytest.mark.ranks(2)
def test_the_default_group_may_be_destroyed_by_the_test():
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_new_default_group_is_there_all_the_same():
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


def test_a_plain_test_stays_in_the_pytest_process():
    assert os.getpid() == MAIN_PID
    assert not dist.is_initialized()
