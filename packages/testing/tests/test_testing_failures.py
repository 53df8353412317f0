"""What a person reads when a test on ranks fails: one session with a test for each way to fail."""

import signal

import pytest

pytestmark = pytest.mark.thorough

FAILING = """
import ctypes, logging, os, signal, sys, threading, time, warnings
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(3)
def test_assertion(ranks):
    ranks.report_position("F 0 1")
    ranks.barrier()
    print("printed by", ranks.rank)
    logging.getLogger().warning("logged by %d", ranks.rank)
    mine = {"rank": ranks.rank}
    assert ranks.rank != 1 or mine == {"rank": 7}
    dist.barrier()

@pytest.mark.ranks(2)
def test_after_a_failure_the_ranks_are_whole(ranks):
    dist.barrier()

@pytest.mark.ranks(2)
def test_exit_status(ranks):
    ranks.barrier()
    if ranks.rank == 1:
        os._exit(17)
    time.sleep(60)

@pytest.mark.ranks(2)
def test_segfault(ranks):
    if ranks.rank == 1:
        ctypes.string_at(0)

@pytest.mark.ranks(2, deadline=4)
def test_deadline(ranks):
    ranks.reach(f"RECV 0 from {1 - ranks.rank}")
    threading.Thread(target=threading.Event().wait, name="helper", daemon=True).start()
    dist.recv(torch.ones(1), 1 - ranks.rank)

@pytest.mark.ranks(2, deadline=4)
def test_deadline_in_c_with_the_gil(ranks):
    if ranks.rank == 1:
        while True:
            ctypes.PyDLL(None).sleep(60)

@pytest.mark.ranks(2, deadline=4)
def test_deadline_while_suspended(ranks):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

@pytest.mark.ranks(1, backend="nccl")
def test_nccl_without_a_gpu():
    pass

@pytest.mark.ranks(1)
def test_sys_exit():
    sys.exit(5)

@pytest.mark.ranks(1)
def test_pytest_exit():
    pytest.exit("enough")

@pytest.mark.ranks(1)
def test_interrupted():
    raise KeyboardInterrupt

class Unspeakable(Exception):
    def __str__(self):
        raise LookupError("no words")

@pytest.mark.ranks(2)
def test_unspeakable(ranks):
    if ranks.rank == 1:
        raise Unspeakable

@pytest.fixture
def broken(ranks):
    if ranks.rank == 1:
        raise LookupError("no such thing")

@pytest.mark.ranks(2)
def test_setup(broken):
    pass

@pytest.fixture
def untidy():
    yield
    raise LookupError("cannot be put away")

@pytest.mark.ranks(2)
def test_teardown(untidy):
    pass

@pytest.mark.ranks(1)
def test_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

@pytest.mark.ranks(1)
def test_warning():
    warnings.warn("an error here too")

@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("default:only shown")
def test_warning_let_pass():
    warnings.warn("only shown")

@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("not today")

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="not here")
def test_skipif():
    os._exit(1)

@pytest.mark.ranks(2)
def test_skip_on_one_rank(ranks):
    if ranks.rank == 1:
        pytest.skip("only me")

@pytest.mark.ranks(2)
def test_xfail(ranks):
    if ranks.rank == 1:
        pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="marked", strict=True)
def test_xfail_mark(ranks):
    assert ranks.rank == 0

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="marked", strict=True)
def test_xpass(ranks):
    pass

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="hangs", strict=True)
def test_xfail_by_death(ranks):
    os._exit(1)

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="never")
def test_fault_never_reached(ranks):
    ranks.reach("somewhere")

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, after=50)
def test_fault_comes_too_late(ranks):
    pass

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="never")
def test_skip_before_a_fault():
    pytest.skip("nothing to break")

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="never")
def test_xfail_before_a_fault():
    pytest.xfail("nothing to break yet")

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, after=50)
def test_skip_before_a_fault_by_time():
    pytest.skip("too early to break")

@pytest.mark.ranks(2)
@pytest.mark.fault("raise", rank=1, at="here")
def test_fault_leads_to_another_failure(ranks):
    try:
        ranks.reach("here")
    except RuntimeError:
        pass
    assert ranks.rank == 0

@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="here")
def test_survivor_fails(ranks):
    ranks.reach("here")
    dist.recv(torch.ones(1), 1)

@pytest.mark.ranks(2)
def test_template_killed(ranks):
    ranks.barrier()
    if ranks.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

@pytest.mark.ranks(2)
def test_after_the_template_the_ranks_are_whole(ranks):
    dist.barrier()

class Odd:
    def __init__(self):
        self.id = os.getpid()
    def __repr__(self):
        return f"odd{self.id}"

@pytest.mark.ranks(1)
@pytest.mark.parametrize("odd", [Odd()], ids=repr)
def test_other_parameters_on_ranks(odd):
    pass

def test_not_on_ranks(ranks):
    pass
"""


