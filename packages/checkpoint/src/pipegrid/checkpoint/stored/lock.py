"""One run at a time in a directory: a lock of the operating system, on a file that names who holds it. No torch.

The lock is the process's (``fcntl.lockf``): it ends with the process, by whatever signal, is not inherited by forked
children, and holds across hosts on shared file systems that pass locks on (NFS, Lustre with ``flock``). So no lock is
ever stale: a file that a killed process has left is locked by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from attrs import define

from pipegrid.core.strict_json import read_json
from pipegrid.stages.errors import CheckpointError

FILE: Final = ".lock"
_TAKEOVER: Final = 30.0  # seconds for the attempt before, of the same launch, to end
_ENDING: Final = 2.0  # seconds for a process that has been killed to end
_POLL: Final = 0.05
_HELD: Final = {errno.EACCES, errno.EAGAIN}
_UNSUPPORTED: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_LONGEST: Final = 4096


@define(eq=False)
class _Held:
    descriptor: int
    text: str  # of the file
    users: int


_held: dict[tuple[int, str], _Held] = {}  # by process and directory: a process's own lock never conflicts with itself


class Lock:
    """Holds the lock of a directory until `release`. ``first``: this process has not held it already.

    Raises:
        CheckpointError: another process holds it; the text names it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / FILE
        self._key = (os.getpid(), str(self._path))
        held = _held.get(self._key)
        if held is None:
            held = _held[self._key] = _Held(*_taken(self._path), 0)
        self.first = not held.users
        held.users += 1

    def release(self) -> None:
        """Let others use the directory, unless this process still does."""
        held = _held.get(self._key)
        if held is None or self._key[0] != os.getpid():
            return
        held.users -= 1
        if not held.users:
            del _held[self._key]
            with contextlib.suppress(OSError):  # a directory that is gone, or may no longer be written to
                if os.path.samestat(os.fstat(held.descriptor), self._path.lstat()):  # else `take_from` has removed it
                    self._path.unlink()  # before the lock ends: another process looks whether its file is still there
            os.close(held.descriptor)


def own_name(directory: Path) -> str:
    """What the lock file of ``directory`` says of this process; empty where it does not hold the lock.

    The file is not read: a process that closes it, however it has opened it, loses the lock.
    """
    held = _held.get((os.getpid(), str(directory.resolve() / FILE)))
    return "" if held is None else held.text


def take_from(directory: Path, named: str) -> None:
    """Let others lock ``directory`` though the process of which `own_name` was ``named`` still does.

    It may be stopped, or out of reach, and its job goes on without it: it saves nothing more when it comes back, since
    each save begins with the other ranks, and ends by a rename of what the next process to lock removes.
    """
    path = directory / FILE
    if named and not own_name(directory) and path.is_file() and path.read_text(errors="replace") == named:
        path.unlink()


def _taken(path: Path) -> tuple[int, str]:
    """The descriptor of the lock file, locked, and what it says: the name of this process."""
    own = {"host": socket.gethostname(), "pid": os.getpid(), "run": os.environ.get("TORCHELASTIC_RUN_ID", "")}
    text = json.dumps(own | {"started": datetime.now(UTC).isoformat(timespec="seconds")})
    start = time.monotonic()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            if _is_locked(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, text.encode(), 0)
                return descriptor, text
            _require_patience(path, descriptor, time.monotonic() - start, own["run"])
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_POLL)


def _is_locked(path: Path, descriptor: int) -> bool:
    """Whether this process has the lock now, on the file that is there."""
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode):
        raise CheckpointError(f"{path} is no regular file")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        text = f"{path.parent} is on a file system without locks: a second run in it is not noticed"
        warnings.warn(text, stacklevel=2)
    try:
        return os.path.samestat(opened, path.stat())  # else its holder has removed it since
    except FileNotFoundError:
        return False


def _require_patience(path: Path, descriptor: int, waited: float, own_run: object) -> None:
    """Raise where the holder has had the time to end."""
    try:
        told = read_json(os.pread(descriptor, _LONGEST, 0).decode())
        run = str(told["run"])[:80]
        name = f"process {told['pid']!r:.20} on {told['host']!s:.80}, since {told['started']!s:.40}"
    except (ValueError, KeyError, TypeError, RecursionError):
        name, run = "another process", ""
    if waited > (_TAKEOVER if run and run == own_run else _ENDING):
        name += f", run {run}" if run else ""
        raise CheckpointError(f"{path.parent} is in use by {name}; end it, or choose another directory")
