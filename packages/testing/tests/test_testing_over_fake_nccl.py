"""Tests over the fake NCCL: a broken rule fails the test, and the modes are options of the command line."""

import pytest

pytestmark = pytest.mark.thorough

BROKEN = """
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, backend="fake_nccl")
TURNS = []

@pytest.mark.parametrize("turn", [0, 1])
def test_makes_many_groups(ranks, turn):
    for _ in range(10):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    TURNS.append(turn)
    assert TURNS == [0, 1][: turn + 1]

def test_a_send_buffer_is_reused_too_early(ranks):
    x = torch.ones(4)
    if ranks.rank == 0:
        work = dist.isend(x, 1)
        x.zero_()
        ranks.barrier()
        work.wait()
    else:
        ranks.barrier()
        dist.recv(x, 0)
    ranks.barrier()

@pytest.mark.parametrize("there", [torch.zeros(2), torch.zeros(8), torch.zeros(4, dtype=torch.int32)])
def test_a_receive_is_of_another_kind(ranks, there):
    work = dist.isend(torch.ones(4), 1) if ranks.rank == 0 else dist.irecv(there, 0)
    work.wait()
    assert not work.is_success()
    ranks.barrier()

def test_an_entry_is_too_old(ranks):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if ranks.rank == 0:
        work = group.recv([torch.zeros(2)], 1, 0)
        work.wait()
        assert not work.is_success()
    ranks.barrier()

def test_aborts_what_it_destroyed(ranks):
    group = dist.new_group([0, 1])
    group.shutdown()
    if ranks.rank == 0:
        group.abort()
    ranks.barrier()

@pytest.mark.parametrize("look", ["work", "event"])
def test_a_poll_while_an_abort_waits_for_another_group(ranks, look):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    if ranks.rank == 0:
        works, streams = [group.recv([torch.zeros(2)], 1, 0) for group in groups], ranks.fake_device.streams
        while not all(entry.started for entry in ranks.fake_device.unfinished()):
            time.sleep(0.01)
        first = threading.Thread(target=groups[0].abort)
        first.start()
        first.join(0.3)
        works[1].is_completed() if look == "work" else streams.current_stream().record_event().query()
        groups[1].abort()
        first.join()
        works[1].is_completed()
    ranks.barrier()

def test_a_group_is_destroyed_in_the_middle(ranks):
    group = dist.new_group([0, 1])
    if ranks.rank == 0:
        group.recv([torch.zeros(2)], 1, 0)
        destroying = threading.Thread(target=group.shutdown)
        destroying.start()
        destroying.join(0.3)
        ranks.barrier()
        destroying.join()
    else:
        ranks.barrier()
        group.send([torch.zeros(2)], 0, 0).wait()
        group.shutdown()
    ranks.barrier()

def test_keeps_the_rules(ranks):
    dist.all_reduce(torch.ones(1))

@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="serial")
def test_is_serial(ranks):
    assert ranks.fake_device.serial
"""


@pytest.fixture(scope="module")
def broken(session):
    return session(BROKEN)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "test_a_send_buffer_is_reused_too_early",
            "a send of 16 bytes to rank 1 in group 0: its tensor was written to between the call and the end",
        ),
        *(
            (
                f"test_a_receive_is_of_another_kind[there{number}]",
                f"rank 1 receives {kind} in group 0 where rank 0 sends 16 bytes of torch.float32; NCCL compares",
            )
            for number, kind in enumerate(
                ["8 bytes of torch.float32", "32 bytes of torch.float32", "16 bytes of torch.int32"]
            )
        ),
        (
            "test_an_entry_is_too_old",
            "was ended by the watchdog: not done after the group's timeout of 0.3 s",
        ),
        ("test_aborts_what_it_destroyed", "after its destroy; ncclCommAbort would free its communicator twice"),
        *(
            (
                f"test_a_poll_while_an_abort_waits_for_another_group[{look}]",
                "thread MainThread polled the device while the abort of group 1 waited for entry 1 (p2p: recv 8 bytes",
            )
            for look in ("work", "event")
        ),
        ("test_a_group_is_destroyed_in_the_middle", "was destroyed with entry 0 (p2p: recv 8 bytes, rank 1)"),
    ],
)
def test_a_broken_rule_fails_the_test(broken, name, text):
    assert broken.outcomes[name] == "failure"
    assert text in broken.texts[name]


def test_other_tests_of_the_session_pass(broken):
    for name in ("test_keeps_the_rules", "test_is_serial"):
        assert broken.outcomes[name] == "passed", broken.texts[name]


def test_groups_are_gone_with_their_test_so_that_the_worker_is_kept(broken):
    for turn in range(2):
        name = f"test_makes_many_groups[{turn}]"
        assert broken.outcomes[name] == "passed", broken.texts[name]


def test_the_serial_mode_of_the_command_line(session):
    done = session(
        "import pytest\n@pytest.mark.ranks(1)\ndef test_it(ranks):\n"
        "    assert ranks.backend == 'fake_nccl'\n    assert ranks.fake_device.serial\n",
        *("--backend", "fake_nccl", "--fake-nccl", "serial"),
    )
    assert done.outcomes == {"test_it": "passed"}, done.printed


def test_the_lazy_mode_of_the_command_line(session):
    done = session(
        "import pytest\n@pytest.mark.ranks(1)\ndef test_it(ranks):\n    assert ranks.fake_device.lazy\n",
        *("--backend", "fake_nccl", "--fake-nccl", "lazy"),
    )
    assert done.outcomes == {"test_it": "passed"}, done.printed


def test_the_legacy_mode_of_the_command_line(session):
    done = session(
        "import pytest\nimport torch.distributed as dist\n@pytest.mark.ranks(1)\n"
        "def test_it(ranks):\n    assert type(dist.group.WORLD).__name__ == 'LegacyGroup'\n",
        *("--backend", "fake_nccl", "--fake-nccl", "legacy"),
    )
    assert done.outcomes == {"test_it": "passed"}, done.printed
