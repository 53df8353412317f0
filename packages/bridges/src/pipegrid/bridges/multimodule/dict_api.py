"""Activations and gradients as dicts by module: one entry per incoming edge, one per module that sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import frozen

from pipegrid.bridges.bridge.structure import kind_of
from pipegrid.bridges.errors import MissingTensorError, ShapeError
from pipegrid.bridges.multimodule.rank_modules import ModuleChain, RankModuleInfo
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.edge import Direction, Edge
from pipegrid.transport.protocol import Handle, ReceiveHandle

Tensors: TypeAlias = dict[str, Any]


@frozen
class DictExchange:
    """Starts the sends and receives of all modules on ``rank``: its ``infos`` and ``chains``, by module.

    ``has_backward`` says of each module of the job whether gradients come back to it.
    """

    rank: int
    infos: dict[str, RankModuleInfo]
    chains: Mapping[str, ModuleChain]
    has_backward: Mapping[str, bool]

    def receive_forward(self, shapes: Any) -> dict[str, list[ReceiveHandle]]:
        """Start receiving the inputs of this rank's modules, by source module."""
        found: dict[str, list[ReceiveHandle]] = {}
        for name, info in self.infos.items():
            if info.pp_rank > 0:
                edge = Edge(info.pp_rank - 1, info.pp_rank)
                found[name] = [
                    self.chains[name].irecv(
                        edge=edge, direction=Direction.FORWARD, shapes=_shape(shapes, name, inside=True)
                    )
                ]
            for bridge in info.bridge_comms_as_dest_module or ():
                source = bridge.src_module_name
                handle = bridge.irecv_forward(_shape(shapes, source))
                found[source] = [] if handle is None else [handle]
        return found

    def receive_backward(self, shapes: Any) -> dict[str, list[ReceiveHandle]]:
        """Start receiving the gradients of the outputs of this rank's modules, one for each destination."""
        found: dict[str, list[ReceiveHandle]] = {}
        for name, info in reversed(self.infos.items()):
            if not self.has_backward[name]:
                continue
            if info.pp_rank < info.pp_size - 1:
                edge = Edge(info.pp_rank, info.pp_rank + 1)
                found[name] = [
                    self.chains[name].irecv(
                        edge=edge, direction=Direction.BACKWARD, shapes=_shape(shapes, name, inside=True)
                    )
                ]
            for bridge in info.bridge_comms_as_src_module or ():
                if bridge.backward:
                    handle = bridge.irecv_backward(_shape(shapes, name))
                    found.setdefault(name, []).extend([] if handle is None else [handle])
        return found

    def send_forward(self, outputs: Tensors) -> list[Handle]:
        """Start sending every module's output to all modules that it feeds."""
        sending: list[Handle] = []
        self._check_entries(
            outputs,
            {name for name, info in self.infos.items() if not info.is_terminal_stage},
            set(self.infos),
        )
        for name, info in self.infos.items():
            if info.pp_rank < info.pp_size - 1:
                edge = Edge(info.pp_rank, info.pp_rank + 1)
                sending.append(self.chains[name].isend(outputs[name], edge=edge, direction=Direction.FORWARD))
            for bridge in info.bridge_comms_as_src_module or ():
                handle = bridge.isend_forward(outputs[name])
                sending += [] if handle is None else [handle]
        return sending

    def send_backward(self, grads: Tensors) -> list[Handle]:
        """Start sending the gradients of received activations."""
        sending: list[Handle] = []
        needed, known = set(), set()
        for name, info in self.infos.items():
            if info.pp_rank > 0:
                known.add(name)
                needed |= {name} if self.has_backward[name] else set()
            for bridge in info.bridge_comms_as_dest_module or ():
                known.add(bridge.src_module_name)
                needed |= {bridge.src_module_name} if bridge.backward else set()
        self._check_entries(grads, needed, known)
        for name, info in reversed(self.infos.items()):
            if name in needed and info.pp_rank > 0:
                edge = Edge(info.pp_rank - 1, info.pp_rank)
                sending.append(self.chains[name].isend(grads[name], edge=edge, direction=Direction.BACKWARD))
            # The nearest module first: a farther one may wait for what the nearer one makes of its gradient.
            for bridge in reversed(info.bridge_comms_as_dest_module or ()):
                if bridge.backward:
                    handle = bridge.isend_backward(grads[bridge.src_module_name])
                    sending += [] if handle is None else [handle]
        return sending

    def _check_entries(self, tensors: Tensors, needed: set[str], known: set[str]) -> None:
        if not isinstance(tensors, Mapping):
            raise ShapeError(f"a multi-module communicator exchanges dicts by module name, got {kind_of(tensors)}")
        if not needed <= set(tensors) <= known:
            raise MissingTensorError(
                f"rank {self.rank} has tensors for {list(tensors)}; it needs {sorted(needed)} of {sorted(known)}"
            )


def exchanged(
    lanes: Lanes,
    send: Callable[[], list[Handle]] | None,
    receive: Callable[[], Mapping[str, Sequence[ReceiveHandle]]] | None,
) -> Tensors:
    """The payloads that ``receive`` starts to receive, by name, once what ``send`` starts is on its way, too.

    Several gradients of one output are summed.
    """
    # In the order of calls both sides of an exchange would send first; sends alone keep the order of modules.
    with lanes.batch(by_lane=send is not None and receive is not None):
        sending = [] if send is None else send()
        receiving = {} if receive is None else receive()
    received: Tensors = {}
    for name, handles in receiving.items():
        parts = [handle.result() for handle in handles]
        if len(parts) > 1:
            received[name] = _added(parts)
        elif parts:
            received[name] = parts[0]
    for handle in sending:
        handle.wait()
    return received


def _added(parts: Sequence[Any]) -> Any:
    """The sum of gradients of one payload, leaf by leaf; None where the leaf has none."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return sum(part.detach() for part in parts)
    if isinstance(first, dict):
        return {key: _added([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_added(items) for items in zip(*parts, strict=True))
    return None


def _shape(shapes: Any, name: str, *, inside: bool = False) -> Any:
    """The expected shape of one entry: of a dict its own; one shape is for stages inside of modules."""
    if isinstance(shapes, Mapping):
        return shapes.get(name)
    return shapes if inside else None


Tensor2dOr3d: TypeAlias = torch.Tensor | list[torch.Tensor] | None


def _prepare_tensor_for_comm(tensor: Tensor2dOr3d) -> Tensor2dOr3d:
    """Expand a 2-d tensor to 3-d with a last axis of size 1.

    Lists element by element, anything else as it is.
    """
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
