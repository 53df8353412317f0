"""Streams and events without a GPU, with the interface of `torch.cuda`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from pipegrid.testing.fake_nccl.player import DONE

if TYPE_CHECKING:
    from pipegrid.testing.fake_nccl.memory import Clock
    from pipegrid.testing.fake_nccl.streams import Streams

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
    """An event: a stream's work up to a point."""

    def __init__(self, streams: Streams, **_: object) -> None:
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
