"""Virtual streams: what a GPU is free to reorder, found by vector clocks while everything runs in order on a CPU.

A CUDA stream runs late and beside the others; only events, waits and host synchronisation order it. `Streams` keeps for
each stream the work that is ordered before its next piece of work (its clock: a tick per stream). Two pieces that touch
the same bytes, one of them writing, with neither ordered before the other, are a race: a violation, whatever the run
happened to do.

Also recorded: reads by the host, which would hold it up on a GPU, and how far the host is ahead of the work that it
knows to be done. With a `LateRun` the work is late indeed: see `pipegrid.fake_nccl.virtual_streams.late`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode

from pipegrid.fake_nccl.torch_compat import (
    TorchDispatchMode,
    arguments_of,
    is_empty,
    is_view,
    name_of,
    reads_values,
    tensors_in,
    written_by,
)
from pipegrid.fake_nccl.virtual_streams.late import HostSync, LateRun
from pipegrid.fake_nccl.virtual_streams.player import Player
from pipegrid.fake_nccl.virtual_streams.virtual import VirtualEvent, VirtualStream
from pipegrid.fake_nccl.virtual_streams.work import StreamWork


class Streams(StreamWork):
    """The streams of one fake GPU, with the face of `torch.cuda`.

    - Inside `watch` every operation of the thread is work on its current stream, those of a backward included. Entries
      of the fake NCCL are work on their group's stream, after the launching stream's work so far. ``Work.wait()``
      orders the current stream after the entry, although it also holds the host.
    - Memory that is freed while another stream than its own may still use it, with no event and no ``record_stream``,
      is a race.
    - `watch` yields each point at which the host would wait for the GPU: ``.item()``, ``.tolist()``, ``.cpu()``,
      ``torch.equal``, a boolean of a tensor, ``synchronize``, a wait with a timeout.
    - Polling orders nothing, neither ``is_completed()`` nor ``query()``: what a poll happened to find, it might not
      find next time.
    - All tensors count as tensors of the GPU; threads other than the watching one are not seen.

    Args:
        violations: the list to which races are added.

    Examples:
        >>> Streams(violations=[]).current_stream().query()
        True
    """

    def Stream(self, device: Any = None, priority: int = 0) -> VirtualStream:  # noqa: N802 (torch.cuda's name)
        """A new stream."""
        del device, priority
        return self.make_stream(f"stream {len(self._names)}")

    def Event(self, **options: object) -> VirtualEvent:  # noqa: N802 (torch.cuda's name)
        """A new event."""
        return VirtualEvent(self, **options)

    def device(self, device: Any) -> AbstractContextManager[None]:
        """The one device is always the current one."""
        del device
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        """Wait on the host for every stream, those of groups with their entries."""
        del device
        self.drain()
        with self.lock:
            for clock in self._clocks.values():
                self.host_knows(clock)
            signals = [self.here(stream) for stream in self._made]
        for signal in signals:
            self._hold(signal)
        self.host_waits("synchronize", {})

    @contextmanager
    def watch(self) -> Iterator[list[HostSync]]:
        """Note every operation of this thread as work; yields the host synchronisations inside the block."""
        before = len(self.host_syncs)
        seen: list[HostSync] = []
        self._watching = threading.get_ident()
        try:
            with _Calls(self), _Operations(self):
                yield seen
        finally:
            self._watching = 0
            self.sweep()
            seen += self.host_syncs[before:]

    @contextmanager
    def run_late(self, patience: float) -> Iterator[LateRun]:
        """Watch, with a late device inside; see `pipegrid.fake_nccl.device.FakeDevice.late`."""
        with self.watch():
            player = Player(self.lock, self._violations.append, patience)
            run = self.late = LateRun(player, self.host_syncs, len(self.host_syncs))
            try:
                yield run
                self.sweep()
                player.finish()
                self.bring_back()
            finally:
                player.stop()
                self.late = None


# Reads of a tensor by the host that no operation shows.
_HOST_CALLS = frozenset({"tolist", "cpu", "numpy"})


class _Calls(TorchFunctionMode):
    """Calls that no operation shows: reads to Python values, and `record_stream`."""

    def __init__(self, streams: StreamWork) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, call: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        name, streams = getattr(call, "__name__", ""), self._streams
        if name == "record_stream":
            return streams.record_use(*args)
        if name in _HOST_CALLS and not streams.is_paused:
            here = streams.current_stream()
            clock = streams.work(here, name, reads=args[:1])
            streams.host_waits(name, clock, streams.here(here))
            if streams.late is not None and name != "cpu":
                with streams.paused():
                    return call(streams.on_device(args[0]).clone(), *args[1:], **(kwargs or {}))
        return call(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation, those of a backward included, as work on the current stream."""

    def __init__(self, streams: StreamWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        streams, kwargs, name = self._streams, kwargs or {}, name_of(operation)
        if streams.is_paused or is_view(operation):  # a view touches no memory
            return operation(*args, **kwargs)
        streams.before_compute()
        streams.sweep()
        arguments = arguments_of(operation, args, kwargs)
        waits = reads_values(operation, arguments)
        made, signal = streams.compute(operation, args, kwargs, waits=waits)
        new = tensors_in(made)
        if is_empty(operation):
            for tensor in new:
                streams.allocate(tensor)
            return made
        stream = streams.current_stream()
        written = [*written_by(operation, arguments), *new]
        clock = streams.work(stream, name, reads=tensors_in(list(arguments.values())), writes=written)
        if waits:
            streams.host_waits(name, clock, signal)
        return made
