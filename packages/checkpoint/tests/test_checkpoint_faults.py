"""Faults while saving: killed at every file operation, a full disk, no permission, any corrupted byte."""

from __future__ import annotations

import errno
import io
import math
import os
import random
import re
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState, job, saving
from pipegrid.checkpoint.stored import manifest, reading
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError

SWITCH = re.compile(r"rename \S+/\.saving-\d+-\w+$")
OPERATIONS = ("open", "fsync", "rename", "unlink", "rmdir", "mkdir")


class Disk:
    """Notes file operations below a directory, and fails from the ``at``-th on: what a killed process leaves.

    A process that is killed does nothing more, so after the fault no operation reaches the disk. With ``once``, only
    that operation fails: the process goes on.
    """

    def __init__(self, monkeypatch, directory, *, at=math.inf, error=None, once=False):
        self.log, self.at, self.once = [], at, once
        self.error = error or OSError(errno.EIO, "the process is dead")
        self._directory = str(directory)
        real_open = io.open

        def opened(file, mode="r", *args, **kwargs):
            if set(mode).isdisjoint("wax+") or not self._below(file):
                return real_open(file, mode, *args, **kwargs)
            self.reach(f"open {file}")
            return _File(real_open(file, mode, *args, **kwargs), self)

        monkeypatch.setattr(io, "open", opened)
        for name in OPERATIONS[1:]:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _below(self, path):
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._directory)

    def _counted(self, name, function):
        def call(path, *args, **kwargs):
            if name == "fsync" or self._below(path) or "dir_fd" in kwargs:
                self.reach(f"{name} {path}")
            return function(path, *args, **kwargs)

        return call

    def reach(self, what):
        self.log.append(what)
        if len(self.log) == self.at or (len(self.log) > self.at and not self.once):
            raise self.error


class _File:
    """A file whose writes are operations of a disk."""

    def __init__(self, handle, disk):
        self._handle, self._disk = handle, disk

    def write(self, data):
        self._disk.reach(f"write {len(data)}")
        return self._handle.write(data)

    def __getattr__(self, name):
        return getattr(self._handle, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._handle.close()


def made(value):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return TrainingState(stages={"head": {0: module}}), module


def operations(tmp_path, monkeypatch):
    """How many file operations a save has that also removes an old checkpoint."""
    with monkeypatch.context() as patch:
        state, _ = made(0.0)
        checkpoints = Checkpoints(tmp_path / "counted", keep=1)
        checkpoints.save(state, step=1)
        disk = Disk(patch, tmp_path / "counted")
        checkpoints.save(state, step=2)
        return disk


def chosen(log, every):
    """The operations to fail at, counted from 1: all but most of the writes."""
    return [at for at, entry in enumerate(log, start=1) if not entry.startswith("write") or at % every == 0]


EVERY = [11, pytest.param(1, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("every", EVERY)
def test_a_save_killed_at_any_file_operation_leaves_a_good_checkpoint(tmp_path, monkeypatch, every):
    """The last one until the switch, the new one after it; and the next run cleans up and saves."""
    total = operations(tmp_path, monkeypatch)
    assert {entry.split()[0] for entry in total.log} == {*OPERATIONS, "write"}
    switch = next(at for at, entry in enumerate(total.log, start=1) if SWITCH.match(entry))
    for at in chosen(total.log, every):
        directory = tmp_path / f"killed-{at}"
        state, module = made(1.0)
        Checkpoints(directory, keep=1).save(state, step=1)
        checkpoints = Checkpoints(directory, keep=1)
        made_after, _ = made(2.0)
        with monkeypatch.context() as patch:
            disk = Disk(patch, directory, at=at)
            with pytest.raises(CheckpointError, match="the process is dead"):
                checkpoints.save(made_after, step=2)
        checkpoints.discard()  # a process that is killed holds no lock
        found = Checkpoints(directory, keep=1).load(state)
        assert found.step == (1 if at <= switch else 2), (at, disk.log)
        assert module.weight.unique().item() == found.step
        assert {path.name for path in directory.iterdir() if path.name.startswith(".")} <= {".lock"}
        Checkpoints(directory, keep=1).save(made_after, step=3)
        assert Checkpoints(directory, keep=1).steps() == [3]


def test_all_files_are_forced_to_the_disk_before_the_switch(tmp_path, monkeypatch):
    """Each file by an fsync after its writes, then the folder, then the rename, then the folder around it."""
    log = operations(tmp_path, monkeypatch).log
    switch = next(at for at, entry in enumerate(log) if SWITCH.match(entry))
    before = [entry.split()[0] for entry in log[:switch] if not entry.startswith("rename")]
    opened = before.count("open")
    assert before.count("fsync") == opened + 1
    assert before[-1] == "fsync"
    assert log[switch + 1].startswith("fsync")


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EACCES, marks=pytest.mark.nightly)])
def test_a_full_disk_at_any_operation_is_an_error_and_the_run_goes_on(tmp_path, monkeypatch, number, every):
    log = operations(tmp_path, monkeypatch).log
    state, module = made(1.0)
    checkpoints = Checkpoints(tmp_path / "a", keep=1)
    checkpoints.save(state, step=0)
    previous = 0
    for at in chosen(log, every):
        with monkeypatch.context() as patch:
            Disk(patch, tmp_path / "a", at=at, error=OSError(number, os.strerror(number)), once=True)
            checkpoints.save(state, step=at, blocking=False)
            if log[at - 1].split()[0] == log[at - 2].split()[0] == "mkdir":  # torch makes the folder again, if it can
                checkpoints.wait()
            else:
                with pytest.raises(CheckpointError, match=rf"step {at} is (not )?saved.*{os.strerror(number)}"):
                    checkpoints.wait()
        assert Checkpoints(tmp_path / "a", keep=1).load(state).step in (previous, at)
        checkpoints.save(state, step=at)
        previous = at
        assert checkpoints.steps() == [at]
        assert module.weight.unique().item() == 1.0


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    state, _ = made(1.0)
    checkpoints = Checkpoints(tmp_path / "a")
    with monkeypatch.context() as patch:
        Disk(patch, tmp_path / "a", at=3, error=OSError(errno.ENOSPC, "No space left on device"))
        checkpoints.save(state, step=1, blocking=False)
        with pytest.raises(CheckpointError, match="step 1 is not saved: rank 0: OSError: .*No space left on device"):
            checkpoints.save(state, step=2)
    checkpoints.save(state, step=3)
    assert checkpoints.steps() == [3]
    checkpoints.close()


