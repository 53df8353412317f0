"""No process outlives pytest, however pytest ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from .waiting import until

HANGS = """
import os, pathlib, signal, subprocess, time
import pytest

here = pathlib.Path(__file__).parent

@pytest.mark.ranks(4, deadline=500)
def test_hangs(ranks):
    pids = [os.getpid(), os.getppid(), subprocess.Popen(["sleep", "500"]).pid]
    (here / f"{ranks.rank}.tmp").write_text(f"{ranks.shared_path.parent.parent} " + " ".join(map(str, pids)))
    (here / f"{ranks.rank}.tmp").rename(here / f"{ranks.rank}.pids")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if ranks.rank == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(500)
"""

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc"),
]


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@attrs.frozen
class Hanging:
    """A pytest session, leader of a process group, in the midst of a test on four ranks that never ends."""

    running: subprocess.Popen
    printed: Path
    directory: Path
    pids: set[int]
    template: int

    def is_gone(self):
        """Whether nothing is left of the pool: no process, none that a rank started, and no directory."""
        assert until(lambda: not any(map(alive, self.pids)), 20), [pid for pid in self.pids if alive(pid)]
        return until(lambda: not self.directory.exists(), 20)


@pytest.fixture
def hanging(tmp_path):
    (tmp_path / "test_inner.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    printed = tmp_path / "printed"
    # A process that a shell has started in the background ignores SIGINT, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with printed.open("w") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_inner.py"],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    signal.signal(signal.SIGINT, before)
    try:
        files = [tmp_path / f"{rank}.pids" for rank in range(4)]
        until(lambda: all(file.exists() for file in files) or running.poll() is not None, 120)
        assert all(file.exists() for file in files), printed.read_text()
        notes = [file.read_text().split() for file in files]
        pids = {int(pid) for note in notes for pid in note[1:]}
        assert len(pids) == 9  # four ranks, what each of them started, and the template
        assert all(map(alive, pids))
        directory = Path(notes[0][0])
        assert directory.is_dir()
        yield Hanging(running, printed, directory, pids, template=int(notes[0][2]))
    finally:
        running.kill()
        running.wait()


def test_no_process_outlives_a_pytest_that_is_interrupted(hanging):
    os.killpg(hanging.running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
    hanging.running.wait(30)
    assert hanging.is_gone()
    assert "KeyboardInterrupt" in hanging.printed.read_text()


def test_no_process_outlives_a_pytest_that_is_killed(hanging):
    hanging.running.kill()
    hanging.running.wait(30)
    assert hanging.is_gone()


def test_no_process_outlives_a_template_that_is_killed(hanging):
    os.kill(hanging.template, signal.SIGKILL)
    assert hanging.is_gone()
    assert hanging.running.wait(30) == pytest.ExitCode.TESTS_FAILED
    assert "the template process, which forks the ranks, is gone" in hanging.printed.read_text()


STARTS = """
import sys, time
from pipegrid.testing.pool import Pool
from pipegrid.testing.messages import Hello

pool = Pool(Hello(options={}, args=(), directory="", path=tuple(sys.path)), passthrough=False)
pool.start()
print(pool._template.process.pid, flush=True)
time.sleep(500)
"""


# From before the template's first line, over its imports, to when it waits for requests.
@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.1, 0.3, 3.0])
def test_a_kill_at_any_moment_of_the_templates_start_leaves_no_process_and_no_directory(tmp_path, seconds):
    starting = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        template = int(starting.stdout.readline())
        if seconds > 1:
            assert until(lambda: list(tmp_path.iterdir()), 120)
        time.sleep(seconds)
    finally:
        starting.kill()
        starting.wait()
        starting.stdout.close()
    assert until(lambda: not alive(template), 60)
    assert list(tmp_path.iterdir()) == []


def test_this_process_has_no_children_but_the_pool():
    """What the tests above started is gone; at most this session's own template is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("the kernel does not list children")
    assert len(children.read_text().split()) <= 1