@pytest.fixture(scope="module")
def failed(session):
    return session(FAILING)


def text_of(failed, name):
    assert failed.outcomes[name] == "failure", failed.texts[name]
    return failed.texts[name]


def test_an_assertion_is_explained_with_its_rank_and_the_others_state(failed):
    text = text_of(failed, "test_assertion")
    assert text.startswith("3 ranks: rank 1 failed: AssertionError: assert (1 != 1 or {'rank': 1} == {'rank': 7}")
    assert "rank 1: failed, at position 'F 0 1'" in text
    assert "{'rank': 1} != {'rank': 7}" in text
    for rank in (0, 2):
        assert f"rank {rank}: still running 2 s after the first failure, at position 'F 0 1'" in text
    assert text.count("dist.barrier()") >= 2
    assert "_pytest" not in text


def test_what_ranks_print_is_shown_by_rank(failed):
    shown = failed.printed[failed.printed.index("_ test_assertion _") :]
    for rank in range(3):
        after = shown[shown.index(f"Captured output of rank {rank} call") :]
        assert after.splitlines()[1] == f"printed by {rank}"


def test_what_a_rank_that_failed_has_logged_is_shown(failed):
    shown = failed.printed[failed.printed.index("_ test_assertion _") :]
    after = shown[shown.index("Captured log call of rank 1 call") :]
    assert after.splitlines()[1].endswith("logged by 1")


def test_after_a_failure_other_workers_take_over(failed):
    assert failed.outcomes["test_after_a_failure_the_ranks_are_whole"] == "passed"


def test_a_rank_that_exits_is_reported_with_its_status_without_waiting_for_the_deadline(failed):
    text = text_of(failed, "test_exit_status")
    assert "2 ranks: rank 1 died: exit status 17" in text
    assert "rank 0: still running 2 s after the first failure" in text
    assert "time.sleep(60)" in text


def test_a_crash_is_reported_with_its_signal_and_stack(failed):
    assert "rank 1 died: by signal SIGSEGV" in text_of(failed, "test_segfault")
    assert "Fatal Python error: Segmentation fault" in failed.printed
    assert "rank 0: passed" in text_of(failed, "test_segfault")


def test_past_the_deadline_every_rank_shows_position_and_stacks(failed):
    text = text_of(failed, "test_deadline")
    assert "2 ranks: the deadline of 4 s passed; unfinished: rank 0, 1" in text
    for rank in (0, 1):
        assert f"rank {rank}: still running at the deadline, at position 'RECV 0 from {1 - rank}'" in text
    assert text.count("\n    dist.recv(torch.ones(1), 1 - ranks.rank)") == 2
    assert text.count("thread helper:") == 2


def test_a_rank_that_keeps_the_interpreter_busy_in_c_shows_its_stack_too(failed):
    text = text_of(failed, "test_deadline_in_c_with_the_gil")
    assert "the deadline of 4 s passed; unfinished: rank 1" in text
    assert "in test_deadline_in_c_with_the_gil" in text


