"""An interpreter that has imported torch already, for the ranks that a launcher starts: imports take seconds of each.

A server imports what they need, and forks. What takes the place of the interpreter is a client of it: it hands over
arguments, environment, folder and standard streams, passes signals on, and ends as the fork did, which runs to the
natural end of an interpreter. A client that is killed takes its fork along. The fork's parent is the server: not for
programs that send signals to their parent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

# What is read when an interpreter starts or a library is loaded: a client with other values starts a real interpreter.
READ_AT_START = r"(?!PYTHON_EXEC|TORCH_NCCL)(PYTHON|TORCH_|OMP_|MKL_|LD_)"

CLIENT = """#!{python} -ISE
import json, os, re, signal, socket, sys
at_start = {{name: text for name, text in os.environ.items() if re.match({pattern!r}, name)}}
options = [text for text in sys.argv[1:3] if text[0] == "-" and text != "-u"]
if at_start != {at_start!r} or options not in ([], ["-m"], ["-c"]):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
text = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
server.sendall(text)
def pass_on(number, _):
    try:
        server.send(bytes([number]))
    except (BrokenPipeError, ConnectionResetError):
        return  # the fork has ended: what it ended with waits to be read
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
code = int(server.recv(8) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def start(folder: Path, modules: list[str], **environment: str) -> tuple[subprocess.Popen[str], Path]:
    """A server that has imported ``modules``, until its standard input is closed; and the client's path."""
    address, client = str(folder / "server"), folder / "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | environment  # as torchrun sets it
    at_start = {name: text for name, text in environment.items() if re.match(READ_AT_START, name)}
    given = {"python": sys.executable, "address": address, "pattern": READ_AT_START, "at_start": at_start}
    client.write_text(CLIENT.format(**given))
    client.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address, *modules],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server, client


class Server:
    """Forks for its clients until its standard input ends. The data of each event is what handles it."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._events = selectors.DefaultSelector()
        self._events.register(self._listener, selectors.EVENT_READ, self._fork)
        self._events.register(0, selectors.EVENT_READ, self._end)
        self._forks: dict[socket.socket, int] = {}

    def serve(self) -> list[str]:
        """Returns in each fork, with the arguments of its client."""
        os.write(1, b"ready\n")
        while True:
            for key, _ in self._events.select():
                if (arguments := key.data()) is not None:
                    return arguments

    def _end(self) -> None:
        for pid in self._forks.values():
            os.killpg(pid, signal.SIGKILL)
        os._exit(0)

    def _fork(self) -> list[str] | None:
        connection, _ = self._listener.accept()
        size, streams, *_ = socket.recv_fds(connection, 4, 3)
        text = b""
        while len(text) < int.from_bytes(size, "big") and (part := connection.recv(1 << 20)):
            text += part
        if not size or len(text) < int.from_bytes(size, "big"):  # a client that was killed
            for stream in streams:
                os.close(stream)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            arguments, folder, environment = json.loads(text)
            for stream, number in zip(streams, (0, 1, 2), strict=True):
                os.dup2(stream, number)
            for stream in streams:
                os.close(stream)
            # Each by its object: one whose number is closed would close it again, when something else has it.
            for other in [connection, *self._forks, self._events, self._listener]:
                other.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # here too: it may be killed before it has come so far
        for stream in streams:
            os.close(stream)
        self._forks[connection] = pid
        self._events.register(connection, selectors.EVENT_READ, partial(self._pass_on, connection))
        pidfd = os.pidfd_open(pid)
        self._events.register(pidfd, selectors.EVENT_READ, partial(self._reap, pidfd, connection))
        return None

    def _pass_on(self, connection: socket.socket) -> None:
        """Send a client's signal to its fork; kill the fork of a client that has ended."""
        pid = self._forks.get(connection)
        if pid is None:  # reaped in the same round of events
            return
        number = b""
        with contextlib.suppress(ConnectionResetError):
            number = connection.recv(1)
        if number:
            os.kill(pid, number[0])
        else:
            os.killpg(pid, signal.SIGKILL)
            self._events.unregister(connection)

    def _reap(self, pidfd: int, connection: socket.socket) -> None:
        """Tell a client the exit code of its fork, which has ended."""
        self._events.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._forks.pop(connection), 0)
        if connection in self._events.get_map():
            self._events.unregister(connection)
            with contextlib.suppress(BrokenPipeError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def main(arguments: list[str]) -> None:
    """Run ``[-u] [-m | -c] program ...`` as an interpreter does."""
    sys.stdout.reconfigure(write_through=arguments[0] == "-u")
    kind, *rest = arguments[arguments[0] == "-u" :]
    if kind not in {"-m", "-c"}:
        kind, rest = "", [kind, *rest]
    program, *rest = rest
    sys.argv = [kind or program, *rest]
    sys.path[0] = str(Path.cwd() if kind else Path(program).absolute().parent)
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    text = program
    if not kind:
        module.__file__, text = program, Path(program).read_text()
    exec(compile(text, program if not kind else "<string>", "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    main(Server(sys.argv[1]).serve())
