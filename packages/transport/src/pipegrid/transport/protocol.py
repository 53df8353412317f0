"""The interface between schedules and communicators: six blocking verbs, and asynchronous sends along edges.

`P2PCommunicator` (one module) and `MultiModulePipelineCommunicator` (several) satisfy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from pipegrid.core.edge import Direction, Edge

Payload: TypeAlias = Any
"""A tensor, None, or a list, tuple or dict of payloads. The received payload has the structure of the sent one."""


@runtime_checkable
class Handle(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is done (on CUDA: when the current stream is ordered after it).

        May be called any number of times. ``timeout``: seconds; None is the deadline of the lane.

        Raises:
            P2PTimeoutError: not done by the deadline.
            P2PMismatchError: the two sides disagree about the message.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return at once; needs no earlier `wait` and waits for no transfer."""


@runtime_checkable
class ReceiveHandle(Handle, Protocol):
    """A receive under way."""

    def result(self) -> Payload:
        """Wait, then the received payload: fresh tensors; floating-point ones require grad."""


@runtime_checkable
class ReusableReceive(ReceiveHandle, Protocol):
    """A receive whose buffers can take another message."""

    def release(self) -> None:
        """Give the buffers back: the payload, and views of it, may hold another message from now on."""


@runtime_checkable
class PipelineCommunicator(Protocol):
    """Traffic between neighbouring stages. Shapes are optional unless the communicator was opened with ``"given"``.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with P2PCommunicator(dist.group.WORLD) as communicator:
        ...     isinstance(communicator, PipelineCommunicator), communicator.is_pp_first_stage
        (True, True)
    """

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank holds a first stage of the whole pipeline."""

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank holds a last stage of the whole pipeline."""

    @property
    def total_stages(self) -> int:
        """Stages on the longest path of the whole pipeline."""

    @property
    def current_stage(self) -> int:
        """This rank's place on that path, from 0."""

    def isend(self, payload: Payload, *, edge: Edge, direction: Direction) -> Handle:
        """Start sending along ``edge`` (forward) or against it (backward)."""

    def irecv(
        self, *, edge: Edge, direction: Direction, shapes: Sequence[Sequence[int]] | Sequence[int] | None = None
    ) -> ReceiveHandle:
        """Start receiving the next message of that lane."""

    def batch(self) -> AbstractContextManager[None]:
        """Start the sends and receives of the block as one simultaneous batch."""

    def recv_forward(self, tensor_shapes: Any = None, is_first_stage: bool = False) -> Payload:
        """Receive the next activation; None on a first stage."""

    def recv_backward(self, tensor_shapes: Any = None, is_last_stage: bool = False) -> Payload:
        """Receive the next gradient; None on a last stage."""

    def send_forward(self, output_tensors: Payload, is_last_stage: bool = False) -> None:
        """Send an activation to the next stage; nothing on a last stage."""

    def send_backward(self, input_tensor_grads: Payload, is_first_stage: bool = False) -> None:
        """Send a gradient to the previous stage; nothing on a first stage."""

    def send_forward_recv_backward(
        self, output_tensors: Payload, tensor_shapes: Any = None, is_last_stage: bool = False
    ) -> Payload:
        """Send an activation to the next stage and receive a gradient from it."""

    def send_backward_recv_forward(
        self, input_tensor_grads: Payload, tensor_shapes: Any = None, is_first_stage: bool = False
    ) -> Payload:
        """Send a gradient to the previous stage and receive an activation from it."""
