"""The familiar face: the verbs of a pipeline stage, over lanes to the next and from the previous rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from pipegrid.transport.edge import Direction
from pipegrid.transport.edge_lanes import EdgeLanes
from pipegrid.transport.errors import P2PConfigError, P2PUsageError
from pipegrid.transport.handle import Transfer
from pipegrid.transport.lane import Lane
from pipegrid.transport.spec import LaneSpec

_RECEIVES = ("recv_prev", "recv_next")
# In the order in which they are started and waited for. Receives first: on the other side, too, everything was posted
# before anybody waits, and what a receive has to do for its first message should not wait behind a send.
_NAMES = (*_RECEIVES, "send_next", "send_prev")
_UNTIMED: AbstractContextManager[None] = nullcontext()


class P2PCommunicator(EdgeLanes):
    """Point-to-point traffic between the stages of one pipeline.

    Stage ``s`` lies on rank ``s % P`` of the group's ``P`` ranks, so neighbours are cyclic: the last rank's next
    one is the first, which interleaved and U-shaped pipelines use. Activations and gradients between the same
    two ranks travel on lanes of their own and cannot be taken for each other.

    All ranks of the group construct it together, with equal arguments; every lane has then carried a message.

    Args:
        pp_group: the ranks of the pipeline, in order; None is the whole world.
        config: a `P2PConfig`, or any object with some of its attributes; read once, here.
        placement: rank in the group of each stage, where it is not cyclic (a V: ``(0, 1, 2, 3, 3, 2, 1, 0)``).
        tensor_shape: the one shape of all messages, in ``pipeline_dtype``: compared between neighbours now, so
            that no message ever needs a header.
        device: where tensors live; None is what the group's backend implies.

    Raises:
        P2PConfigError: settings that contradict each other, the group or the device; or a group that this rank is
            not in.
        LaneSpecError: a placement with fewer than two stages, or an index that the group does not have.
        P2PMismatchError: the ranks were given different settings.
        P2PTimeoutError: a rank did not come.
    """

    # The blocking verbs

    def recv_forward(self, tensor_shapes: Any = None, is_first_stage: bool = False) -> Any:
        """Receive the next activation from the previous rank; None on the first stage.

        Args:
            tensor_shapes: one shape for one tensor, a list of shapes for a list; None takes what is announced.
            is_first_stage: there is nothing to receive.

        Raises:
            P2PConfigError: there is no ``pipeline_dtype``, and dtypes are not agreed on at run time.
            P2PUsageError: shapes that are no shapes, or missing where they must be given; a flag neither True nor
                False; or a ``placement`` without this traffic.
            P2PMismatchError: another shape, dtype or structure was announced; the lane is dead on both sides.
            P2PTimeoutError: nothing came by the deadline; the lane is dead.
            P2PPeerError: the previous rank died, or gave the lane up.
            P2PLaneDeadError: the lane has failed before.
        """
        if _is("is_first_stage", is_first_stage):
            return None
        self._require_receivable(tensor_shapes, "recv_prev")
        return self._transfer("forward-recv", "recv_prev", tensor_shapes)

    def recv_backward(self, tensor_shapes: Any = None, is_last_stage: bool = False) -> Any:
        """Receive the next gradient from the next rank; None on the last stage.

        Arguments and errors as for `recv_forward`.
        """
        if _is("is_last_stage", is_last_stage):
            return None
        self._require_receivable(tensor_shapes, "recv_next")
        return self._transfer("backward-recv", "recv_next", tensor_shapes)

    def send_forward(self, output_tensors: Any, is_last_stage: bool = False) -> None:
        """Send an activation to the next rank; nothing on the last stage.

        Args:
            output_tensors: a tensor, None, or lists, tuples and dicts of those, in ``pipeline_dtype`` where floating.
            is_last_stage: there is nothing to send.

        Raises:
            P2PPayloadError: something in it cannot be sent as it is; nothing was sent.
            P2PMismatchError: it is not what was agreed on; nothing was sent, and the lane is dead on both sides.
            P2PError: otherwise, as for `recv_forward`.
        """
        if not _is("is_last_stage", is_last_stage):
            self._transfer("forward-send", "send_next", output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool = False) -> None:
        """Send a gradient to the previous rank; nothing on the first stage.

        Arguments and errors as for `send_forward`.
        """
        if not _is("is_first_stage", is_first_stage):
            self._transfer("backward-send", "send_prev", input_tensor_grads)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any = None, is_last_stage: bool = False
    ) -> Any:
        """Send an activation to the next rank and receive a gradient from it; None on the last stage.

        Arguments and errors as for `send_forward` and `recv_forward`. A payload that cannot be sent keeps the receive
        from being posted, too, and shapes that cannot be received keep the payload.
        """
        if _is("is_last_stage", is_last_stage):
            return None
        self._require_receivable(tensor_shapes, "recv_next")
        with self._timed("forward-send-backward-recv"):
            return self._exchange(send_next=(output_tensors,), recv_next=(tensor_shapes,))["recv_next"]

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any = None, is_first_stage: bool = False
    ) -> Any:
        """Send a gradient to the previous rank and receive an activation from it; None on the first stage.

        Arguments and errors as for `send_forward_recv_backward`.
        """
        if _is("is_first_stage", is_first_stage):
            return None
        self._require_receivable(tensor_shapes, "recv_prev")
        with self._timed("backward-send-forward-recv"):
            return self._exchange(send_prev=(input_tensor_grads,), recv_prev=(tensor_shapes,))["recv_prev"]

    def send_forward_recv_forward(
        self,
        output_tensor: Any,
        recv_prev: bool,
        tensor_shape: Any = None,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send an activation on, and receive one from the previous rank.

        Args:
            output_tensor: None sends nothing.
            recv_prev: whether to receive.
            tensor_shape: of what is received.
            overlap_p2p_comm: return at once, with handles.

        Returns:
            The tensor (None without ``recv_prev``); with ``overlap_p2p_comm`` ``(tensor, handles)``, where the
            tensor holds data once ``handles["recv_prev"].wait()`` returned, and ``"send_next"`` is the other.

        Raises:
            P2PError: as for `send_forward_recv_backward`.
        """
        if _is("recv_prev", recv_prev):
            self._require_receivable(tensor_shape, "recv_prev")
        parts = {
            "send_next": None if output_tensor is None else (output_tensor,),
            "recv_prev": (tensor_shape,) if recv_prev else None,
        }
        with self._timed("forward-send-forward-recv"):
            if _is("overlap_p2p_comm", overlap_p2p_comm):
                return self._overlapped("recv_prev", **parts)
            return self._exchange(**parts).get("recv_prev")

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        recv_next: bool,
        tensor_shape: Any = None,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient back, and receive one from the next rank.

        Arguments, result and errors as for `send_forward_recv_forward`; the handles are ``"recv_next"`` and
        ``"send_prev"``.
        """
        if _is("recv_next", recv_next):
            self._require_receivable(tensor_shape, "recv_next")
        parts = {
            "send_prev": None if input_tensor_grad is None else (input_tensor_grad,),
            "recv_next": (tensor_shape,) if recv_next else None,
        }
        with self._timed("backward-send-backward-recv"):
            if _is("overlap_p2p_comm", overlap_p2p_comm):
                return self._overlapped("recv_next", **parts)
            return self._exchange(**parts).get("recv_next")

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any = None,
    ) -> tuple[Any, Any]:
        """Send an activation on and a gradient back, and receive one of each.

        Returns:
            ``(activation, gradient)``, each None where it is not received.

        Raises:
            P2PError: as for `send_forward_recv_backward`.
        """
        for wanted, name in ((recv_prev, "recv_prev"), (recv_next, "recv_next")):
            if _is(name, wanted):
                self._require_receivable(tensor_shape, name)
        with self._timed("forward-backward-send-forward-backward-recv"):
            received = self._exchange(
                send_next=None if output_tensor is None else (output_tensor,),
                send_prev=None if input_tensor_grad is None else (input_tensor_grad,),
                recv_prev=(tensor_shape,) if recv_prev else None,
                recv_next=(tensor_shape,) if recv_next else None,
            )
        return received.get("recv_prev"), received.get("recv_next")

    # Under them: transfers by the names of their handles

    def _transfer(self, label: str, name: str, value: Any) -> Any:
        """One transfer from its start to its end; what it received, if it is a receive."""
        if self.config.timers is None:  # of a small message's latency, a context that does nothing is a part as well
            return self._finish(self._start(name, value))
        with self._timed(label):
            return self._finish(self._start(name, value))

    def _exchange(self, **parts: tuple[Any] | None) -> dict[str, Any]:
        """Start what is given and wait for it; the payloads of the receives."""
        started = self._start_all(**parts)
        return {name: self._finish(started[name]) for name in _NAMES if name in started}

    def _overlapped(self, receive: str, **parts: tuple[Any] | None) -> tuple[Any, dict[str, Transfer]]:
        started = self._start_all(**parts)
        tensor = started[receive].lane.provide(started[receive]) if receive in started else None
        return tensor, started

    def _start_all(self, **parts: tuple[Any] | None) -> dict[str, Any]:
        """Start what is given, each a one-tuple of the payload or the shapes; as one batch, if so configured.

        Not as one batch, either, is anything posted before everything is known to be sound.
        """
        given = {name: part[0] for name in _NAMES if (part := parts.get(name)) is not None}
        if len(given) < 2:
            return {name: self._start(name, value) for name, value in given.items()}
        with self.lanes.batch(together=self.config.batch_p2p_comm):
            return {name: self._start(name, value) for name, value in given.items()}

    def _start(self, name: str, value: Any) -> Any:
        lane = self._of_name.get(name)
        if lane is None:
            spec = self._spec(name)
            raise P2PUsageError(
                f"the placement {self._placement} has no {spec.label} traffic from rank {spec.source} to "
                f"{spec.destination}; use isend and irecv with an edge"
            )
        return lane.irecv(value, attended=True) if name in _RECEIVES else lane.isend(value)

    def _finish(self, transfer: Any) -> Any:
        """Wait for a transfer; what it received, if it is a receive."""
        received = None
        if transfer.sending:
            transfer.wait()
        else:
            received = transfer.result()
        if self.config.batch_p2p_sync:
            transfer.synchronize()
        return received

    @cached_property
    def _of_name(self) -> dict[str, Lane]:
        """The lanes to and from both neighbours, as far as the placement has them."""
        specs = {name: self._spec(name) for name in _NAMES}
        return {name: self.lanes[spec] for name, spec in specs.items() if spec in self.lanes}

    def _spec(self, name: str) -> LaneSpec:
        me, following, previous = self.rank, self.next_rank, self.prev_rank
        source, destination, direction = {
            "recv_prev": (previous, me, Direction.FORWARD),
            "recv_next": (following, me, Direction.BACKWARD),
            "send_next": (me, following, Direction.FORWARD),
            "send_prev": (me, previous, Direction.BACKWARD),
        }[name]
        return LaneSpec(source, destination, direction.name.lower())

    def _require_receivable(self, shapes: Any, flag: str) -> None:
        """The errors of a receive that lacks what it needs, before anything is sent."""
        if self._takes_any_receive:
            return
        if self.config.pipeline_dtype is None:
            subject = "pipeline_dtype" if flag == "recv_prev" else "dtype"
            raise P2PConfigError(
                f"{subject} must be provided if {flag} is True: set pipeline_dtype in the config, or "
                f"variable_seq_lengths=True to agree on dtypes at run time"
            )
        if shapes is None:
            raise P2PUsageError(
                f"tensor_shape must be specified if {flag} is True. "
                f"Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
            )

    @cached_property
    def _takes_any_receive(self) -> bool:
        """Whether nothing can be lacking: dtypes are agreed with the shapes, or known, and shapes need not be given."""
        mode = self.config.shape_mode
        return mode in ("header", "manifest") or (self.config.pipeline_dtype is not None and mode != "given")

    def _timed(self, name: str) -> AbstractContextManager[None]:
        timers = self.config.timers
        return _UNTIMED if timers is None else _running(timers, name)


@contextmanager
def _running(timers: Any, name: str) -> Iterator[None]:
    timers(name, log_level=2).start()
    try:
        yield
    finally:
        timers(name).stop()


def _is(name: str, value: Any) -> bool:
    """A flag that a caller gave, if it is one: a text such as "no" would be taken for True."""
    if value is True or value is False:
        return bool(value)
    raise P2PUsageError(f"{name} is {value!r}; it must be True or False")