def test_any_corrupted_byte_is_found_and_the_checkpoint_before_is_loaded(tmp_path):
    """Every file, a sample of its bytes: the error names the tensor or the file, and a load takes the one before."""
    state, module = made(1.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1)
    state, module = made(2.0)
    state = TrainingState(stages=state.stages, plan="a plan", data={"sample": 3})
    checkpoints.save(state, step=2)
    newest = tmp_path / "save-0002-step-00000002"
    rng = random.Random(1)
    inside = [part for part in manifest.parts(reading.read(newest)) if part[1].endswith(".distcp")]
    texts = set()
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        places = {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))}
        places |= {rng.randrange(start, start + length) for _, name, start, length, _ in inside if name == path.name}
        for at in places:
            damaged = bytearray(content)
            damaged[at] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError) as caught:
                checkpoints.load(state, step=2)
            texts.add(str(caught.value).split(": ")[2])
            with pytest.warns(UserWarning, match="skipped: save-0002-step-00000002 is not loaded"):
                found = checkpoints.load(state)
            assert (found.step, len(found.skipped)) == (1, 1)
            assert module.weight.unique().item() == 1.0
        for shorter in (content[:-1], b""):
            path.write_bytes(shorter)
            with pytest.raises(CorruptCheckpointError):
                checkpoints.load(state, step=2)
        path.write_bytes(content)
    assert {"the tensor model/head/weight", "the tensor model/head/bias", "the file plan.txt"} <= texts
    assert checkpoints.load(state).step == 2
    assert module.weight.unique().item() == 2.0


def test_a_missing_file_is_named(tmp_path):
    state, _ = made(1.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1)
    next(tmp_path.glob("*/__0_0.distcp")).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"the tensor model/head/\w+: .*No such file"):
        checkpoints.load(state)


def test_a_directory_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(CheckpointError, match=r"a is not used: rank 0: FileExistsError"):
        Checkpoints(tmp_path / "a")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("deadline", [None, 30.0])
