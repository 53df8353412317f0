"""Virtual streams: what a GPU is free to reorder, found by vector clocks while everything runs in order on a CPU.

A CUDA stream runs late and beside the others; only events, waits and host synchronisation order it. `Streams` has the
face of `torch.cuda` for streams and events, and keeps for each stream the work that is ordered before its next piece of
work (its clock: a tick per stream). Inside `Streams.watch` every operation on tensors is a piece of work on the current
stream. Two pieces that touch the same bytes, one of them writing, with neither ordered before the other, are a race:
a violation, whatever the run happened to do. Entries of the fake NCCL are work on their group's stream.

Also recorded: reads by the host, which would hold it up on a GPU, and how far the host is ahead of the work that it
knows to be done. With a `LateRun` the work is late indeed: see `pipegrid.testing.fake_nccl.late`.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from pipegrid.testing.fake_nccl.late import (
    LateRun,
    computation,
    copy_of,
    make_unreadable,
    new_block,
    results_of,
    seen_through,
)
from pipegrid.testing.fake_nccl.memory import Access, Clock, Memory, extent, merge
from pipegrid.testing.fake_nccl.player import DONE, Signal
from pipegrid.testing.fake_nccl.torch_compat import WeakStorage, is_empty, living, name_of, tensors_in, tree_map
from pipegrid.testing.fake_nccl.virtual import VirtualEvent, VirtualStream
from pipegrid.testing.fake_nccl.watching import Calls, Operations

_MOST_RACES = 20
_FREES = 0  # on a late device: the stream of nothing else, as no stream waits for a free


@frozen
class HostSync:
    """A point at which the host would wait for the GPU: the call, its source line, and the lines of its callers."""

    what: str
    where: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class Streams:
    """The streams of one fake GPU, with the face of `torch.cuda`.

    Args:
        violations: where races are reported.

    Attributes:
        host_syncs: every point inside `watch` at which the host would wait for the GPU, in order.
        late: the late device, while there is one.
        before_poll: called before each poll of the device.
        lock: of the whole device.
    """

    def __init__(self, violations: list[str]) -> None:
        self.host_syncs: list[HostSync] = []
        self.late: LateRun | None = None
        self.before_poll: Callable[[], None] = lambda: None
        self.lock = threading.RLock()
        self._violations = violations
        self._races = 0
        self._numbers = itertools.count(1)
        self._made: list[VirtualStream] = []
        self._clocks: dict[int, Clock] = {}
        self._memories: dict[int, Memory] = {}
        self._names: dict[int, str] = {}
        self._kept: set[tuple[int, int]] = set()
        self._watching = 0  # the thread inside `watch`
        self._local = threading.local()
        self._default = self.make_stream("the default stream")

    # The face of torch.cuda

    def make_stream(self, name: str) -> VirtualStream:
        """A new stream."""
        number = next(self._numbers)
        self._names[number], self._clocks[number] = name, {}
        self._made.append(VirtualStream(self, number, name))
        return self._made[-1]

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
        with self.lock:
            clocks = [dict(clock) for clock in self._clocks.values()]
            signals = [self.here(stream) for stream in self._made]
        for clock in clocks:
            self.host_knows(clock)
        for signal in signals:
            self._hold(signal)
        self.host_waits("synchronize", {})

    # Clocks

    @property
    def _host(self) -> Clock:
        """What this thread knows to be done: another thread's polling is no order for it."""
        known: Clock = self._local.__dict__.setdefault("host", {})
        return known

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
        """What ``clock`` holds is done as far as this thread knows; everything that it starts comes after it."""
        with self.lock:
            merge(self._host, clock)

    def host_waits(self, what: str, clock: Clock, signal: Signal = DONE) -> None:
        """The host waits for what ``clock`` holds, whose end on a late device is ``signal``."""
        self._hold(signal)
        self.host_knows(clock)
        if threading.get_ident() == self._watching:
            where, stack = _caller()
            self.host_syncs.append(HostSync(what, where, stack))

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

    # Work

    def work(
        self, stream: VirtualStream, what: str, *, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()
    ) -> Clock:
        """Note a piece of work on ``stream`` that touches tensors; its clock."""
        with self.lock:
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
        with self.lock:
            memory = self._memory(tensor)
            if self.late is not None and memory.block is None:
                memory.nbytes = tensor.untyped_storage().nbytes()
                memory.block = new_block(memory.nbytes)
                self.late.grow(memory.nbytes)

    def keep(self, stream: VirtualStream, clock: Clock) -> None:
        """A library keeps the memory of its piece of work on ``stream`` until `let_go`, or for good."""
        self._kept.add((stream.stream_id, clock[stream.stream_id]))

    def let_go(self, stream: VirtualStream, clock: Clock) -> None:
        """The library has ordered a stream after the work, and relies on it from now on."""
        self._kept.discard((stream.stream_id, clock[stream.stream_id]))

    def on_device(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor on a late device; without one, the tensor."""
        if self.late is None or tensor.numel() == 0:
            return tensor
        with self.lock:
            memory = self._memory(tensor)
            if memory.block is None:  # made before: its values are on the host
                memory.block = copy_of(tensor.untyped_storage())
            return seen_through(tensor, memory.block)

    def compute(self, operation: Any, args: Any, kwargs: dict[str, Any], *, waits: bool) -> tuple[Any, Signal]:
        """The result of an operation, and its end; on a late device the values are there then.

        Args:
            operation: what torch dispatches.
            args: its arguments.
            kwargs: its arguments by name.
            waits: whether the host needs the values, and waits for them here.
        """
        late = self.late
        if late is None or operation.namespace == "c10d":  # groups of the host have memory of the host
            return operation(*args, **kwargs), DONE

        def there(value: Any) -> Any:
            return self.on_device(value) if isinstance(value, Tensor) else value

        inputs, options = tree_map(there, args), tree_map(there, kwargs)
        stream = self.current_stream().stream_id
        if waits:
            found: list[Any] = []
            signal = late.player.put(stream, lambda: found.append(operation(*inputs, **options)))
            late.player.hold(signal)
            if not found:
                raise RuntimeError(f"{name_of(operation)} failed on the late device; see the violations")
            return found[0], signal
        made = results_of(operation, args, kwargs, late.shapes)
        given = {id(tensor) for tensor in tensors_in([args, kwargs])}
        new = [tensor for tensor in tensors_in(made) if id(tensor) not in given]
        for tensor in new:
            self.allocate(tensor)
        if is_empty(operation):
            return made, DONE
        task = computation(operation, inputs, options, [self.on_device(tensor) for tensor in new])
        return made, late.player.put(stream, task)

    def bring_back(self) -> None:
        """Copy the values of a late device that is done to the tensors on the host."""
        with self.lock, self.paused():
            for memory in self._memories.values():
                block, memory.block, memory.nbytes = memory.block, None, 0
                storage = living(memory.reference)
                if block is not None and storage is not None and storage.nbytes() == block.nbytes:
                    torch.empty(0, dtype=torch.uint8).set_(storage).copy_(block)

    def record_use(self, tensor: Tensor, stream: VirtualStream) -> None:
        """`Tensor.record_stream`: a free of the memory waits for that stream's work."""
        with self.lock:
            self._memory(tensor).recorded.add(stream.stream_id)

    def _memory(self, tensor: Tensor) -> Memory:
        reference: Any = WeakStorage(tensor.untyped_storage())
        memory = self._memories.get(reference.cdata)
        if memory is None:
            memory = self._memories[reference.cdata] = Memory(reference, self.current_stream().stream_id)
        return memory

    def _touch(self, stream: VirtualStream, clock: Clock, tensor: Tensor, what: str, *, writes: bool) -> None:
        begin, end = extent(tensor)
        if begin == end:
            return
        here = stream.stream_id
        old = self._memory(tensor).add(Access(here, clock[here], begin, end, writes, what), clock)
        if old is not None:
            self._race(
                f"{what} on {stream.name} {'writes' if writes else 'reads'} memory that {old.what} on "
                f"{self._names[old.stream]} {'writes' if old.writes else 'reads'}: no event orders the two"
            )

    def sweep(self) -> None:
        """Find memory that was freed, and uses of it that could still run.

        A free waits for the work so far of the stream that the memory was allocated on, and of those that were recorded
        for it (`Tensor.record_stream`).
        """
        with self.lock:
            freed = [key for key, memory in self._memories.items() if memory.reference.expired()]
            for key in freed:
                memory = self._memories.pop(key)
                known = {**self._clocks[memory.home]}
                for clock in (self._host, *(self._clocks[stream] for stream in memory.recorded)):
                    merge(known, clock)
                for access in memory.accesses:
                    kept = (access.stream, access.tick) in self._kept
                    if access.stream != memory.home and not kept and known.get(access.stream, 0) < access.tick:
                        self._race(
                            f"memory of {self._names[memory.home]} was freed while {access.what} on "
                            f"{self._names[access.stream]} may still use it: neither an event nor record_stream "
                            "orders the two"
                        )
                if self.late is not None and memory.block is not None:
                    self._free(self.late, memory, memory.block)

    def forget(self) -> None:
        """Drop the record of host synchronisations, and of memory that was freed, unchecked."""
        with self.lock:
            self.host_syncs.clear()
            for key in [key for key, memory in self._memories.items() if memory.reference.expired()]:
                del self._memories[key]

    def _free(self, late: LateRun, memory: Memory, block: Tensor) -> None:
        """Overwrite freed memory of a late device, which another tensor might have by then."""
        recorded = [late.player.put(stream) for stream in memory.recorded - {memory.home}]
        home = late.player.put(memory.home)
        late.player.put(_FREES, lambda: make_unreadable(block), after=[home, *recorded])
        late.shrink(memory.nbytes, after=recorded)

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
        self._watching = threading.get_ident()
        try:
            with Calls(self), Operations(self):
                yield seen
        finally:
            self._watching = 0
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


_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _caller() -> tuple[str, tuple[str, ...]]:
    """The innermost source line that is neither torch's nor this package's, and all such lines from it outwards."""
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(_NOT_THE_CALLER)]
    stack = tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "", stack
