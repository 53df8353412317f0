"""Options, ini settings and marks; and pytest's own options on tests that run on ranks."""

import os
import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SETTINGS = """
import os, pathlib, time
import pytest

def shown(ranks):
    return f"{ranks.backend} {ranks.deadline} {ranks.strict_sends}"

@pytest.mark.ranks(2)
def test_unmarked(ranks, size):
    assert shown(ranks) == "gloo 1.5 True"
    assert size == 5

@pytest.mark.ranks(1, backend="gloo", deadline=44, strict_sends=False)
def test_marked(ranks):
    assert shown(ranks) == "gloo 44.0 False"
    note = f"{ranks.shared_path.parent.parent} {os.getpid()} {os.getppid()}"
    pathlib.Path(__file__).with_name("note").write_text(note)

@pytest.mark.ranks(1)
def test_sleeps():
    time.sleep(100)
"""

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=1)

@pytest.fixture
def size(request):
    return request.config.getoption("--size")
"""


def test_settings_conftests_and_options_reach_the_ranks_and_nothing_stays_behind(pytester):
    pytester.makeini("[pytest]\nranks_deadline = 22\nranks_strict_sends = true\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SETTINGS)
    result = pytester.runpytest("--deadline", "1.5", "--backend", "gloo", "--size", "5")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*1 ranks: the deadline of 1.5 s passed*"])
    directory, *pids = (pytester.path / "note").read_text().split()
    assert not Path(directory).exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


SEVERAL = """
import pytest

@pytest.fixture(autouse=True)
def each_time():
    print("a fixture")

@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [1, 2, 3])
def test_value(ranks, value):
    print("value", value, "rank", ranks.rank)
    assert value != 2

@pytest.mark.ranks(2)
def test_other():
    pass
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_x_stops_after_a_failure_k_chooses_tests_and_s_lets_ranks_print(pytester, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pytester.makepyfile(SEVERAL)
    result = pytester.runpytest_subprocess("-x", "-s", "-k", "value")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines_random([f"*value {value} rank {rank}" for value in (1, 2) for rank in (0, 1)])
    assert result.stdout.str().count("a fixture") == 4


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_under_s_the_lines_of_several_ranks_stay_whole(pytester, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.ranks(4)
        def test_prints(ranks):
            ranks.barrier()
            for number in range(2000):
                print("rank", ranks.rank, "says", number, "of", 2000)
    """)
    printed = pytester.runpytest_subprocess("-s").stdout.str()
    whole = re.findall(r"rank (\d) says (\d+) of 2000\n", printed)
    assert sorted((int(rank), int(number)) for rank, number in whole) == [(r, n) for r in range(4) for n in range(2000)]


def test_collecting_starts_no_process(pytester, monkeypatch):
    monkeypatch.setattr("pipegrid.testing.pool.subprocess.Popen", None)
    pytester.makepyfile(SEVERAL)
    result = pytester.runpytest("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_value?1?", "*test_value?2?", "*test_value?3?", "*test_other"])
    assert result.ret == 0


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (
            "@pytest.mark.ranks()",
            "*test_it: @pytest.mark.ranks: a number of ranks is an integer of at least 1, got None*",
        ),
        ("@pytest.mark.ranks(0)", "*@pytest.mark.ranks: a number of ranks is an integer of at least 1, got 0*"),
        ("@pytest.mark.ranks(2, 'x')", "*@pytest.mark.ranks: a number of ranks is an integer of at least 1, got 'x'*"),
        ("@pytest.mark.ranks(2, backend='mpi')", "*backend 'mpi' is unknown; use gloo or nccl*"),
        ("@pytest.mark.ranks(2, deadline=0)", "*a deadline is a number of seconds above 0, got 0*"),
        ("@pytest.mark.ranks(2, deadlines=3)", "*unexpected keyword argument 'deadlines'*"),
        (
            "@pytest.mark.ranks(2)\n@pytest.mark.fault('kill', rank=2, at='x')",
            "*names rank 2, but the world has 2 ranks*",
        ),
        ("@pytest.mark.ranks(2)\n@pytest.mark.fault('burn', rank=0, at='x')", "*fault kind 'burn' is unknown*"),
        ("@pytest.mark.ranks(2)\n@pytest.mark.fault('kill')", "*@pytest.mark.fault: *argument*'rank'*"),
    ],
)
def test_marks_that_ask_for_the_impossible_end_the_session_before_any_test(pytester, marks, text):
    pytester.makepyfile(f"import pytest\n{marks}\ndef test_it():\n    pass\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([text])


def test_a_unittest_method_cannot_run_on_ranks(pytester):
    pytester.makepyfile(
        "import pytest, unittest\nclass TestIt(unittest.TestCase):\n"
        "    @pytest.mark.ranks(2)\n    def test_it(self):\n        pass\n"
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*plain test functions and methods, not on TestCaseFunction*"])


def test_a_conftest_that_breaks_on_ranks_only_is_reported(pytester):
    pytester.makeconftest("import sys\nif 'torch' in sys.modules:\n    raise RuntimeError('only on ranks')\n")
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_it():\n    pass\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*2 ranks: rank ? died first: exit status 1", "*only on ranks*"])
