"""Transfers that a rank starts and waits for, to and from its two neighbours, by the names of their handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from pipegrid.core.lanes import LaneSpec
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.messages.handle import Transfer

_RECEIVES = ("recv_prev", "recv_next")
# In the order in which they are started and waited for. Receives first: the first message of one should not wait behind
# a send, and the other side, too, has posted everything before it waits.
_NAMES = (*_RECEIVES, "send_next", "send_prev")
_UNTIMED: AbstractContextManager[None] = nullcontext()


def timed(timers: Any, name: str) -> AbstractContextManager[None]:
    """Run the timer ``name`` of a config's ``timers`` inside the block; None is no timers."""
    return _UNTIMED if timers is None else _running(timers, name)


class NeighbourTransfers:
    """Transfers between a rank and the next and the previous one, by name: ``send_next``, ``recv_prev``, ...

    ``specs`` has the lane of each by name, none of a neighbour that there is not; ``lacks`` makes the error of a
    transfer whose lane is not open.
    """

    def __init__(
        self, lanes: Lanes, config: P2PConfig, specs: Mapping[str, LaneSpec], lacks: Callable[[str], P2PUsageError]
    ) -> None:
        self._lanes, self._config, self._lacks = lanes, config, lacks
        self._of_name = {name: lanes[spec] for name, spec in specs.items() if spec in lanes}
        # Whether every receive is valid: dtypes are known, or agreed with the shapes, and shapes need not be given.
        known = config.pipeline_dtype is not None and config.shape_mode != "given"
        self._takes_any_receive = not config.fixed_shapes or known

    def transfer(self, label: str, name: str, value: Any) -> Any:
        """Start a transfer, or a receive of these shapes, timed as ``label``, and wait for it; what was received."""
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
        """Start an `exchange` without a wait: the payload of ``receive``, which has no data yet, and the handles."""
        with timed(self._config.timers, label):
            started = self._start_all(**parts)
            tensor = started[receive].lane.transfers.provide(started[receive]) if receive in started else None
            return tensor, started

    def _start_all(self, **parts: tuple[Any] | None) -> dict[str, Any]:
        """Start transfers, as one batch if so configured; nothing is posted before all of them are valid."""
        given = {name: part[0] for name in _NAMES if (part := parts.get(name)) is not None}
        if len(given) < 2:
            return {name: self._start(name, value) for name, value in given.items()}
        with self._lanes.batch(together=self._config.batch_p2p_comm, by_lane=self._lanes.on_device):
            return {name: self._start(name, value) for name, value in given.items()}

    def _start(self, name: str, value: Any) -> Any:
        if (lane := self._of_name.get(name)) is None:
            raise self._lacks(name)
        if name not in _RECEIVES:
            return lane.isend(value)
        if not self._takes_any_receive:
            self._require_receivable(value, name)
        return lane.irecv(value, blocking=True)

    def _require_receivable(self, shapes: Any, flag: str) -> None:
        """Raise for a receive without the dtype or shape that it needs, before anything is sent."""
        if self._config.pipeline_dtype is None:
            raise P2PUsageError(f"pipeline_dtype must be provided if {flag} is True, or variable_seq_lengths=True")
        if shapes is None:
            common = "Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            raise P2PUsageError(f"tensor_shape must be specified if {flag} is True. {common}")

    def _finish(self, transfer: Any) -> Any:
        """Wait for a transfer; the payload of a receive."""
        received = transfer.wait() if transfer.sending else transfer.result()
        if self._config.batch_p2p_sync:
            transfer.synchronize()
        return received


