"""Activations and gradients as dicts by module: one entry per incoming edge, one per module that sends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import frozen

from pipegrid.bridges.bridge.structure import in_words
from pipegrid.bridges.errors import MissingTensorError
from pipegrid.bridges.multimodule.edges import EdgesThere
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard.errors import ShapeError
from pipegrid.transport import Handle, ReceiveHandle
from pipegrid.transport.messages.trees import mapped

Tensors: TypeAlias = dict[str, Any]


@frozen
class DictExchange:
    """The sends and receives of all modules on ``rank``, for dicts by module.

    Attributes:
        ends: per module, in the order of the graph, the edges that feed its stage and those that it feeds, each with
            the module at its other end.
        with_backward: the edges of the job along which gradients return.
        isend, irecv: of the communicator, by edge and direction.
    """

    rank: int
    ends: dict[str, tuple[EdgesThere, EdgesThere]]
    with_backward: Collection[Edge]
    isend: Callable[..., Handle]
    irecv: Callable[..., ReceiveHandle]

    def receive_forward(self, shapes: Any) -> dict[str, list[ReceiveHandle]]:
        """Start receiving the inputs of this rank's modules, by source module."""
        found: dict[str, list[ReceiveHandle]] = {}
        for name, (incoming, _) in self.ends.items():
            for edge, source in incoming:
                expected = _shape(shapes, source, inside=source == name)
                found[source] = [self.irecv(edge=edge, direction=Direction.FORWARD, shapes=expected)]
        return found

    def receive_backward(self, shapes: Any) -> dict[str, list[ReceiveHandle]]:
        """Start receiving the gradients of the outputs of this rank's modules, one for each destination."""
        found: dict[str, list[ReceiveHandle]] = {}
        for name, (_, outgoing) in reversed(self.ends.items()):
            for edge, destination in outgoing:
                if edge in self.with_backward:
                    expected = _shape(shapes, name, inside=destination == name)
                    handle = self.irecv(edge=edge, direction=Direction.BACKWARD, shapes=expected)
                    found.setdefault(name, []).append(handle)
        return found

    def send_forward(self, outputs: Tensors) -> list[Handle]:
        """Start sending every module's output to all modules that it feeds."""
        self._check_entries(outputs, {name for name, (_, outgoing) in self.ends.items() if outgoing}, set(self.ends))
        return [
            self.isend(outputs[name], edge=edge, direction=Direction.FORWARD)
            for name, (_, outgoing) in self.ends.items()
            for edge, _ in outgoing
        ]

    def send_backward(self, grads: Tensors) -> list[Handle]:
        """Start sending the gradients of received activations."""
        incoming = [one for into, _ in self.ends.values() for one in into]
        needed = {source for edge, source in incoming if edge in self.with_backward}
        self._check_entries(grads, needed, {source for _, source in incoming})
        # The nearest module first: a farther one may wait for what the nearer one makes of its gradient.
        return [
            self.isend(grads[source], edge=edge, direction=Direction.BACKWARD)
            for edge, source in reversed(incoming)
            if edge in self.with_backward
        ]

    def _check_entries(self, tensors: Tensors, needed: set[str], known: set[str]) -> None:
        if not isinstance(tensors, Mapping):
            raise ShapeError(f"a multi-module communicator exchanges dicts by module name, got {in_words(tensors)}")
        if not needed <= set(tensors) <= known:
            raise MissingTensorError(
                f"rank {self.rank} has tensors for {list(tensors)}; it needs {sorted(needed)} of {sorted(known)}"
            )


def added(gradients: Sequence[Any]) -> Any:
    """The sum of gradients of one payload, leaf by leaf, over the edges that have the leaf's; None where none has."""
    given = [gradient for gradient in gradients if gradient is not None]
    return mapped(_sum, *given) if given else None


def _sum(*gradients: torch.Tensor | None) -> Any:
    given = [gradient.detach() for gradient in gradients if gradient is not None]
    return sum(given) if given else None


def _shape(shapes: Any, name: str, *, inside: bool = False) -> Any:
    """The expected shape of one entry: of a dict its own; one shape is for stages inside of modules."""
    if isinstance(shapes, Mapping):
        return shapes.get(name)
    return shapes if inside else None


Shape: TypeAlias = list[int] | torch.Size
"""The shape of one tensor, as the verbs of communicators take it."""

Tensor2dOr3d: TypeAlias = torch.Tensor | list[torch.Tensor] | None


def _prepare_tensor_for_comm(tensor: Tensor2dOr3d) -> Tensor2dOr3d:
    """Expand a 2-d tensor to 3-d with a last axis of size 1; lists element by element, anything else as it is."""
    return _each(tensor, lambda t: t.unsqueeze(-1) if t.ndim == 2 else t)


def _restore_tensor_from_comm(tensor: Tensor2dOr3d) -> Tensor2dOr3d:
    """Undo `_prepare_tensor_for_comm`: drop a last axis of size 1 of a 3-d tensor.

    A tensor that had the shape ``[a, b, 1]`` before cannot be told from an expanded one, and loses its axis.
    """
    return _each(tensor, lambda t: t.squeeze(-1) if t.ndim == 3 and t.shape[-1] == 1 else t)


def _each(tensor: Tensor2dOr3d, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensor2dOr3d:
    if tensor is None:
        return None
    return [change(part) for part in tensor] if isinstance(tensor, list) else change(tensor)
