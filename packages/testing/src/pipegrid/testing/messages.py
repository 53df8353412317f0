"""Messages between the pytest process, its template and its workers.

Every message is a `Sign`, or a frozen attrs class of plain data, pickled behind its length on a socket pair. No object
of a test ever travels: a worker collects the test by itself, so parametrized values and fixtures need not be picklable.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from enum import Enum

from attrs import field, frozen

from pipegrid.testing.faults import Fault
from pipegrid.testing.wire import Wire

_HEADER = struct.Struct("!I")
_READ = 1 << 16


class Sign(Enum):
    """Messages without data."""

    READY = "from the template: torch and pytest are imported; forks are cheap from here on"
    ASK_STACKS = "to a worker: a request for the stacks of every thread"
    STARTED = "from a worker: the test is collected; the world is made next"
    CLEAN_UP = "to a worker: every rank has ended the test; destroy what it left"


@frozen
class Fork:
    """To the template: fork a worker. Its socket, output file and stacks file travel beside it as file descriptors.

    ``host`` is the process that holds the host of the worker, None for this machine itself. With ``hosts``, what is
    forked is no worker, but two hosts (`OpenHosts`).
    """

    host: int | None = None
    hosts: bool = False


@frozen
class SendSignal:
    """To the template: send ``signal`` to the process group of worker ``pid``, if it still lives."""

    pid: int
    signal: int


@frozen
class Forked:
    """From the template: the answer to `Fork`."""

    pid: int


@frozen
class Exited:
    """From the template: worker ``pid`` ended, ``code`` as in `os.waitstatus_to_exitcode`, negative for a signal."""

    pid: int
    code: int


@frozen
class Stopped:
    """From the template: worker ``pid`` was stopped by a signal."""

    pid: int


@frozen
class OpenHosts:
    """To the process of two hosts: open them, with ``wire`` between them; `hosts.set_wire` finds them by ``folder``."""

    folder: str
    wire: Wire


@frozen
class HostsOpen:
    """From it: the ``processes`` that hold host a and host b; the address and the port of a store on host a."""

    processes: tuple[int, int]
    address: str
    port: int


@frozen
class HostsRefused:
    """From it: the reason why this machine allows no two hosts."""

    text: str


@frozen
class Hello:
    """To a worker: the pytest configuration of the process that started it."""

    options: dict[str, object]
    args: tuple[str, ...]
    directory: str
    path: tuple[str, ...]


@frozen
class Settings:
    """Settings of one test on ranks."""

    world_size: int
    backend: str
    deadline: float
    strict_sends: bool
    fake_nccl: str
    hosts: int = 1
    wire: Wire = field(factory=Wire)


@frozen
class RunTest:
    """To a worker: run one test as one rank, ``name`` in the file ``path``.

    ``directory`` is shared by the ranks of this test and removed after it; ``largest_world`` is the most ranks that any
    test of the session has; ``server`` is the address and the port of the store of two hosts.
    """

    path: str
    name: str
    rank: int
    settings: Settings
    directory: str
    largest_world: int
    server: tuple[str, int] | None = None


@frozen
class PositionReport:
    """From a worker: the rank's position, as reported by the code under test."""

    text: str


@frozen
class FaultPlanned:
    """From a worker: a fault by time, planned by the test's body; the pytest process carries it out."""

    fault: Fault


@frozen
class FaultFired:
    """From a worker: a planned fault happens right after this message."""

    fault: Fault


@frozen
class Warned:
    """A warning that the test's filters let pass."""

    message: str
    category: tuple[str, str]
    filename: str
    lineno: int


@frozen
class Finished:
    """From a worker: the end of the test.

    ``outcome`` is ``passed``, ``failed``, ``skipped`` or ``xfailed``; ``text`` the tracebacks or the reason;
    ``summary`` the first failure in a line; ``injected`` whether every failure is an injected fault or was raised from
    one.
    """

    outcome: str
    text: str = ""
    summary: str = ""
    injected: bool = False
    sections: tuple[tuple[str, str], ...] = ()
    warnings: tuple[Warned, ...] = ()
    properties: tuple[tuple[str, object], ...] = ()


@frozen
class Cleaned:
    """From a worker: the answer to ``CLEAN_UP``; ``left`` names what was left behind, empty where nothing was."""

    left: str


@frozen
class Stacks:
    """From a worker: the answer to ``ASK_STACKS``."""

    text: str


@frozen
class Channel:
    """Both ends' view of a socket pair. `send` may be called from any thread, the rest from one."""

    socket: socket.socket
    _lock: threading.Lock = field(factory=threading.Lock, repr=False)
    _buffer: bytearray = field(factory=bytearray, repr=False)

    def send(self, message: object) -> None:
        """Send one message whole."""
        with self._lock:
            self.socket.sendall(frame(message))

    def receive(self) -> object:
        """Wait for one message. `EOFError` once the other end is gone."""
        while (message := self._take()) is None:
            self._read(0)
        return message

    def feed(self, data: bytes) -> list[object]:
        """The messages that ``data``, read from the socket by the caller, completes."""
        self._buffer.extend(data)
        return list(iter(self._take, None))

    def ready(self) -> tuple[list[object], bool]:
        """The messages that are here, without waiting, and whether the other end is gone."""
        gone = False
        try:
            while True:
                self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except (EOFError, ConnectionError):
            gone = True
        return list(iter(self._take, None)), gone

    def _read(self, flags: int) -> None:
        if not (data := self.socket.recv(_READ, flags)):
            raise EOFError("the other end of the channel is gone")
        self._buffer.extend(data)

    def _take(self) -> object | None:
        if len(self._buffer) < _HEADER.size:
            return None
        end = _HEADER.size + _HEADER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message: object = pickle.loads(bytes(self._buffer[_HEADER.size : end]))  # noqa: S301 (our own processes)
        del self._buffer[:end]
        return message


def is_plain(value: object) -> bool:
    """True if ``value`` consists of built-in values only, which any process can unpickle."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    return value is None or type(value) in (str, int, float, bool)


def frame(message: object) -> bytes:
    """``message`` as it travels: its length, then its pickle."""
    data = pickle.dumps(message)
    return _HEADER.pack(len(data)) + data
