"""What workers keep from test to test and what costs them their place: one session whose tests follow each other."""

from pathlib import Path

import pytest

LIVES = """
import ctypes, gc, os, pathlib, subprocess, sys, threading, time
import pytest, torch, torch.distributed as dist

HERE = pathlib.Path(__file__).parent
HOME = os.getcwd()
# Kept in each worker from test to test; empty in one that took another's place.
PIDS = []
HELD = []
KEPT = []

def held():
    # Descriptors and native threads of this process.
    return len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task"))

def sign():
    PIDS[:] = [os.getpid()]

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(12))
def test_groups_left_behind(ranks, i):
    before = held()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    assert all(now > then for now, then in zip(held(), before, strict=True))
    PIDS.append(os.getpid())
    HELD.append(before)
    if i == 11:
        assert PIDS == [os.getpid()] * 12
        # The first tests may load a library lazily; a leak would grow with each of the others.
        for early, late in zip(zip(*HELD[2:5]), zip(*HELD[-3:])):
            assert min(late) <= max(early), HELD

@pytest.mark.ranks(2)
def test_a_group_kept():
    KEPT.append(dist.new_group([0, 1]))

@pytest.mark.ranks(2)
def test_is_no_group_any_more():
    with pytest.raises(ValueError, match="[Gg]roup"):
        dist.get_group_rank(KEPT.pop(), 0)

@pytest.mark.ranks(2)
def test_a_module_imported():
    assert "mailbox" not in sys.modules
    import mailbox
    assert any(each is mailbox.Mailbox for each in gc.get_objects())

@pytest.mark.ranks(2)
def test_is_walked_by_no_collection():
    import mailbox
    assert not any(each is mailbox.Mailbox for each in gc.get_objects())

@pytest.mark.ranks(2)
def test_few_descriptors_kept():
    KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(8))
    sign()

@pytest.mark.ranks(2)
def test_cost_nothing():
    assert PIDS == [os.getpid()]
    for descriptor in KEPT:
        os.close(descriptor)

@pytest.mark.ranks(2)
def test_another_directory(tmp_path):
    os.chdir(tmp_path)
    sign()

@pytest.mark.ranks(2)
def test_is_left_again():
    assert os.getcwd() == HOME
    assert PIDS == [os.getpid()]

@pytest.mark.ranks(2)
def test_many_descriptors_kept():
    KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(40))
    sign()

@pytest.mark.ranks(2)
def test_cost_the_place():
    assert PIDS == []
    sign()

@pytest.mark.ranks(2)
def test_a_thread_kept():
    assert PIDS == [os.getpid()]
    threading.Thread(target=threading.Event().wait, daemon=True).start()

@pytest.mark.ranks(2)
def test_costs_the_place_too():
    assert PIDS == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Thread-")]
    sign()

@pytest.mark.ranks(2)
def test_native_threads_kept():
    assert PIDS == [os.getpid()]
    libc, ident = ctypes.CDLL(None), ctypes.c_ulong()
    sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
    for _ in range(40):
        assert libc.pthread_create(ctypes.byref(ident), None, sleep, ctypes.c_void_p(1000)) == 0

@pytest.mark.ranks(2)
def test_cost_it_as_well():
    assert PIDS == []
    sign()

@pytest.mark.ranks(2)
def test_a_child_kept(ranks):
    assert PIDS == [os.getpid()]
    KEPT.append(subprocess.Popen(["sleep", "500"]))
    (HERE / f"child-{ranks.rank}").write_text(str(KEPT[0].pid))

@pytest.mark.ranks(2)
def test_ends_with_the_worker(ranks):
    assert PIDS == []
    state = pathlib.Path("/proc", (HERE / f"child-{ranks.rank}").read_text(), "stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    sign()

@pytest.mark.ranks(3)
def test_a_third_worker_joins_those_that_are_there(ranks):
    assert PIDS == ([os.getpid()] if ranks.rank < 2 else [])
    sign()

@pytest.mark.ranks(2)
def test_and_fewer_need_no_new_one():
    assert PIDS == [os.getpid()]
"""

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc")]


@pytest.fixture(scope="module")
def lived(session):
    return session(LIVES)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("test_a_group_kept", "test_is_no_group_any_more"),
        ("test_a_module_imported", "test_is_walked_by_no_collection"),
        ("test_few_descriptors_kept", "test_cost_nothing"),
        ("test_another_directory", "test_is_left_again"),
        ("test_many_descriptors_kept", "test_cost_the_place"),
        ("test_a_thread_kept", "test_costs_the_place_too"),
        ("test_native_threads_kept", "test_cost_it_as_well"),
        ("test_a_child_kept", "test_ends_with_the_worker"),
        ("test_a_third_worker_joins_those_that_are_there", "test_and_fewer_need_no_new_one"),
    ],
)
def test_the_next_test_finds_what_the_last_may_leave(lived, before, after):
    assert lived.outcomes[before] == "passed", lived.texts[before]
    assert lived.outcomes[after] == "passed", lived.texts[after]


def test_workers_stay_and_hold_no_more_after_tests_that_leave_groups_behind(lived):
    tests = [f"test_groups_left_behind[{i}]" for i in range(12)]
    assert [lived.outcomes[name] for name in tests] == ["passed"] * 12, lived.printed


def test_the_session_passes(lived):
    assert lived.status == pytest.ExitCode.OK, lived.printed
