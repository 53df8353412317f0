"""Operations of a thread as work on its current stream, caught by torch's modes for functions and dispatch."""

from __future__ import annotations

from collections.abc import Sequence
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
from pipegrid.fake_nccl.virtual_streams.work import StreamWork

# Reads of a tensor by the host that no operation shows.
_HOST_CALLS = frozenset({"tolist", "cpu", "numpy"})


class UndispatchedCalls(TorchFunctionMode):
    """Calls that no operation shows: reads to Python values, and `record_stream`."""

    def __init__(self, streams: StreamWork) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, call: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(call, "__name__", "")
        if name == "record_stream":
            self._streams.record_use(*args)
            return None
        streams = self._streams
        if name in _HOST_CALLS and not streams.is_paused:
            here = streams.current_stream()
            clock = streams.work(here, name, reads=args[:1])
            streams.host_waits(name, clock, streams.here(here))
            if streams.late is not None and name != "cpu":
                with streams.paused():
                    return call(streams.on_device(args[0]).clone(), *args[1:], **(kwargs or {}))
        return call(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
