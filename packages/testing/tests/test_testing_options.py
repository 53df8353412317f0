"""Options, ini settings and marks; and pytest's own options on tests that run on ranks."""

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

pytest_plugins = ["pytester"]

SETTINGS = """
import os, pathlib, time
import pytest

def shown(ranks):
    return f"{ranks.backend} {ranks.deadline} {ranks.strict_sends}"

@pytest.mark.ranks(2)
def test_unmarked(ranks, size):
    assert shown(ranks) == "gloo 4.5 True"
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
    result = pytester.runpytest("--deadline", "4.5", "--backend", "gloo", "--size", "5")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*1 ranks: the deadline of 4.5 s passed*"])
    directory, *pids = (pytester.path / "note").read_text().split()
    assert not Path(directory).exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_strict_sends_of_the_command_line_and_a_backend_of_the_ini_file(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makeini("[pytest]\nranks_backend = nccl\n")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.ranks(1, backend="gloo")
        def test_marked(ranks):
            assert ranks.strict_sends

        @pytest.mark.ranks(1)
        def test_unmarked(ranks):
            assert ranks.backend == "gloo"
            assert not ranks.strict_sends
    """)
    strict = pytester.runpytest("--strict-sends")
    strict.assert_outcomes(passed=1, failed=1)
    strict.stdout.fnmatch_lines(["*backend 'nccl' needs a GPU and torch sees none; use --backend gloo"])
    pytester.runpytest("--backend", "gloo", "-k", "unmarked").assert_outcomes(passed=1, deselected=1)


