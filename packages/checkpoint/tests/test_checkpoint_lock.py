"""Two runs of one directory at a time, and a run whose last save is under way, or is lost, when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch.distributed as dist
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState
from pipegrid.checkpoint.last_save import Pending
from pipegrid.checkpoint.stored import dcp, lock
from pipegrid.stages.errors import CheckpointError


def hold(directory, run, said):
    """Have a directory in use until the end of this process."""
    os.environ["TORCHELASTIC_RUN_ID"] = run
    with closing(Checkpoints(directory)):
        said.send("has it")
        time.sleep(600)


def started(context, directory, run=""):
    heard, said = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(directory, run, said), daemon=True)
    process.start()
    said.close()
    assert heard.recv() == "has it"
    return process


def test_a_second_run_in_a_directory_is_an_error_that_names_the_first(tmp_path, context):
    other = started(context, tmp_path, run="nightly-7")
    aside = tmp_path / ".saving-3-abcd"  # of a save that is under way
    aside.mkdir()
    try:
        with pytest.raises(CheckpointError, match=rf"by process {other.pid} on \S+, since 20\S+, run nightly-7"):
            Checkpoints(tmp_path)
        assert aside.is_dir()
    finally:
        other.kill()
    Checkpoints(tmp_path).close()  # at once: no lock is stale
    assert list(tmp_path.iterdir()) == []


def test_the_next_attempt_of_a_run_waits_for_the_last_one_to_end(tmp_path, context, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(lock, "_ENDING", 0.0)
    other = started(context, tmp_path, run="a")
    ender = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {other.pid}"])
    Checkpoints(tmp_path).close()
    other.join()
    assert (ender.wait(), other.exitcode) == (0, -signal.SIGKILL)


def test_a_process_may_open_its_directory_again_and_a_child_may_not(tmp_path):
    first = Checkpoints(tmp_path)
    second = Checkpoints(tmp_path)
    second.close()
    child = os.fork()
    if child == 0:
        try:
            Checkpoints(tmp_path)
        except CheckpointError as error:
            os._exit(7 if f"process {os.getppid()} on" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (tmp_path / ".lock").is_file()
    first.close()
    assert not (tmp_path / ".lock").exists()


def test_a_directory_that_is_opened_again_keeps_what_the_process_is_saving_in_it(tmp_path, monkeypatch):
    begun, opened, write = threading.Event(), threading.Event(), dcp.save

    def late(*arguments, **options):
        begun.set()
        assert opened.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(dcp, "save", late)
    state, checkpoints = TrainingState(stages={"head": {0: nn.Linear(2, 2)}}), Checkpoints(tmp_path)
    checkpoints.save(state, step=1, blocking=False)
    assert begun.wait(30)
    Checkpoints(tmp_path).close()
    opened.set()
    checkpoints.close()
    assert checkpoints.steps() == [1]


def test_a_lock_that_is_dropped_or_lost_its_file_does_not_last(tmp_path, context):
    Checkpoints(tmp_path)
    assert not (tmp_path / ".lock").exists()
    kept = Checkpoints(tmp_path)
    (tmp_path / ".lock").unlink()
    kept.close()
    started(context, tmp_path).kill()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": 1}', b"[" * 4096, json.dumps({"run": {}}).encode()])
def test_a_lock_file_that_is_left_behind_is_taken_whatever_it_says(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    Checkpoints(tmp_path).close()


def test_a_lock_file_that_leads_elsewhere_is_an_error(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    for number, make in enumerate((lambda path: path.symlink_to(outside), os.mkfifo, lambda path: path.mkdir())):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory / ".lock")
        with pytest.raises(CheckpointError, match="is not used: rank 0: "):
            Checkpoints(directory)
    assert outside.read_text() == "kept"


@pytest.mark.ranks(2)
def test_a_second_run_is_an_error_on_every_rank(ranks):
    """Rank 1 stands for another run: a lock is its process's, and rank 0 takes that of a run."""
    if dist.get_rank() == 1:
        other = lock.Lock(ranks.shared_path)
    ranks.barrier()
    with pytest.raises(CheckpointError, match="rank 0: .* is in use by process"):
        Checkpoints(ranks.shared_path)
    if dist.get_rank() == 1:
        other.release()


LAST = """
import atexit, errno, os, sys, time
from datetime import timedelta
from pathlib import Path
from torch import nn
from pipegrid.checkpoint import Checkpoints, TrainingState
from pipegrid.checkpoint import last_save, saving
folder, *kinds = sys.argv[1:]
children = []
for kind in kinds:
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    sys.exit()
# From here on a child is a script of its own, which ends as interpreters do.
directory = Path(folder, kind)
for number, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(f"{directory}.{name}", os.O_WRONLY | os.O_CREAT), number)
atexit.register(lambda: print("at exit, before"))
def fail(*_):
    if kind in {"slow", "kept"}:
        time.sleep(1.0 if kind == "slow" else 0.1)
        return real(*_)
    if kind == "stuck":
        time.sleep(60)
    raise OSError(errno.ENOSPC, "No space left on device")
real = saving.Saver._write_files
saving.Saver._write_files = fail
if kind != "kept":
    last_save._SILENT = 0.2
checkpoints = Checkpoints(directory, timeout=timedelta(seconds=1 if kind == "stuck" else 60))
checkpoints.save(TrainingState(stages={"head": {0: nn.Linear(2, 2)}}), step=5, blocking=False)
atexit.register(lambda: print("at exit, after"))
if kind == "seen":
    try:
        checkpoints.wait()
    except Exception as error:
        print(type(error).__name__)
if kind == "kept":
    del checkpoints
if kind in {"raise", "kept"}:
    raise SystemExit(3)
if kind == "error":
    raise ValueError("of the script")
print("end of the script")
"""
ENDS = [
    ("raise", 120, "is lost: OSError: .*No space left on device; exit code 120"),
    ("error", 120, "ValueError: of the script.*is lost: OSError: .*No space left"),
    ("stuck", 120, r"waiting up to 1 s .*is lost: CheckpointError: it has not ended; call Checkpoints\.close\(\)"),
    ("slow", 0, r"^waiting up to 60 s for the last save in \S+\n$"),
    ("seen", 0, "^$"),
    ("kept", 3, "^$"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of the scripts of all kinds, and the exit code of each; one interpreter imports torch for all."""
    folder = tmp_path_factory.mktemp("ended")
    kinds = [kind for kind, _, _ in ENDS]
    done = subprocess.run(
        [sys.executable, "-c", LAST, folder, *kinds], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    return folder, dict(zip(kinds, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize(("kind", "code", "said"), ENDS)
def test_a_last_save_is_kept_or_its_loss_is_an_exit_code_and_a_text(ended, kind, code, said):
    folder, codes = ended
    errors = (folder / f"{kind}.stderr").read_text()
    assert codes[kind] == code, errors
    assert re.search(said, errors, re.DOTALL), errors
    lines = (folder / f"{kind}.stdout").read_text().splitlines()
    assert lines[-2:] == ["at exit, after", "at exit, before"]
    assert ("end of the script" in lines) is (kind not in {"raise", "error", "kept"})
    if kind in {"slow", "kept"}:
        assert Checkpoints(folder / kind).steps() == [5]


def test_an_interrupted_wait_has_not_seen_the_outcome():
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    pending = Pending()
    pending.future = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    assert pending.future is not None
