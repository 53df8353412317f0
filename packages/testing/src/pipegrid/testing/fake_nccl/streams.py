"""Virtual streams: what a GPU is free to reorder, found by vector clocks while everything runs in order on a CPU.

A CUDA stream runs late and beside the others; only events, waits and host synchronisation order it. `Streams` has the
face of `torch.cuda` for streams and events, and keeps for each stream the work that is ordered before its next piece of
work (its clock: a tick per stream). Inside `Streams.watch` every operation on tensors is a piece of work on the current
stream. Two pieces that touch the same bytes, one of them writing, with neither ordered before the other, are a race:
a violation, whatever the run happened to do. Entries of the fake NCCL are work on their group's stream.

Also recorded: reads by the host, which would hold it up on a GPU, and how far the host is ahead of the work that it
knows to be done.

Source: the vector clocks of data race detectors, Mattern 1989, "Virtual Time and Global States of Distributed Systems".
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.multiprocessing import reductions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]

_MOST_RACES = 20
# Reads of a tensor by the host, as calls from Python and as operations.
_HOST_CALLS = frozenset({"tolist", "cpu", "numpy"})
_HOST_OPERATIONS = frozenset({"_local_scalar_dense", "allclose", "equal", "nonzero", "masked_select"})


@frozen
class HostSync:
    """A point at which the host would wait for the GPU: the call and its source line."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


@frozen
class _Access:
    stream: int
    tick: int
    begin: int
    end: int
    writes: bool
    what: str


@define(eq=False)
class _Memory:
    """One storage: the stream it was allocated on, and the accesses that later ones have to come after."""

    reference: Any
    home: int
    accesses: list[_Access] = field(factory=list)
    recorded: set[int] = field(factory=set)


_weak: Any = reductions.StorageWeakRef
# As Any: a virtual stream's events and device are of other types than torch's.
_Stream: Any = torch.Stream


