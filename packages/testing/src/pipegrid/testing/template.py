"""The template process: it imports torch once and forks the workers from itself.

A worker so forked is ready in milliseconds where a fresh interpreter needs seconds for torch alone, so replacing one
after a crash costs next to nothing. The template runs no code of a test, holds one thread, and outlives nothing: when
the pytest process goes, however it goes, the control socket ends and the template kills every worker (stopped ones too)
with whatever processes these have started, removes the session's directory and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from pipegrid.testing.hosts import join, serve_hosts
from pipegrid.testing.messages import Channel, Exited, Fork, Forked, OpenHosts, SendSignal, Sign, Stopped

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int) -> bool:
    """Have the kernel send this process signal ``number`` when its parent ends; True if the parent still lives.

    Linux only. Elsewhere the end of the parent's socket has the same meaning, unless a process that the parent started
    holds that socket open too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent


def main(control: int, parent: int, directory: str, preload: list[str]) -> None:
    """Serve `Fork` and `SendSignal` requests on descriptor ``control`` until its other end closes."""
    children: set[int] = set()
    try:
        # The parent's end is not answered by SIGKILL here: there are workers and a directory to clean away first.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        if not end_with_parent(parent, signal.SIGTERM):
            return
        # The terminal's Ctrl-C is for pytest to act on; it ends this process by closing the socket.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(directory).mkdir(mode=0o700)
        _serve(Channel(socket.socket(fileno=control)), children, _imported(preload))
    finally:
        signal.set_wakeup_fd(-1)  # the ends of the children killed below are not waited for here
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in children:
            _signal_group(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        shutil.rmtree(directory, ignore_errors=True)


def _imported(preload: list[str]) -> Callable[[Channel, int], None]:
    """The main function of a worker, with everything it needs imported."""
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    from pipegrid.testing import worker

    for name in preload:
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the imported modules are for good: a collection in a worker need not walk them
    return worker.main


def _serve(channel: Channel, children: set[int], work: Callable[[Channel, int], None]) -> None:
    # The signals wake the select below through this pair, and do nothing else.
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    channel.send(Sign.READY)
    template = os.getpid()
    descriptors: list[int] = []
    while True:
        readable, _, _ = select.select([channel.socket, wake_read], [], [])
        if wake_read in readable:
            if signal.SIGTERM in wake_read.recv(4096):
                return
            for pid in sorted(children):
                _reap(pid, channel, children)
        if channel.socket in readable:
            # A fork is answered before the next is asked for, so the three descriptors at hand belong to it.
            try:
                data, received, _, _ = socket.recv_fds(channel.socket, 1 << 16, 3)
            except ConnectionResetError:  # pytest is gone, with messages left
                return
            if not data:
                return
            descriptors += received
            for request in channel.feed(data):
                if isinstance(request, SendSignal) and request.pid in children:
                    _signal_group(request.pid, request.signal)
                elif isinstance(request, Fork):
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for end in (wake_read, wake_write, channel.socket):
                            end.close()
                        _become_worker(template, descriptors, request, work)
                    _own_group(pid)
                    while descriptors:
                        os.close(descriptors.pop())
                    children.add(pid)
                    channel.send(Forked(pid=pid))


def _become_worker(template: int, descriptors: list[int], request: Fork, work: Callable[[Channel, int], None]) -> None:
    """Set up the child, with its own process group and output file, then serve tests, or two hosts, until the end."""
    code = 1
    try:
        _own_group(0)
        if not end_with_parent(template, signal.SIGKILL):
            os._exit(code)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        link, output, stacks = descriptors
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)
        # Each line leaves in one write, and at once. Under -s all ranks write to pytest's own output: where
        # PYTHONUNBUFFERED is set, Python writes a line in pieces, which mix; elsewhere a crash takes held text along.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)
        channel = Channel(socket.socket(fileno=link))
        if request.hosts:
            if isinstance(order := channel.receive(), OpenHosts):
                serve_hosts(channel, Path(order.folder), order.wire)
        else:
            if request.host is not None:
                join(request.host)
            work(channel, stacks)
        code = 0
    except BaseException:  # noqa: BLE001 (a fork must never return into the template's loop)
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _own_group(pid: int) -> None:
    # Called on both sides of the fork, so that the group exists whichever side runs first.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _reap(pid: int, channel: Channel, children: set[int]) -> None:
    found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if not found:
        return
    if os.WIFSTOPPED(status):
        channel.send(Stopped(pid=pid))
        return
    children.discard(pid)
    _signal_group(pid, signal.SIGKILL)  # what the worker started goes with it
    channel.send(Exited(pid=pid, code=os.waitstatus_to_exitcode(status)))


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
