"""Streams and events without a GPU, with the interface of `torch.cuda`'s, and the order that they make.

`Order` keeps for each stream the work ordered before its next piece of work (its clock: a tick per stream), and for
each thread the work that it knows to be done.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, cast

import torch

from pipegrid.fake_nccl.virtual_streams.host_syncs import HostSync, caller
from pipegrid.fake_nccl.virtual_streams.late import LateRun
from pipegrid.fake_nccl.virtual_streams.player import DONE, Signal

# As Any: a virtual stream's events and device are of other types than torch's.
_Stream: Any = torch.Stream

Clock = dict[int, int]
"""A tick per stream: the work that is ordered before."""


def merge(clock: Clock, other: Clock) -> None:
    """Raise each tick of ``clock`` to that of ``other``."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


class VirtualStream(_Stream):  # type: ignore[misc]
    """A stream without a GPU; a subclass of torch's, since `Tensor.record_stream` takes no other.

    Examples:
        >>> streams = Streams(violations=[])
        >>> streams.make_stream("copies")
        copies
        >>> streams.make_stream("copies").query()
        True
    """

    streams: Order
    name: str

    def __new__(cls, streams: Order, number: int, name: str) -> Self:
        """A stream of that number."""
        made: Self = super().__new__(cls, stream_id=number, device_index=0, device_type=0)
        made.streams, made.name = streams, name
        return made

    def __init__(self, *_: object) -> None:
        """Do nothing: ``__new__``, which torch's stream has instead, sets everything."""

    def __repr__(self) -> str:
        return self.name

    @property
    def device(self) -> torch.device:
        """The CPU, which the fake GPU computes on."""
        return torch.device("cpu")

    def record_event(self, event: Any = None) -> VirtualEvent:
        """Record the stream's work so far."""
        made: VirtualEvent = event or VirtualEvent(self.streams)
        made.record(self)
        return made

    def wait_event(self, event: Any) -> None:
        """Order later work after the event."""
        self.streams.order(self, event.clock, event.signal)

    def wait_stream(self, stream: Any) -> None:
        """Order later work after the other stream's work so far."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Whether its work is done. A poll orders nothing, since on a GPU it might have found the work under way."""
        return self.streams.poll(self.streams.here(self))

    def synchronize(self) -> None:
        """Wait on the host."""
        event = self.record_event()
        self.streams.host_waits("Stream.synchronize", event.clock, event.signal)


class VirtualEvent:
    """An event: a stream's work up to a point.

    Examples:
        >>> streams = Streams(violations=[])
        >>> event = streams.current_stream().record_event()
        >>> event.query()
        True
    """

    def __init__(self, streams: Order, **_: object) -> None:
        self._streams = streams
        self.clock: Clock = {}
        self.signal = DONE

    def record(self, stream: VirtualStream | None = None) -> None:
        """Record the work so far of ``stream``, else of the current stream."""
        here = stream or self._streams.current_stream()
        self.clock, self.signal = self._streams.record(here), self._streams.here(here)

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Order later work of ``stream``, else of the current stream, after the event."""
        self._streams.order(stream or self._streams.current_stream(), self.clock, self.signal)

    def query(self) -> bool:
        """Whether the work is done. A poll orders nothing, since on a GPU it might have found the work under way."""
        return self._streams.poll(self.signal)

    def synchronize(self) -> None:
        """Wait on the host."""
        self._streams.host_waits("Event.synchronize", self.clock, self.signal)


def nothing() -> None:
    """Do nothing."""


class Order:
    """The order of the work of one fake GPU.

    Attributes:
        host_syncs: every point inside `Streams.watch` at which the host would wait for the GPU, in order.
        late: the late device, while there is one.
        before_poll: called before each poll of the device.
        before_compute: called before each operation inside `Streams.watch`.
        drain: waits for every entry of the device.
        lock: of the whole device.
    """

    def __init__(self) -> None:
        self.host_syncs: list[HostSync] = []
        self.late: LateRun | None = None
        self.before_poll = self.before_compute = self.drain = nothing
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._made: list[VirtualStream] = []
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {}
        self._watching = 0  # the thread inside `Streams.watch`
        self._local = threading.local()
        self._default = self.make_stream("the default stream")

    def make_stream(self, name: str) -> VirtualStream:
        """A new stream."""
        number = next(self._numbers)
        self._names[number], self._clocks[number] = name, {}
        self._made.append(VirtualStream(self, number, name))
        return self._made[-1]

    def current_stream(self, device: Any = None) -> VirtualStream:
        """The current stream of this thread."""
        del device
        stack: list[VirtualStream] = self._local.__dict__.get("stack") or [self._default]
        return stack[-1]

    @contextmanager
    def stream(self, stream: VirtualStream | None) -> Iterator[None]:
        """Make ``stream`` the current stream of this thread."""
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(stream or self.current_stream())
        try:
            yield
        finally:
            stack.pop()

    @property
    def _host(self) -> Clock:
        """The clock of the work that this thread knows to be done: another thread's polling orders nothing for it."""
        return cast("Clock", self._local.__dict__.setdefault("host", {}))

    def record(self, stream: VirtualStream) -> Clock:
        """The clock of a new piece of work on ``stream``."""
        with self.lock:
            clock = self._clocks[stream.stream_id]
            merge(clock, self._host)
            clock[stream.stream_id] = clock.get(stream.stream_id, 0) + 1
            return dict(clock)

    def here(self, stream: VirtualStream) -> Signal:
        """The end of the work so far on ``stream``."""
        return DONE if self.late is None else self.late.player.put(stream.stream_id)

    def order(
        self, stream: VirtualStream, clock: Clock, signal: Signal = DONE, reached: Callable[[], None] | None = None
    ) -> None:
        """Order later work of ``stream`` after what ``clock`` holds; ``reached`` is called when the stream gets there.

        On a late device ``signal`` is the end of that work.
        """
        with self.lock:
            merge(self._clocks[stream.stream_id], clock)
            if self.late is not None:
                self.late.player.put(stream.stream_id, after=[signal], reached=reached)

    def host_knows(self, clock: Clock) -> None:
        """Note that this thread knows the work in ``clock`` to be done; everything that it starts is ordered after."""
        with self.lock:
            merge(self._host, clock)

    def host_waits(self, what: str, clock: Clock, signal: Signal = DONE) -> None:
        """The host waits for what ``clock`` holds, whose end on a late device is ``signal``."""
        self._hold(signal)
        self.host_knows(clock)
        if threading.get_ident() == self._watching:
            self.host_syncs.append(HostSync(what, *caller()))

    def _hold(self, signal: Signal) -> None:
        if self.late is not None and not signal.done:
            self.late.player.hold(signal)

    def poll(self, signal: Signal) -> bool:
        """Whether work is done. On a late device a host that asks again and again, and does nothing else, waits."""
        self.before_poll()
        if self.late is not None and not signal.done and self.late.player.poll():
            self.host_waits("polling", {})
        return signal.done

    def host_waiting(self) -> AbstractContextManager[None]:
        """The host waits inside the block for something that a late device may have to do first."""
        return nullcontext() if self.late is None else self.late.player.host_waiting()

    def known_to_host(self, stream: VirtualStream, clock: Clock) -> bool:
        """Whether this thread knows the piece of work on ``stream`` with that clock to be done."""
        return clock[stream.stream_id] <= self._host.get(stream.stream_id, 0)