class VirtualStream(_Stream):  # type: ignore[misc]
    """A stream without a GPU; a subclass of torch's, since `Tensor.record_stream` takes no other."""

    streams: Streams
    name: str

    def __new__(cls, streams: Streams, number: int, name: str) -> Self:
        """A stream of that number."""
        made: Self = super().__new__(cls, stream_id=number, device_index=0, device_type=0)
        made.streams, made.name = streams, name
        return made

    def __init__(self, *_: object) -> None:
        """Everything is set by ``__new__``, which torch's stream has instead."""

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
        self.streams.order(self, event.clock)

    def wait_stream(self, stream: Any) -> None:
        """Order later work after the other stream's work so far."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """True: work runs at once. A poll orders nothing, since on a GPU it might have found the work under way."""
        return True

    def synchronize(self) -> None:
        """Wait on the host."""
        self.streams.host_waits("Stream.synchronize", self.record_event().clock)


class VirtualEvent:
    """An event: a stream's work up to a point."""

    def __init__(self, streams: Streams, **_: object) -> None:
        self._streams = streams
        self.clock: Clock = {}

    def record(self, stream: VirtualStream | None = None) -> None:
        """Record the work so far of ``stream``, else of the current stream."""
        self.clock = self._streams.record(stream or self._streams.current_stream())

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Order later work of ``stream``, else of the current stream, after the event."""
        self._streams.order(stream or self._streams.current_stream(), self.clock)

    def query(self) -> bool:
        """True: work runs at once. A poll orders nothing, since on a GPU it might have found the work under way."""
        return True

    def synchronize(self) -> None:
        """Wait on the host."""
        self._streams.host_waits("Event.synchronize", self.clock)


class Streams:
    """The streams of one fake GPU, with the face of `torch.cuda`.

    Args:
        violations: where races are reported.

    Attributes:
        host_syncs: every point inside `watch` at which the host would wait for the GPU, in order.
    """

    def __init__(self, violations: list[str]) -> None:
        self.host_syncs: list[HostSync] = []
        self._violations = violations
        self._races = 0
        self._numbers = itertools.count(1)
        self._clocks: dict[int, Clock] = {}
        self._memories: dict[int, _Memory] = {}
        self._names: dict[int, str] = {}
        self._foreign: set[int] = set()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default = self.make_stream("the default stream")

    # The face of torch.cuda

    def make_stream(self, name: str, *, foreign: bool = False) -> VirtualStream:
        """A new stream. A ``foreign`` one belongs to a library that keeps the memory it uses alive."""
        number = next(self._numbers)
        self._names[number], self._clocks[number] = name, {}
        if foreign:
            self._foreign.add(number)
        return VirtualStream(self, number, name)

    def Stream(self, device: Any = None, priority: int = 0) -> VirtualStream:  # noqa: N802 (torch.cuda's name)
        """A new stream."""
        del device, priority
        return self.make_stream(f"stream {len(self._names)}")

    def Event(self, **options: object) -> VirtualEvent:  # noqa: N802 (torch.cuda's name)
        """A new event."""
        return VirtualEvent(self, **options)

    def current_stream(self, device: Any = None) -> VirtualStream:
        """The current stream of this thread."""
        del device
        stack: list[VirtualStream] = self._local.__dict__.get("stack") or [self._default]
        return stack[-1]

    def default_stream(self, device: Any = None) -> VirtualStream:
        """The default stream."""
        del device
        return self._default

    @contextmanager
    def stream(self, stream: VirtualStream | None) -> Iterator[None]:
        """Make ``stream`` the current stream of this thread."""
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(stream or self.current_stream())
        try:
            yield
        finally:
            stack.pop()

    def device(self, device: Any) -> AbstractContextManager[None]:
        """The one device is always the current one."""
        del device
        return nullcontext()

    def current_device(self) -> int:
        """The number of the one device."""
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Wait on the host for every stream."""
        del device
        with self._lock:
            for clock in list(self._clocks.values()):
                self.host_knows(clock)
        self.host_waits("synchronize", {})

    # Clocks

    @property
    def _host(self) -> Clock:
        """What this thread knows to be done: another thread's polling is no order for it."""
        known: Clock = self._local.__dict__.setdefault("host", {})
        return known

    def record(self, stream: VirtualStream) -> Clock:
        """The clock of a new piece of work on ``stream``."""
        with self._lock:
            clock = self._clocks[stream.stream_id]
            _merge(clock, self._host)
            clock[stream.stream_id] = clock.get(stream.stream_id, 0) + 1
            return dict(clock)

    def order(self, stream: VirtualStream, clock: Clock) -> None:
        """Order later work of ``stream`` after what ``clock`` holds."""
        with self._lock:
            _merge(self._clocks[stream.stream_id], clock)

    def host_knows(self, clock: Clock) -> None:
        """What ``clock`` holds is done as far as this thread knows; everything that it starts comes after it."""
        with self._lock:
            _merge(self._host, clock)

    def host_waits(self, what: str, clock: Clock) -> None:
        """The host waits for what ``clock`` holds."""
        self.host_knows(clock)
        self.host_syncs.append(HostSync(what, _caller()))

    def known_to_host(self, stream: VirtualStream, clock: Clock) -> bool:
        """Whether this thread knows the piece of work on ``stream`` with that clock to be done."""
        return clock[stream.stream_id] <= self._host.get(stream.stream_id, 0)

    # Work

    def work(
        self, stream: VirtualStream, what: str, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()
    ) -> Clock:
        """Note a piece of work on ``stream`` that touches tensors; its clock."""
        with self._lock:
            clock = self.record(stream)
            written = {id(tensor): tensor for tensor in writes}
            for tensor in written.values():
                self._touch(stream, clock, tensor, what, writes=True)
            for tensor in reads:
                if id(tensor) not in written:
                    self._touch(stream, clock, tensor, what, writes=False)
            return clock

    def allocate(self, tensor: Tensor) -> None:
        """Note where a tensor's memory was allocated."""
        with self._lock:
            self._memory(tensor)

    def record_use(self, tensor: Tensor, stream: VirtualStream) -> None:
        """`Tensor.record_stream`: a free of the memory waits for that stream's work."""
        with self._lock:
            self._memory(tensor).recorded.add(stream.stream_id)

    def _memory(self, tensor: Tensor) -> _Memory:
        reference: Any = _weak(tensor.untyped_storage())
        memory = self._memories.get(reference.cdata)
        if memory is None:
            memory = self._memories[reference.cdata] = _Memory(reference, self.current_stream().stream_id)
        return memory

    def _touch(self, stream: VirtualStream, clock: Clock, tensor: Tensor, what: str, *, writes: bool) -> None:
        begin, end = _extent(tensor)
        if begin == end:
            return
        memory, here = self._memory(tensor), stream.stream_id
        kept, raced = [], False
        for old in memory.accesses:
            ordered = old.tick <= clock.get(old.stream, 0)
            apart = old.end <= begin or end <= old.begin
            if not (ordered or apart or raced) and (writes or old.writes):
                raced = True
                self._race(
                    f"{what} on {stream.name} {'writes' if writes else 'reads'} memory that {old.what} on "
                    f"{self._names[old.stream]} {'writes' if old.writes else 'reads'}: no event orders the two"
                )
            covered = begin <= old.begin and old.end <= end
            if not (ordered and covered and (writes or (old.stream == here and not old.writes))):
                kept.append(old)
        memory.accesses = [*kept, _Access(here, clock[here], begin, end, writes, what)]

    def sweep(self) -> None:
        """Find memory that was freed, and uses of it on other streams than its own that could still run."""
        with self._lock:
            freed = [key for key, memory in self._memories.items() if memory.reference.expired()]
            for key in freed:
                memory = self._memories.pop(key)
                home = {**self._clocks[memory.home]}
                _merge(home, self._host)
                for access in memory.accesses:
                    if (
                        access.stream not in (memory.home, *memory.recorded, *self._foreign)
                        and home.get(access.stream, 0) < access.tick
                    ):
                        self._race(
                            f"memory of {self._names[memory.home]} was freed while {access.what} on "
                            f"{self._names[access.stream]} may still use it: neither an event nor record_stream "
                            "orders the two"
                        )

    def _race(self, text: str) -> None:
        self._races += 1
        if self._races <= _MOST_RACES:
            self._violations.append(f"race: {text}")

    # Watching

    @contextmanager
    def watch(self) -> Iterator[list[HostSync]]:
        """Note every operation of this thread as work; yields the host synchronisations inside the block."""
        before = len(self.host_syncs)
        seen: list[HostSync] = []
        try:
            with _Calls(self), _Operations(self):
                yield seen
        finally:
            self.sweep()
            seen += self.host_syncs[before:]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations of this thread are the fake's own, and no work."""
        was = self.is_paused
        self._local.paused = True
        try:
            yield
        finally:
            self._local.paused = was

    @property
    def is_paused(self) -> bool:
        """Whether this thread is inside `paused`."""
        return bool(self._local.__dict__.get("paused"))


