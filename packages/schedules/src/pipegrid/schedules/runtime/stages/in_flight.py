"""What a stage holds of its pieces (microbatches, or slices of them) between a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from attrs import define, field
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipegrid.autograd import WeightHalf, input_path_of, require_splittable
from pipegrid.core.edge import Edge
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.offload import Offload
from pipegrid.schedules.runtime.stages.payloads import flatten, piece_name
from pipegrid.schedules.runtime.stages.slices import Kept, Slice
from pipegrid.schedules.runtime.stages.stage import RuntimeStage, check_loss, modules_of, trainable
from pipegrid.transport.protocol import Payload


class GradRoot(NamedTuple):
    """The start of a backward: the graph edge and the shape of an output whose tensor may be gone."""

    edge: GradientEdge
    shape: torch.Size


class InFlight(NamedTuple):
    """A piece between its forward and its backward: the start and the end of the backward.

    Without the outputs: the graph keeps those that it needs, and the others go after their send.
    """

    inputs: Sequence[Payload]  # per edge that carries a gradient back, what has come along it
    roots: Sequence[Sequence[GradRoot | None]]  # per edge by which a gradient comes, the starts in what left along it
    loss: torch.Tensor | None
    part: Slice | None = None

    def starts(self) -> list[GradientEdge]:
        """Where the backward enters the graph: at the outputs, and at the loss."""
        edges = [root.edge for part in self.roots for root in part if root is not None]
        if self.loss is not None and self.loss.requires_grad:
            edges.append(get_gradient_edge(self.loss))
        return edges


@define(eq=False)
class ActivationsInFlight:
    """The pieces of stage ``number`` whose forward has run and whose backward has not, and what they keep.

    ``suspected``: an earlier step had outputs with a graph, and the last one none: its next forward is watched, and
    ``ran`` is a parameter to train of a module that runs there.
    """

    number: int
    stage: RuntimeStage
    num_pieces: int  # forwards of a step
    num_slices: int
    gradient_edges: Sequence[Edge]  # the outgoing ones by which gradients come
    splits: bool  # backwards in halves
    copiers: tuple[torch.Stream | None, torch.Stream | None] = (None, None)  # to the host and back, where there are any
    live: dict[int, InFlight] = field(factory=dict, init=False)
    halves: dict[int, WeightHalf] = field(factory=dict, init=False)  # what ``I`` leaves for ``W``
    offloads: dict[int, Offload] = field(factory=dict, init=False)
    kept: dict[int, Kept] = field(factory=dict, init=False)  # by microbatch, what slices keep for the later ones
    suspected: bool = field(default=False, init=False)
    ran: str | None = field(default=None, init=False)
    _looked_at: bool = field(default=False, init=False)
    _rooted: bool = field(default=False, init=False)  # in this step
    _was_rooted: bool = field(default=False, init=False)  # in any step
    _rootless: int = field(default=0, init=False)

    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._rootless, self._rooted, self.ran = 0, False, None
        self.live.clear()
        self.halves.clear()
        self.offloads.clear()
        self.kept.clear()

    def keep(
        self,
        piece: int,
        inputs: Sequence[Payload],
        payloads: Sequence[Payload],
        loss: torch.Tensor | None,
        part: Slice | None,
        answered: Sequence[int],
    ) -> None:
        """Keep what the backward of a forward needs; ``answered``: the payloads for which gradients come, by number."""
        if loss is not None or not payloads:  # a last stage
            check_loss(loss, self.number, piece if self.num_slices == 1 else piece_name(piece, self.num_slices))
        roots: list[Sequence[GradRoot | None]] = []
        for index in answered:
            payload = payloads[index]
            roots.append((_root(payload),) if isinstance(payload, torch.Tensor) else [*map(_root, flatten(payload))])
        live = self.live[piece] = InFlight(inputs, roots, loss, part)
        if loss is not None:
            self._rooted, self._was_rooted, self.suspected = True, True, False
        elif not self._rooted:
            self._require_root(roots, payloads, answered)
        if self.splits and not self._looked_at:
            self._looked_at = True
            self.require_splittable(input_path_of(live.starts(), differentiable(live.inputs)))

    def offload(self, piece: int) -> None:
        """``OFFLOAD``: start to copy what the forward has saved to the host."""
        modules = [module for _, module in modules_of(self.stage)]
        held = [tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))]
        offload = self.offloads[piece] = Offload(self.live[piece].starts(), held, self.copiers)
        offload.out()

    def require_splittable(self, path: Iterable[Node]) -> None:
        """Raise with the module behind an unsplittable graph: after the first forward, or at the I of a later one."""
        require_splittable(path, self.number, getattr(self.stage, "model", None))

    def _require_root(
        self, roots: Sequence[Sequence[GradRoot | None]], payloads: Sequence[Payload], answered: Sequence[int]
    ) -> None:
        """Raise if no output of a step has a graph, although the stage has parameters to train.

        Judged at the last forward: one microbatch alone may well need no gradient (a text without images). So may a
        later step, unless modules with such parameters run in the one behind it.
        """
        for part in roots:
            if part.count(None) < len(part):
                self._rooted, self._was_rooted, self.suspected = True, True, False
                return
        sent = flatten([payloads[index] for index in answered])
        self._rootless += any(tensor is not None and tensor.numel() > 0 for tensor in sent)
        if self._rootless < self.num_pieces:
            return
        self.suspected = self._was_rooted
        if (name := self.ran if self._was_rooted else trainable(self.stage)) is not None:
            edges = ", ".join(map(str, self.gradient_edges))
            raise StageOutputError(
                f"stage {self.number} has parameters that require grad ({name}), but none of the outputs of its "
                f"{self.num_pieces} microbatches does, and edge {edges} carries gradients back: look for "
                "detach() or no_grad(), or freeze the parameters"
            )


def differentiable(payloads: Sequence[Payload]) -> list[torch.Tensor]:
    """The tensors of some payloads that require grad, each once."""
    if len(payloads) == 1 and isinstance(payloads[0], torch.Tensor):
        return [payloads[0]] if payloads[0].requires_grad else []
    tensors = [tensor for payload in payloads for tensor in flatten(payload)]
    return list({id(tensor): tensor for tensor in tensors if tensor is not None and tensor.requires_grad}.values())


def _root(tensor: torch.Tensor | None) -> GradRoot | None:
    if tensor is None or not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    # Before torch 2.13 the node of a Python function lives as long as the graph, which the token of its edge holds.
    if node is None or isinstance(node, BackwardCFunction):
        return GradRoot(get_gradient_edge(tensor), tensor.shape)
    return GradRoot(GradientEdge(node, tensor.output_nr), tensor.shape)
