"""Transfers that a rank starts and waits for, to and from its two neighbours, by the names of their handles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.edge import Direction
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.messages.handle import Transfer
from pipegrid.transport.pipeline_lanes import direction_lane, pipeline_lanes

_RECEIVES = ("recv_prev", "recv_next")
# In the order in which they are started and waited for. Receives first: the other side, too, has posted everything
# before it waits, and the first message of a receive should not wait behind a send.
_NAMES = (*_RECEIVES, "send_next", "send_prev")
_UNTIMED: AbstractContextManager[None] = nullcontext()


def timed(timers: Any, name: str) -> AbstractContextManager[None]:
    """The timer ``name`` of ``timers`` (see `P2PConfig`) runs inside the block; None is no timers."""
    return _UNTIMED if timers is None else _running(timers, name)


class NeighbourTransfers:
    """Transfers between a rank and the next and the previous one, by name: ``send_next``, ``recv_prev``, ...

    Args:
        lanes: this rank's.
        config: of the communicator.
        ranks: the ranks of the pipeline, in order; cyclic.
        place: this rank's place among them.
        placement: rank in the group of each stage; None where stages are cyclic.
    """

    def __init__(
        self, lanes: Lanes, config: P2PConfig, *, ranks: Sequence[int], place: int, placement: Sequence[int] | None
    ) -> None:
        self._lanes, self._config, self._ranks, self._placement = lanes, config, ranks, placement
        before, here, after = ranks[place - 1], ranks[place], ranks[(place + 1) % len(ranks)]
        self._specs = {
            "recv_prev": direction_lane(before, here, Direction.FORWARD),
            "recv_next": direction_lane(here, after, Direction.BACKWARD),
            "send_next": direction_lane(here, after, Direction.FORWARD),
            "send_prev": direction_lane(before, here, Direction.BACKWARD),
        }
        self._of_name = {name: lanes[spec] for name, spec in self._specs.items() if spec in lanes}
        # Whether every receive is valid: dtypes are known, or agreed with the shapes, and shapes need not be given.
        mode = config.shape_mode
        known = config.pipeline_dtype is not None and mode != "given"
        self._takes_any_receive = mode in ("header", "learned", "manifest") or known

    def transfer(self, label: str, name: str, value: Any) -> Any:
        """Start a transfer of a payload, or a receive of these shapes, and wait for it; the payload of a receive.

        ``label`` is the name of its timer.
        """
        if self._config.timers is None:  # an empty context is a part of a small message's latency
            return self._finish(self._start(name, value))
        with timed(self._config.timers, label):
            return self._finish(self._start(name, value))

    def exchange(self, label: str, /, **parts: tuple[Any] | None) -> dict[str, Any]:
        """Start transfers, each given as a one-tuple of its value, and wait for them; the payloads of the receives."""
        with timed(self._config.timers, label):
            started = self._start_all(**parts)
            return {name: self._finish(started[name]) for name in _NAMES if name in started}

    def overlapped(self, label: str, receive: str, /, **parts: tuple[Any] | None) -> tuple[Any, dict[str, Transfer]]:
        """As `exchange`, without a wait: the payload of ``receive``, which has no data yet, and the handles."""
        with timed(self._config.timers, label):
            started = self._start_all(**parts)
            tensor = started[receive].lane.transfers.provide(started[receive]) if receive in started else None
            return tensor, started

    def _start_all(self, **parts: tuple[Any] | None) -> dict[str, Any]:
        """Start transfers; as one batch, if so configured.

        Nothing is posted before all of them are known to be valid, as one batch or not.
        """
        given = {name: part[0] for name in _NAMES if (part := parts.get(name)) is not None}
        if len(given) < 2:
            return {name: self._start(name, value) for name, value in given.items()}
        with self._lanes.batch(together=self._config.batch_p2p_comm, by_lane=self._lanes.on_device):
            return {name: self._start(name, value) for name, value in given.items()}

    def _start(self, name: str, value: Any) -> Any:
        lane = self._of_name.get(name)
        if lane is None:
            spec = self._specs[name]
            left_out = spec in pipeline_lanes(self._ranks, placement=self._placement)
            why = (
                "the argument traffic left out, or communicators"
                if left_out
                else f"the placement {self._placement} does not have"
            )
            raise P2PUsageError(f"{name} needs lane {spec}, which {why}; isend and irecv take an edge")
        if name not in _RECEIVES:
            return lane.isend(value)
        if not self._takes_any_receive:
            self._require_receivable(value, name)
        return lane.irecv(value, attended=True)

    def _require_receivable(self, shapes: Any, flag: str) -> None:
        """Raise for a receive without the dtype or shape that it needs, before anything is sent."""
        if self._config.pipeline_dtype is None:
            raise P2PUsageError(f"pipeline_dtype must be provided if {flag} is True, or variable_seq_lengths=True")
        if shapes is None:
            common = "Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            raise P2PUsageError(f"tensor_shape must be specified if {flag} is True. {common}")

    def _finish(self, transfer: Any) -> Any:
        """Wait for a transfer; the payload of a receive."""
        received = None
        if transfer.sending:
            transfer.wait()
        else:
            received = transfer.result()
        if self._config.batch_p2p_sync:
            transfer.synchronize()
        return received


@contextmanager
def _running(timers: Any, name: str) -> Iterator[None]:
    timers(name, log_level=2).start()
    try:
        yield
    finally:
        timers(name).stop()
