"""Two runs of one directory at a time, and a run whose last save is under way, or is lost, when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch.distributed as dist

from pipegrid.training import CheckpointError, Checkpoints
from pipegrid.training.checkpoint.last_save import Pending
from pipegrid.training.checkpoint.stored import lock

RUN = """
import sys, time
from pipegrid.training import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
print("has it", flush=True)
time.sleep(600)
"""


def started(directory, **environment):
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, directory], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    assert process.stdout.readline() == "has it\n"
    return process


def stopped(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_in_a_directory_is_an_error_that_names_the_first(tmp_path):
    other = started(tmp_path, TORCHELASTIC_RUN_ID="nightly-7")
    aside = tmp_path / ".saving-3-abcd"  # of a save that is under way
    aside.mkdir()
    try:
        with pytest.raises(CheckpointError, match=rf"by process {other.pid} on \S+, since 20\S+, run nightly-7"):
            Checkpoints(tmp_path)
        assert aside.is_dir()
    finally:
        other.send_signal(signal.SIGKILL)
    Checkpoints(tmp_path).close()  # at once: no lock is stale
    other.wait()
    other.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_attempt_of_a_run_waits_for_the_last_one_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setattr(lock, "_ENDING", 0.0)
    other = started(tmp_path)
    ender = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {other.pid}"])
    Checkpoints(tmp_path).close()
    assert (ender.wait(), other.wait()) == (0, -signal.SIGKILL)
    other.stdout.close()


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


def test_a_lock_that_is_dropped_or_lost_its_file_does_not_last(tmp_path):
    Checkpoints(tmp_path)
    assert not (tmp_path / ".lock").exists()
    kept = Checkpoints(tmp_path)
    (tmp_path / ".lock").unlink()
    kept.close()
    stopped(started(tmp_path))


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
    directory = ranks.shared_path / "a"
    if dist.get_rank() == 0:
        directory.mkdir()
        other = started(directory)
    ranks.barrier()
    with pytest.raises(CheckpointError, match="rank 0: .* is in use by process"):
        Checkpoints(directory)
    if dist.get_rank() == 0:
        stopped(other)


LAST = """
import atexit, errno, os, sys, threading
from pathlib import Path
from torch import nn
from pipegrid.training import Checkpoints, TrainingState
from pipegrid.training.checkpoint import saving
import time
atexit.register(lambda: print("at exit, before"))
kind, directory = sys.argv[1:]
def fail(*_):
    if kind == "slow":
        time.sleep(1.0)
        return real(*_)
    if kind == "stuck":
        time.sleep(60)
    raise OSError(errno.ENOSPC, "No space left on device")
real = saving.Saver._write_files
saving.Saver._write_files = fail
from pipegrid.training.checkpoint import last_save
last_save._SILENT = 0.2
from datetime import timedelta
checkpoints = Checkpoints(directory, timeout=timedelta(seconds=1 if kind == "stuck" else 60))
checkpoints.save(TrainingState(stages={"head": {0: nn.Linear(2, 2)}}), step=5, blocking=False)
atexit.register(lambda: print("at exit, after"))
if kind == "seen":
    try:
        checkpoints.wait()
    except Exception as error:
        print(type(error).__name__)
if kind == "raise":
    raise SystemExit(3)
if kind == "error":
    raise ValueError("of the script")
print("end of the script")
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("raise", 120, "is lost: OSError: .*No space left on device; exit code 120"),
        ("error", 120, "ValueError: of the script.*is lost: OSError: .*No space left"),
        ("stuck", 120, r"waiting up to 1 s .*is lost: CheckpointError: it has not ended; call Checkpoints\.close\(\)"),
        ("slow", 0, r"^waiting up to 60 s for the last save in \S+\n$"),
        ("seen", 0, "^$"),
    ],
)
def test_a_last_save_that_is_lost_is_an_exit_code_and_a_text(tmp_path, kind, code, said):
    done = subprocess.run(
        [sys.executable, "-c", LAST, kind, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert re.search(said, done.stderr, re.DOTALL), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["at exit, after", "at exit, before"]
    assert ("end of the script" in lines) is (kind not in {"raise", "error"})
    if kind == "slow":
        assert Checkpoints(tmp_path).steps() == [5]


def test_an_interrupted_wait_has_not_seen_the_outcome():
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    pending = Pending()
    pending.future = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    assert pending.future is not None