def test_a_suspended_rank_is_called_so(failed):
    assert "rank 1: suspended by a signal" in text_of(failed, "test_deadline_while_suspended")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("test_nccl_without_a_gpu", "UsageError: backend 'nccl' needs a GPU and torch sees none; use --backend gloo"),
        ("test_sys_exit", "SystemExit: 5"),
        ("test_pytest_exit", "Exit: enough"),
        ("test_interrupted", "KeyboardInterrupt"),
        ("test_setup", "LookupError: no such thing"),
        ("test_teardown", "LookupError: cannot be put away"),
        ("test_thread", "ZeroDivisionError"),
        ("test_warning", "UserWarning: an error here too"),
        ("test_skip_on_one_rank", "rank 1 skipped the test ('only me') and others did not"),
        ("test_xpass", "[XPASS(strict)] marked"),
        ("test_fault_never_reached", "planned, but the test ended without reaching it: kill on rank 1 at 'never'"),
        ("test_fault_comes_too_late", "planned fault 'kill' after 50 s never happened"),
        ("test_fault_leads_to_another_failure", "(planned fault: raise on rank 1 at 'here')"),
        ("test_survivor_fails", "rank 1: died, by signal SIGKILL (planned fault: kill on rank 1 at 'here')"),
        ("test_template_killed", "the template process, which forks the ranks, is gone"),
        ("test_other_parameters_on_ranks", "whose ids must be the same in every process"),
    ],
)
def test_each_way_to_fail_says_what_happened(failed, name, part):
    name = next(found for found in failed.outcomes if found.split("[")[0] == name)
    assert part in text_of(failed, name)


def test_an_exception_without_words_keeps_its_traceback(failed):
    text = text_of(failed, "test_unspeakable")
    assert text.startswith("2 ranks: rank 1 failed: Unspeakable: <its __str__ raised LookupError>")
    assert ">           raise Unspeakable" in text


@pytest.mark.parametrize(
    ("name", "line"), [("test_interrupted", "raise KeyboardInterrupt"), ("test_pytest_exit", "pytest.exit(")]
)
def test_an_interrupt_shows_the_tests_own_lines_only(failed, name, line):
    text = text_of(failed, name)
    assert line in text
    assert "_pytest/runner" not in text
    assert "pluggy" not in text


def test_teardown_and_setup_name_the_phase(failed):
    assert "in setup:" in text_of(failed, "test_setup")
    assert "in teardown:" in text_of(failed, "test_teardown")


def test_a_plain_test_that_asks_for_ranks_is_told_to_mark_itself(failed):
    assert failed.outcomes["test_not_on_ranks"] == "error"
    assert "mark the test with @pytest.mark.ranks(n)" in failed.texts["test_not_on_ranks"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skip", "not today"),
        ("test_skipif", "not here"),
        ("test_xfail", "known"),
        ("test_xfail_mark", "marked"),
        ("test_xfail_by_death", "hangs"),
        ("test_skip_before_a_fault", "nothing to break"),
        ("test_xfail_before_a_fault", "nothing to break yet"),
        ("test_skip_before_a_fault_by_time", "too early to break"),
    ],
)
def test_skips_and_expected_failures_keep_their_reasons(failed, name, reason):
    assert failed.outcomes[name] == "skipped"
    assert reason in failed.texts[name]


def test_a_warning_that_passes_the_filters_is_shown_once_in_the_summary(failed):
    assert failed.outcomes["test_warning_let_pass"] == "passed"
    assert failed.printed.count("UserWarning: only shown") == 1


def test_after_the_templates_death_a_new_one_takes_over(failed):
    assert failed.outcomes["test_after_the_template_the_ranks_are_whole"] == "passed"


def test_the_session_ends_as_a_failed_one(failed):
    assert failed.status == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in failed.printed
    assert signal.Signals.SIGSEGV.name in failed.printed
