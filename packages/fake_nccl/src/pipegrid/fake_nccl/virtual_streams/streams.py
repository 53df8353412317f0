"""Virtual streams: what a GPU is free to reorder, found by vector clocks while everything runs in order on a CPU.

A CUDA stream runs late and beside the others; only events, waits and host synchronisation order it. `Streams` has the
face of `torch.cuda` for streams and events, and keeps for each stream the work that is ordered before its next piece of
work (its clock: a tick per stream). Inside `Streams.watch` every operation on tensors is a piece of work on the current
stream. Two pieces that touch the same bytes, one of them writing, with neither ordered before the other, are a race:
a violation, whatever the run happened to do. Entries of the fake NCCL are work on their group's stream.

Also recorded: reads by the host, which would hold it up on a GPU, and how far the host is ahead of the work that it
knows to be done. With a `LateRun` the work is late indeed: see `pipegrid.fake_nccl.virtual_streams.late`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pipegrid.fake_nccl.virtual_streams.host_syncs import HostSync
from pipegrid.fake_nccl.virtual_streams.late import LateRun
from pipegrid.fake_nccl.virtual_streams.player import Player
from pipegrid.fake_nccl.virtual_streams.virtual import VirtualEvent, VirtualStream
from pipegrid.fake_nccl.virtual_streams.watching import Operations, UndispatchedCalls
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
            clocks = [dict(clock) for clock in self._clocks.values()]
            signals = [self.here(stream) for stream in self._made]
        for clock in clocks:
            self.host_knows(clock)
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
            with UndispatchedCalls(self), Operations(self):
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