class NeighbourVerbs:
    """The blocking verbs to the next and the previous rank, over `NeighbourTransfers`."""

    _transfers: NeighbourTransfers

    def recv_forward(self, tensor_shapes: Any = None, is_first_stage: bool = False) -> Any:
        """Receive the next activation from the previous rank; None on the first stage.

        Args:
            tensor_shapes: one shape for one tensor, a list of shapes for a list; None takes the message as it was sent.
            is_first_stage: there is nothing to receive.

        Raises:
            P2PUsageError: there is no ``pipeline_dtype``, and dtypes are not agreed at run time; invalid or missing
                shapes; a ``placement`` or ``traffic`` without this lane.
            P2PMismatchError: another shape, dtype or structure was announced; the lane is dead on both sides.
            P2PTimeoutError: nothing came by the deadline; the lane is dead.
            P2PPeerError: the previous rank died, or ended the lane.
            P2PLaneDeadError: the lane has failed before.
        """
        return None if is_first_stage else self._transfers.transfer("forward-recv", "recv_prev", tensor_shapes)

    def recv_backward(self, tensor_shapes: Any = None, is_last_stage: bool = False) -> Any:
        """Receive the next gradient from the next rank; None on the last stage. Otherwise as `recv_forward`."""
        return None if is_last_stage else self._transfers.transfer("backward-recv", "recv_next", tensor_shapes)

    def send_forward(self, output_tensors: Any, is_last_stage: bool = False) -> None:
        """Send an activation to the next rank; nothing on the last stage.

        Args:
            output_tensors: a tensor, None, or lists, tuples and dicts of those, in ``pipeline_dtype`` where floating.
            is_last_stage: there is nothing to send.

        Raises:
            P2PUsageError: it cannot be sent as it is; nothing was sent.
            P2PMismatchError: it differs from the agreed shapes; nothing was sent, and the lane is dead on both sides.
            P2PError: otherwise, as for `recv_forward`.
        """
        if not is_last_stage:
            self._transfers.transfer("forward-send", "send_next", output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool = False) -> None:
        """Send a gradient to the previous rank; nothing on the first stage. Otherwise as `send_forward`."""
        if not is_first_stage:
            self._transfers.transfer("backward-send", "send_prev", input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any = None, is_last_stage: bool = False
    ) -> Any:
        """Send an activation to the next rank and receive a gradient from it; None on the last stage.

        Arguments and errors as for `send_forward` and `recv_forward`. Where one of the two cannot be started, neither
        is.
        """
        if is_last_stage:
            return None
        parts = {"send_next": (output_tensors,), "recv_next": (tensor_shapes,)}
        return self._transfers.exchange("forward-send-backward-recv", **parts)["recv_next"]

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any = None, is_first_stage: bool = False
    ) -> Any:
        """Send a gradient to the previous rank and receive an activation from it; None on the first stage.

        Arguments and errors as for `send_forward_recv_backward`.
        """
        if is_first_stage:
            return None
        parts = {"send_prev": (input_tensor_grads,), "recv_prev": (tensor_shapes,)}
        return self._transfers.exchange("backward-send-forward-recv", **parts)["recv_prev"]

    def send_forward_recv_forward(
        self, output_tensor: Any, recv_prev: bool, tensor_shape: Any = None, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send an activation to the next rank, and receive one from the previous rank.

        Args:
            output_tensor: None sends nothing.
            recv_prev: whether to receive.
            tensor_shape: of the received tensor.
            overlap_p2p_comm: return at once, with handles.

        Returns:
            The tensor (None without ``recv_prev``); with ``overlap_p2p_comm`` ``(tensor, handles)``, where the tensor
            holds data once ``handles["recv_prev"].wait()`` has returned; the other handle is ``"send_next"``.
        """
        parts = {"send_next": _unless_none(output_tensor), "recv_prev": (tensor_shape,) if recv_prev else None}
        if overlap_p2p_comm:
            return self._transfers.overlapped("forward-send-forward-recv", "recv_prev", **parts)
        return self._transfers.exchange("forward-send-forward-recv", **parts).get("recv_prev")

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any = None, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send a gradient to the previous rank, and receive one from the next rank.

        Arguments, result and errors as for `send_forward_recv_forward`; the handles are ``"recv_next"`` and
        ``"send_prev"``.
        """
        parts = {"send_prev": _unless_none(input_tensor_grad), "recv_next": (tensor_shape,) if recv_next else None}
        if overlap_p2p_comm:
            return self._transfers.overlapped("backward-send-backward-recv", "recv_next", **parts)
        return self._transfers.exchange("backward-send-backward-recv", **parts).get("recv_next")

    def send_forward_backward_recv_forward_backward(
        self, output_tensor: Any, input_tensor_grad: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any = None
    ) -> tuple[Any, Any]:
        """Send an activation to the next and a gradient to the previous rank, and receive one of each.

        Returns:
            ``(activation, gradient)``, each None where it is not received.
        """
        received = self._transfers.exchange(
            "forward-backward-send-forward-backward-recv",
            send_next=_unless_none(output_tensor),
            send_prev=_unless_none(input_tensor_grad),
            recv_prev=(tensor_shape,) if recv_prev else None,
            recv_next=(tensor_shape,) if recv_next else None,
        )
        return received.get("recv_prev"), received.get("recv_next")


def _unless_none(value: Any) -> tuple[Any] | None:
    return None if value is None else (value,)


@contextmanager
def _running(timers: Any, name: str) -> Iterator[None]:
    timers(name, log_level=2).start()
    try:
        yield
    finally:
        timers(name).stop()
