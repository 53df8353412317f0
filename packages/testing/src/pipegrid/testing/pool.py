"""The pool of workers in the pytest process: started when first needed, grown on demand, replaced after trouble."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TypeVar

from attrs import define, evolve, field

from pipegrid.testing.hosts import HostsError
from pipegrid.testing.messages import (
    Channel,
    Exited,
    Fork,
    Forked,
    Hello,
    HostsOpen,
    HostsRefused,
    OpenHosts,
    SendSignal,
    Sign,
    Stopped,
    frame,
)
from pipegrid.testing.wire import Wire

_M = TypeVar("_M")

# Importing torch on a busy machine with a cold file cache takes long; a healthy start is a few seconds.
START_LIMIT = 180.0
_CLOSE_LIMIT = 10.0


class PoolError(RuntimeError):
    """The pool cannot provide rank processes: the template or a worker did not start."""


@define(eq=False)
class Worker:
    """One worker process as the pytest process sees it."""

    pid: int
    channel: Channel
    output: IO[bytes] | None
    stacks: IO[bytes]
    _read_to: int = field(default=0, init=False)

    def new_output(self) -> str:
        """Standard output and error of the process since the last call."""
        if self.output is None:  # pytest -s: it went straight to the terminal
            return ""
        descriptor = self.output.fileno()
        data = os.pread(descriptor, max(0, os.fstat(descriptor).st_size - self._read_to), self._read_to)
        self._read_to += len(data)
        return data.decode(errors="replace")

    def dumped(self) -> str:
        """The stacks that the process's signal handler wrote."""
        descriptor = self.stacks.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the process's socket and files; it kills itself when it sees that, if it still lives."""
        self.channel.socket.close()
        self.stacks.close()
        if self.output is not None:
            self.output.close()