def test_nothing_is_taken_from_a_launchers_environment(pytester, monkeypatch):
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile("""
        import pytest, torch, torch.distributed as dist

        @pytest.mark.ranks(2)
        def test_it(ranks):
            x = torch.tensor([dist.get_rank()])
            dist.all_reduce(x)
            assert (ranks.world_size, x.item()) == (2, 1)
    """)
    pytester.runpytest().assert_outcomes(passed=1)


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


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.nightly)])
def test_x_stops_after_a_failure_k_chooses_tests_and_s_lets_ranks_print(pytester, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pytester.makepyfile(SEVERAL)
    result = pytester.runpytest_subprocess("-x", "-s", "-k", "value")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines_random([f"*value {value} rank {rank}" for value in (1, 2) for rank in (0, 1)])
    assert result.stdout.str().count("a fixture") == 4


@pytest.mark.parametrize("unbuffered", [pytest.param("", marks=pytest.mark.nightly), "1"])
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


SESSION_PLUGINS = """
import logging
import pytest

@pytest.fixture
def shown():
    return "shown"

class Odd:
    def __str__(self):
        return "an odd value"

@pytest.mark.ranks(2)
def test_properties(ranks, shown, record_property):
    record_property("number", 7)
    record_property("odd", Odd())
    record_property(f"of rank {ranks.rank}", "")

@pytest.mark.ranks(2)
def test_cache(ranks, cache):
    if ranks.rank == 1:
        assert cache.get("pipegrid/before", None) == [1, 2]
        cache.set("pipegrid/after", [3])

@pytest.mark.ranks(2)
def test_logs(ranks, record_xml_attribute, record_testsuite_property):
    logging.getLogger().warning("said on rank %d", ranks.rank)

def test_plain(cache):
    assert cache.get("pipegrid/after", None) == [3]
    logging.getLogger().warning("said by pytest")
"""


def test_plugins_that_write_for_the_session_give_ranks_their_fixtures_and_write_once(pytester):
    pytester.makepyfile(SESSION_PLUGINS)
    value = pytester.path / ".pytest_cache" / "v" / "pipegrid" / "before"
    value.parent.mkdir(parents=True)
    value.write_text("[1, 2]")
    options = [
        "--junitxml=out.xml",
        "--log-file=out.log",
        "--setup-show",
        "-W",
        "ignore::pytest.PytestExperimentalApiWarning",
    ]
    result = pytester.runpytest(*options)
    result.assert_outcomes(passed=4)
    case = next(
        case for case in ET.parse(pytester.path / "out.xml").iter("testcase") if case.get("name") == "test_properties"
    )
    written = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert written == {"number": "7", "odd": "an odd value", "of rank 0": ""}
    assert "said by pytest" in (pytester.path / "out.log").read_text()
    # What the session remembers of its tests is the pytest process's: all four of them, none failed.
    nodeids = json.loads((value.parent.parent / "cache" / "nodeids").read_text())
    assert len(nodeids) == 4
    assert not (value.parent.parent / "cache" / "lastfailed").exists()


CONFTEST_OF_A_DIRECTORY = """
import pytest

collect_ignore = ["test_broken.py"]

@pytest.fixture
def here():
    return "of the directory"
"""

TEST_IN_A_DIRECTORY = """
import pytest

@pytest.mark.ranks(2)
def test_it(here):
    assert here == "of the directory"
"""


@pytest.mark.parametrize(
    ("name", "started_in"), [pytest.param("sub", ".", marks=pytest.mark.nightly), ("a[b]", "."), ("a[b]", "a[b]")]
)
def test_several_files_of_a_directory_share_its_conftest_on_ranks(pytester, monkeypatch, name, started_in):
    inner = pytester.mkdir(name)
    (inner / "conftest.py").write_text(CONFTEST_OF_A_DIRECTORY)
    (inner / "test_one.py").write_text(TEST_IN_A_DIRECTORY)
    (inner / "test_two.py").write_text(TEST_IN_A_DIRECTORY)
    (inner / "test_three[1].py").write_text(TEST_IN_A_DIRECTORY)
    (inner / "test_broken.py").write_text("raise RuntimeError('left alone')\n")
    monkeypatch.chdir(pytester.path / started_in)
    result = pytester.runpytest(".", "--import-mode=importlib")
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    "arguments", [pytest.param(("a/tests", "b/tests"), marks=pytest.mark.nightly), ("b/tests", "a/tests", "c"), (".",)]
)
def test_each_of_several_folders_has_the_fixtures_of_its_own_conftest_on_ranks(pytester, arguments):
    for name in ("a/tests", "b/tests", "c"):
        folder = pytester.path / name
        folder.mkdir(parents=True)
        (folder / "conftest.py").write_text(
            f"import pytest\n@pytest.fixture\ndef of_{name[0]}(ranks):\n    return '{name} ' + str(ranks.rank)\n"
        )
        (folder / f"test_{name[0]}.py").write_text(
            "import pytest\n\n@pytest.mark.ranks(2)\ndef test_it(ranks, request):\n"
            f"    assert request.getfixturevalue('of_{name[0]}') == '{name} ' + str(ranks.rank)\n"
            "    with pytest.raises(pytest.FixtureLookupError):\n"
            f"        request.getfixturevalue('of_{'b' if name[0] != 'b' else 'a'}')\n"
        )
    result = pytester.runpytest(*arguments, "--import-mode=importlib")
    result.assert_outcomes(passed=3 if len(arguments) != 2 else 2)


def test_ranks_find_a_file_in_a_folder_that_pytest_does_not_enter_by_itself(pytester):
    pytester.makeconftest("")
    inner = pytester.mkdir("build")  # of norecursedirs; pytest before 8.1 imports nothing from a name with a dot
    (inner / "test_one.py").write_text(
        "import pytest\n\n@pytest.mark.ranks(1)\ndef test_it(ranks):\n    ranks.barrier()\n"
    )
    pytester.runpytest("build/test_one.py", "--import-mode=importlib").assert_outcomes(passed=1)