class _Calls(TorchFunctionMode):
    """Calls that no operation shows: reads to Python values, and `record_stream`."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, call: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(call, "__name__", "")
        if name == "record_stream":
            self._streams.record_use(*args)
            return None
        if name in _HOST_CALLS and not self._streams.is_paused:
            streams = self._streams
            clock = streams.work(streams.current_stream(), name, reads=args[:1])
            streams.host_waits(name, clock)
        return call(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation, those of a backward included, as work on the current stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        made = operation(*args, **kwargs)
        streams, schema = self._streams, operation._schema  # noqa: SLF001 (has no public name)
        if streams.is_paused:
            return made
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return made  # a view touches no memory
        streams.sweep()
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [
            tensor
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(named.get(argument.name))
        ]
        name = operation.overloadpacket.__name__
        new = _tensors(made)
        if name.startswith(("empty", "new_empty")):
            for tensor in new:
                streams.allocate(tensor)
            return made
        stream = streams.current_stream()
        clock = streams.work(stream, name, reads=_tensors(list(named.values())), writes=[*written, *new])
        if name in _HOST_OPERATIONS:
            streams.host_waits(name, clock)
        return made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans, those between its rows included."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + last + 1) * size


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


_NOT_THE_CALLER = (str(Path(torch.__file__).parent), __file__)


def _caller() -> str:
    """The source line that is neither torch's nor this module's."""
    stack = traceback.extract_stack()
    frame = next((frame for frame in reversed(stack) if not frame.filename.startswith(_NOT_THE_CALLER)), stack[0])
    return f"{frame.filename}:{frame.lineno}"