def test_a_rank_that_cannot_write_stops_the_save_of_all_and_no_later_one(ranks, monkeypatch, deadline):
    rank = dist.get_rank()
    module = nn.Linear(4, 4)
    state = TrainingState(stages={"head": {rank: nn.ModuleDict({f"part{rank}": module})}})
    checkpoints = Checkpoints(ranks.shared_path / "a", deadline=deadline)
    checkpoints.save(state, step=1)
    with monkeypatch.context() as patch:
        if rank == 1:
            Disk(patch, ranks.shared_path / "a", at=1, error=OSError(errno.ENOSPC, "No space left on device"))
        checkpoints.save(state, step=2, blocking=False)
        with pytest.raises(CheckpointError, match="step 2 is not saved: rank 1: OSError: .*No space left"):
            checkpoints.wait()
    assert checkpoints.steps() == [1]
    ranks.barrier()
    assert len(list((ranks.shared_path / "a").glob("*save*"))) == 1
    checkpoints.save(state, step=3)
    assert checkpoints.steps() == [3, 1]
    checkpoints.close()


@pytest.mark.ranks(2)
@pytest.mark.fault("kill", rank=1, at="saving")
def test_a_rank_killed_while_saving_ends_the_save_in_seconds(ranks):
    rank = dist.get_rank()
    module = nn.Linear(4, 4)
    state = TrainingState(stages={"head": {rank: nn.ModuleDict({f"part{rank}": module})}})
    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(state, step=1)
    checkpoints.save(state, step=2, blocking=False)
    ranks.reach("saving")
    start = time.monotonic()
    with pytest.raises(Exception, match="not saved|closed|reset|rank 1"):
        checkpoints.wait()
        checkpoints.save(state, step=3)
    assert time.monotonic() - start < 30
    assert set(checkpoints.steps()) in ({1}, {2, 1})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("deadline", "pause"), [(1.2, 0.4), (60.0, 0.5)])
def test_ranks_that_save_or_load_hear_of_each_other_each_half_second(ranks, monkeypatch, deadline, pause):
    """A wire that is cut between two meetings is found out half a second after the deadline, however long that is."""
    pauses, twice = [], threading.Event()

    class Left(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            if len(pauses) == 2:
                twice.set()
            return super().wait(0.01)

    monkeypatch.setattr(job, "threading", SimpleNamespace(Event=Left, Thread=threading.Thread))
    ranks_that_save = job.CheckpointRanks(None, timedelta(seconds=60), deadline, None)
    with ranks_that_save.calling("save()"):
        twice.wait()
    ranks_that_save.close()
    assert [*set(pauses)] == [pytest.approx(pause)]


@pytest.mark.ranks(2)
def test_an_interrupted_rank_waits_for_no_other(ranks):
    ranks_that_save = job.CheckpointRanks(None, timedelta(seconds=60), 30.0, None)
    began = time.monotonic()
    if ranks.rank == 0:
        with pytest.raises(KeyboardInterrupt), ranks_that_save.calling("save()"):
            raise KeyboardInterrupt
        assert time.monotonic() - began < 15
    ranks.barrier()
    if ranks.rank == 1:
        with pytest.raises(CheckpointError), ranks_that_save.calling("save()"):
            ranks_that_save.gather(1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_process_killed_at_a_random_time_leaves_a_good_checkpoint(tmp_path, seed):
    """SIGKILL for real: a child saves over and over; whatever it leaves, the newest checkpoint loads."""
    rng = random.Random(seed)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            checkpoints = Checkpoints(tmp_path, keep=2)
            step = max(checkpoints.steps(), default=0)
            while True:
                step += 1
                checkpoints.save(made(float(step))[0], step=step)
        time.sleep(rng.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state, module = made(-1.0)
        found = Checkpoints(tmp_path, keep=2).load(state)
        if found is not None:
            assert module.weight.unique().item() == found.step


@pytest.mark.ranks(2)
def test_a_directory_that_ranks_do_not_share_is_an_error_when_it_is_opened(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_SEEN_WITHIN", 0.2)
    with pytest.raises(CheckpointError, match="rank 1: .* of the first rank does not exist here; all ranks share one"):
        Checkpoints(tmp_path / "own")
    assert list(tmp_path.glob("own/.saving*")) == []
    Checkpoints(ranks.shared_path / "common").close()
