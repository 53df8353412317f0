"""gloo: CPU tensors over TCP. One event loop serves all groups of a set of lanes.

Torch gives every gloo group a device of its own, whose thread handles the group's connections. A stage has four lanes
or more, and a message would wake one thread here and another there; on one loop, messages that have come meanwhile are
handled in the same waking. Connections stay apart: one that is closed takes no other lane with it.

Private names of torch are used in `Loop` only, and pinned by a test. Torch makes gloo groups without options; a backend
of another name, registered the public way, takes them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.distributed import ProcessGroup

from pipegrid.transport.backends.base import Mover, Operation
from pipegrid.transport.backends.wire import CONTROL_TAGS

BACKEND = "gloo_on_one_loop"
_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch's own variable: the network interfaces that gloo uses
_LOOP_THREAD = "gloo_tcp_loop"  # the name that gloo gives to the thread of an event loop
_THREADS = 1  # per group, for collectives, which lanes do not use; 0 is not possible
_ORDER_NUMBERS = 2**12
_EPOCHS = 16


@define(eq=False, slots=False)
class Loop:
    """The devices that groups are made on; the options of `BACKEND`."""

    _made: dict[str, Any] = field(factory=dict, init=False)

    @cached_property
    def _devices(self) -> list[Any]:
        """Made with the first group, whose creation names the interface."""
        gloo = dist.ProcessGroupGloo
        names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
        return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]

    def make_group(self, options: Any) -> Any:
        """Make a group of `BACKEND` on this loop, for torch."""
        chosen: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        chosen._devices, chosen._threads, chosen._timeout = self._devices, _THREADS, options.timeout  # noqa: SLF001
        chosen.global_ranks_in_group, chosen.group_name = options.global_ranks_in_group, options.group_id
        backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, chosen)
        self._made[options.group_id] = backend
        return backend

    def take_backend(self, group: ProcessGroup) -> Any:
        """The backend of a group that was made here; once.

        Its ``send`` and ``recv`` are the group's without torch's dispatcher, which has nothing to choose there and
        takes longer than all of a lane's own code.
        """
        return self._made.pop(group.group_name)


def one_loop() -> tuple[str, Loop]:
    """Backend name and options for groups of lanes: gloo, on a loop that they share."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda options, loop: loop.make_group(options), True, ["cpu"])
    return BACKEND, Loop()


def never_preempt() -> None:
    """Have the event loops of gloo in this process, those of torch's own groups too, preempt no thread as they wake.

    A loop that finds a connection locked tries again at once until it is free. Where it has preempted the thread that
    holds the lock, one that sends or posts a receive, it burns the core until the scheduler's next tick, milliseconds
    later: on two ranks with a core each this took a third of a short step, and with a collective under way beside it
    half (``tools/bench/trips.py``). Under SCHED_BATCH, which needs no privilege, a thread that wakes takes a core that
    is free, or waits until one is. Nothing changes where the system has no such policy, or forbids it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile; a sandbox without the call
            if (task / "comm").read_text().strip() == _LOOP_THREAD:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


class GlooTicket(list[Any]):
    """The works of one message that were not waited for. A list, since one is made for each message."""

    __slots__ = ()

    def hold(self, timeout: timedelta) -> None:
        """Wait for the works, each once."""
        for work in self:
            work.wait(timeout)
        self.clear()  # a second wait would block

    def done(self) -> bool:
        """Whether `hold` has returned."""
        return not self

    def order(self) -> None:
        """Return: the host is the stream of a CPU."""


class GlooMover(Mover):
    """Sends and receives of a gloo backend, which has ``send`` and ``recv``."""

    streams = False

    def __init__(self, backend: Any, peers: Mapping[int, int], lanes: int) -> None:
        self._send, self._recv = backend.send, backend.recv
        self._peers = peers  # per lane of this rank, by index, the rank at its other end, as rank in the group
        self._lanes = lanes  # how many use it, on all ranks
        self._started = Counter[tuple[bool, int]]()  # sends to each peer, and receives

    def start(self, operations: Sequence[Operation]) -> Sequence[GlooTicket]:
        """Start the messages one by one: gloo has no batches."""
        return [self.start_one(*operation) for operation in operations]

    def start_one(self, sending: bool, tensors: Sequence[Tensor], lane: int, epoch: int, /) -> GlooTicket:
        """Start a send or a receive for each tensor."""
        peer = self._peers[lane]
        tag = CONTROL_TAGS + epoch if self._lanes == 1 else self._tag(sending, peer, lane, epoch)
        verb = self._send if sending else self._recv
        return GlooTicket([verb([tensor], peer, tag) for tensor in tensors])

    def starter(self, sending: bool, lane: int, epoch: int, /) -> Callable[[Sequence[Tensor]], GlooTicket]:
        """`start_one`, with peer and tag looked up before where one lane uses the backend."""
        if self._lanes > 1:  # each message has a tag of its own
            return lambda tensors: self.start_one(sending, tensors, lane, epoch)
        verb, peer, tag = self._send if sending else self._recv, self._peers[lane], CONTROL_TAGS + epoch
        return lambda tensors: GlooTicket((verb(tensors, peer, tag),))

    def _tag(self, sending: bool, peer: int, lane: int, epoch: int) -> int:
        """Keep apart messages that would meet by mistake, an overflow or a swap: it then runs into the deadline.

        A renewal that one side did not make; on a shared communicator, messages not started in the same order.
        """
        number = self._started[sending, peer] % _ORDER_NUMBERS
        self._started[sending, peer] += 1
        return self._lanes * (CONTROL_TAGS + number * _EPOCHS + epoch % _EPOCHS) + lane

    def abort(self) -> None:
        """Return: `Wire.cut` ends gloo's messages."""