@define(eq=False)
class _Template:
    """The process that forks the workers, as the pytest process sees it.

    Attributes:
        directory: of the session; made and removed by the process itself, so that nothing is ever left behind.
        log: its standard output and error.
        ready: whether it has imported everything and forks at once.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    directory: Path
    log: IO[bytes]
    ready: bool = False

    def printed(self) -> str:
        """The output of the process, for the end of an error."""
        self.log.seek(0)
        return "; it printed:\n" + self.log.read().decode(errors="replace")


class Pool:
    """Workers of one pytest session. `take` hands out, `give_back` and `discard` take back."""

    def __init__(self, hello: Hello, *, passthrough: bool, preload: Sequence[str] = ()) -> None:
        self._hello, self._preload, self._passthrough = hello, preload, passthrough
        self._idle: list[Worker] = []
        self._tests = self._workers = 0
        self._template: _Template | None = None
        self._unread: list[object] = []
        # Process groups of workers that are not known to have ended: the kernel ends the workers of a template that is
        # killed, but not what they started.
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the template without waiting for it; `take` waits. One that is gone is replaced."""
        if self._template is not None and self._template.process.poll() is None:
            return
        self.close()
        directory = Path(tempfile.gettempdir()) / f"pipegrid-testing-{secrets.token_hex(8)}"
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (held until close)
        output = None if self._passthrough else log
        code = (
            "import sys, json; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop('path'); "
            "from pipegrid.testing.template import main; main(**arguments)"
        )
        arguments = {
            "path": list(self._hello.path),
            "control": theirs.fileno(),
            "parent": os.getpid(),
            "directory": str(directory),
            "preload": [name for name in self._preload if name in sys.modules],
        }
        # One thread per rank: the ranks of a test share the machine's cores.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **os.environ}
        with theirs:
            # A session of its own: the terminal's Ctrl-C reaches pytest alone, which then ends the pool.
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and code)
                [sys.executable, "-c", code, json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._template = _Template(process, Channel(ours), directory, log)

    @property
    def _started(self) -> _Template:
        if self._template is None:
            raise PoolError("the pool has not been started")
        return self._template

    def directory(self) -> Path:
        """A fresh directory for one test."""
        self._tests += 1
        path = self._ready_template().directory / f"test-{self._tests}"
        (path / "shared").mkdir(parents=True)
        return path

    def take(self, count: int, hosts: HostsOpen | None = None) -> list[Worker]:
        """``count`` idle workers, forked where there are too few; on two ``hosts``, half on each, for one test."""
        if hosts is not None:
            return [self._start_worker(Fork(host=hosts.processes[2 * place // count])) for place in range(count)]
        self.start()
        # An idle worker sends nothing; a readable socket is one that ended.
        ended = [worker for worker in self._idle if worker.channel.ready()[1]]
        self.discard(ended)
        self._idle = [worker for worker in self._idle if worker not in ended]
        while len(self._idle) < count:
            self._idle.append(self._start_worker(Fork()))
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def open_hosts(self, folder: str, wire: Wire) -> tuple[Worker, HostsOpen]:
        """Two hosts, until the process that holds them is discarded.

        Raises:
            HostsError: this machine does not allow them.
        """
        holder = self._fork(Fork(hosts=True))
        try:
            holder.channel.send(OpenHosts(folder, wire))
            answer = holder.channel.receive()
        except (EOFError, ConnectionError):
            answer = None
        if isinstance(answer, HostsOpen):
            return holder, answer
        printed = holder.new_output()
        self.discard([holder])
        if isinstance(answer, HostsRefused):
            raise HostsError(answer.text)
        raise PoolError(f"the process that holds two hosts ended; it printed:\n{printed}")

    def give_back(self, workers: list[Worker]) -> None:
        """Take ``workers``, whose test is over and cleaned up, for the next test."""
        self._idle = workers + self._idle

    def discard(self, workers: list[Worker]) -> None:
        """Kill ``workers`` and what they started."""
        for worker in workers:
            self.signal(worker, signal.SIGKILL)
            worker.close()

    def signal(self, worker: Worker, number: int) -> None:
        """Send a signal to the worker's process group, through the template, which knows whether it still lives."""
        if self._template is not None:
            # Without a template there are no workers; `news` raises.
            with contextlib.suppress(ConnectionError):
                self._template.channel.send(SendSignal(pid=worker.pid, signal=number))

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register with ``selector``, so that it wakes up for `news`."""
        selector.register(self._started.channel.socket, selectors.EVENT_READ, None)

    def news(self) -> list[Exited | Stopped]:
        """Workers that ended or were stopped since the last call."""
        self._collect(self._started)
        news = [message for message in self._unread if isinstance(message, Exited | Stopped)]
        self._unread.clear()
        return news

    def close(self) -> None:
        """Kill every worker and end the template."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        template, self._template = self._template, None
        if template is not None:
            process = template.process
            template.channel.socket.close()
            if not template.ready:  # still importing, with no children
                process.kill()
            try:
                process.wait(_CLOSE_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.wait() != 0:  # else it has ended them itself
                for group in self._groups:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
            template.log.close()
            shutil.rmtree(template.directory, ignore_errors=True)
        self._unread.clear()
        self._groups.clear()

    def _start_worker(self, request: Fork) -> Worker:
        worker = self._fork(request)
        self._workers += 1
        # With a base of its own, a rank's tmp_path neither clashes with another rank's nor counts as a session to keep.
        base = {"basetemp": f"{self._started.directory}/worker-{self._workers}"}
        worker.channel.send(evolve(self._hello, options={**self._hello.options, **base}))
        return worker

    def _fork(self, request: Fork) -> Worker:
        template = self._ready_template()
        ours, theirs = socket.socketpair()
        output = None if self._passthrough else tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (the worker's, held)
        stacks = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 (the worker's, held)
        with theirs:
            descriptors = [theirs.fileno(), 1 if output is None else output.fileno(), stacks.fileno()]
            with contextlib.suppress(ConnectionError):  # said in full by the receive below
                socket.send_fds(template.channel.socket, [frame(request)], descriptors)
        forked = self._receive(Forked, template)
        self._groups.add(forked.pid)
        return Worker(pid=forked.pid, channel=Channel(ours), output=output, stacks=stacks)

    def _ready_template(self) -> _Template:
        self.start()
        template = self._started
        if not template.ready:
            self._receive(Sign, template)  # that it is ready
            template.ready = True
        return template

    def _receive(self, kind: type[_M], template: _Template) -> _M:
        """The next message of ``kind`` from the template; other messages are kept for `news`."""
        until = time.monotonic() + START_LIMIT
        while True:
            if (found := next((one for one in self._unread if isinstance(one, kind)), None)) is not None:
                self._unread.remove(found)
                return found
            with selectors.DefaultSelector() as selector:
                selector.register(template.channel.socket, selectors.EVENT_READ)
                if not selector.select(until - time.monotonic()):
                    error = PoolError(f"the template process did not answer in {START_LIMIT:.0f} s{template.printed()}")
                    self.close()
                    raise error
            self._collect(template)

    def _collect(self, template: _Template) -> None:
        messages, gone = template.channel.ready()
        self._unread.extend(messages)
        self._groups.difference_update(message.pid for message in messages if isinstance(message, Exited))
        if gone and not messages:
            error = PoolError(f"the template process, which forks the ranks, is gone{template.printed()}")
            self.close()  # the next test starts anew
            raise error
