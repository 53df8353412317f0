"""Work of streams on memory: races of two pieces of work, frees of memory in use, and values of a late device.

Source: the vector clocks of data race detectors, Mattern 1989, "Virtual Time and Global States of Distributed Systems".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from pipegrid.fake_nccl.torch_compat import WeakStorage, is_empty, living, name_of, tensors_in, tree_map
from pipegrid.fake_nccl.virtual_streams.late import (
    LateRun,
    computation,
    copy_of,
    make_unreadable,
    new_block,
    results_of,
    seen_through,
)
from pipegrid.fake_nccl.virtual_streams.player import DONE, Signal
from pipegrid.fake_nccl.virtual_streams.virtual import Clock, Order, VirtualStream, merge

_MOST_RACES = 20
_FREES = 0  # on a late device: the stream of nothing else, as no stream waits for a free


@frozen
class _Access:
    """A piece of work that reads or writes the bytes ``begin`` to ``end`` of a storage, those between rows included."""

    stream: int
    tick: int
    begin: int
    end: int
    writes: bool
    what: str


@define(eq=False)
class _StorageUse:
    """One storage: the stream it was allocated on, and the accesses that later ones must be ordered after.

    ``block`` is its memory on a late device, ``nbytes`` what counts of it as live.
    """

    reference: Any
    home: int
    accesses: list[_Access] = field(factory=list)
    recorded: set[int] = field(factory=set)
    block: Tensor | None = None
    nbytes: int = 0

    def add(self, new: _Access, clock: Clock) -> _Access | None:
        """Note an access whose work is ordered after ``clock``; the first older access with which it races."""
        kept, raced = [], None
        for old in self.accesses:
            ordered = old.tick <= clock.get(old.stream, 0)
            apart = old.end <= new.begin or new.end <= old.begin
            if raced is None and not (ordered or apart) and (new.writes or old.writes):
                raced = old
            covered = new.begin <= old.begin and old.end <= new.end
            if not (ordered and covered and (new.writes or (old.stream == new.stream and not old.writes))):
                kept.append(old)
        self.accesses = [*kept, new]
        return raced


class StreamWork(Order):
    """The work on the streams of one fake GPU, and the memory that it touches; races are added to ``violations``."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__()
        self._violations = violations
        self._races = 0
        self._memories: dict[int, _StorageUse] = {}
        self._kept: set[tuple[int, int]] = set()

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
        """Note that a library keeps the memory of its piece of work on ``stream``, until `let_go` or for good."""
        self._kept.add((stream.stream_id, clock[stream.stream_id]))

    def let_go(self, stream: VirtualStream, clock: Clock) -> None:
        """Note that the library has ordered a stream after the work, and relies on that from now on."""
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
            operation: the operation that torch dispatches.
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

    def _memory(self, tensor: Tensor) -> _StorageUse:
        reference: Any = WeakStorage(tensor.untyped_storage())
        if reference.cdata not in self._memories:
            self._memories[reference.cdata] = _StorageUse(reference, self.current_stream().stream_id)
        return self._memories[reference.cdata]

    def _touch(self, stream: VirtualStream, clock: Clock, tensor: Tensor, what: str, *, writes: bool) -> None:
        if tensor.numel() == 0:
            return
        here, size = stream.stream_id, tensor.element_size()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * size
        end = begin + (last + 1) * size
        old = self._memory(tensor).add(_Access(here, clock[here], begin, end, writes, what), clock)
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
            accesses = (access for memory in self._memories.values() for access in memory.accesses)
            self._kept &= {(access.stream, access.tick) for access in accesses}

    def _free(self, late: LateRun, memory: _StorageUse, block: Tensor) -> None:
        """Overwrite freed memory of a late device, which another tensor might have by then."""
        recorded = [late.player.put(stream) for stream in memory.recorded - {memory.home}]
        home = late.player.put(memory.home)
        late.player.put(_FREES, lambda: make_unreadable(block), after=[home, *recorded])
        late.shrink(memory.nbytes, after=recorded)

    def _race(self, text: str) -> None:
        self._races += 1
        if self._races <= _MOST_RACES:
            self._violations.append(f"race: {text}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take operations of this thread inside the block as the fake's own, which are not noted as work."""
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