def test_under_s_a_rank_that_keeps_the_interpreter_busy_in_c_shows_its_stack_in_the_report(pytester):
    pytester.makepyfile("""
        import ctypes
        import pytest

        @pytest.mark.ranks(1, deadline=4)
        def test_hangs():
            while True:
                ctypes.PyDLL(None).sleep(60)
    """)
    printed = pytester.runpytest_subprocess("-s").stdout.str()
    report = printed[printed.index("1 ranks: the deadline of 4 s passed") :]
    assert "in test_hangs" in report
    assert "no answer" not in report


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
        (
            "@pytest.mark.ranks(2, backend='mpi')",
            "*backend 'mpi' is unknown; use one of gloo, nccl, fake*",
        ),
        ("@pytest.mark.ranks(2, fake_nccl='in_turn')", "*fake_nccl 'in_turn' is unknown; use one of streams, serial*"),
        ("@pytest.mark.ranks(2, deadline=0)", "*a deadline is a number of seconds above 0 and up to 604800 *, got 0"),
        ("@pytest.mark.ranks(2, deadline=float('inf'))", "*a deadline is a number of seconds *, got inf"),
        ("@pytest.mark.ranks(2, deadline=float('nan'))", "*a deadline is a number of seconds *, got nan"),
        ("@pytest.mark.ranks(2, deadline=1e10)", "*a deadline is a number of seconds *, got 10000000000.0"),
        ("@pytest.mark.ranks(2, deadline='soon')", "*@pytest.mark.ranks: could not convert string to float: 'soon'"),
        (
            "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.ranks(2, 4))])",
            "*several numbers of ranks, got (2, 4), belong on a function, a class or a module",
        ),
        ("@pytest.mark.ranks(2, deadlines=3)", "*unexpected keyword argument 'deadlines'*"),
        (
            "@pytest.mark.ranks(2)\n@pytest.mark.fault('kill', rank=2, at='x')",
            "*names rank 2, but the world has 2 ranks*",
        ),
        (
            "@pytest.mark.ranks(2)\n@pytest.mark.fault('burn', rank=0, at='x')",
            "*mark.fault: Fault(kind='burn', *",
        ),
        ("@pytest.mark.ranks(2)\n@pytest.mark.fault('kill')", "*@pytest.mark.fault: *argument*'rank'*"),
        (
            "@pytest.mark.ranks(2)\n@pytest.mark.fault('kill', rank=-1, at='x')",
            "*rank=-1, *rank and nth count from 0",
        ),
        ("@pytest.mark.fault('kill', rank=0, at='x')", "*test_it: @pytest.mark.fault needs @pytest.mark.ranks(n) *"),
    ],
)
def test_marks_that_ask_for_the_impossible_end_the_session_before_any_test(pytester, marks, text):
    pytester.makepyfile(f"import pytest\n{marks}\ndef test_it({'x' if 'parametrize' in marks else ''}):\n    pass\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([text])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


def test_a_mark_added_after_collection_takes_one_number_of_ranks(pytester):
    pytester.makeconftest("""
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.ranks(2, 4))
    """)
    pytester.makepyfile("def test_it():\n    pass\n")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: @pytest.mark.ranks: several numbers of ranks, got (2, 4), *"])


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e10"])
def test_a_deadline_of_the_command_line_or_the_ini_file_is_checked_alike(pytester, seconds):
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_it():\n    pass\n")
    for options in (["--deadline", seconds], ["-o", f"ranks_deadline={seconds}"]):
        result = pytester.runpytest(*options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*a deadline is a number of seconds above 0 *, got *"])


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


def test_modules_of_the_ini_file_are_imported_before_ranks_are_forked_where_pytest_has_them(pytester):
    pytester.makeini("[pytest]\nranks_preload = decimal_like never_imported\npythonpath = .\n")
    pytester.makepyfile(
        decimal_like="import os\npid = os.getpid()\n",
        never_imported="raise RuntimeError",
        test_ranks="""
        import os

        import pytest
        import decimal_like

        @pytest.mark.ranks(1)
        def test_forked_with_it(ranks):
            assert decimal_like.pid == os.getppid()
        """,
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
