"""The computes of one stage: its forward, its backward, and the two halves of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from pipegrid.autograd import backward_inputs, backward_weights, run_backward
from pipegrid.autograd.fsdp import is_fsdp
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime.stages.deallocation import Deallocation
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.in_flight import ActivationsInFlight, InFlight, differentiable
from pipegrid.schedules.runtime.stages.payloads import detached, flatten, gradient_of, map_tensors, piece_name
from pipegrid.schedules.runtime.stages.reused import copied_from, keep_own_gradients, memory_of
from pipegrid.schedules.runtime.stages.shared_calls import SharedQueue, SummedQueue
from pipegrid.schedules.runtime.stages.slices import Slice
from pipegrid.schedules.runtime.stages.stage import (
    Forwarded,
    RuntimeStage,
    check_loss,
    error_of,
    modules_of,
    payloads_of,
    reentrant_trap,
)
from pipegrid.transport.protocol import Payload


@define(eq=False)
class StageRunner:
    """The computes of stage ``number``, each for a piece: a microbatch, or one slice of it.

    Attributes:
        arriving: the activations of each incoming edge; ``leaving``: of each outgoing one.
        gradients_in: gradients of outgoing edges that carry one back, in the order of ``leaving``; ``gradients_out``:
            of incoming ones, in the order of ``arriving``.
        trains: whether the stage runs a backward.
        deallocation: frees outputs after their send; None where they are left.
        reduced_by_plan: whether the plan reduces the gradients of a sharded stage (``REDUCE_GRAD``).
        declared: edges whose payloads are declared; ``skipped``: outgoing edges of the stage that these pieces skip.
        reuses: what is received may be written again after the backward that reads it.
        first: of its pieces.
        compiled: a compiled region has made a backward in halves run whole at I.
        incoming: per incoming edge what takes its payload, and whether a gradient goes back along it.
    """

    number: int
    stage: RuntimeStage
    flight: ActivationsInFlight
    arriving: Sequence[RecvQueue | SharedQueue]
    leaving: Sequence[SendQueue]
    gradients_in: Sequence[RecvQueue]
    gradients_out: Sequence[SendQueue | SummedQueue]
    trains: bool
    loss_scale: Callable[[torch.Tensor], torch.Tensor] | None
    deallocation: Deallocation | None = None
    reduced_by_plan: bool = False
    declared: AbstractSet[Edge] = frozenset()
    skipped: AbstractSet[Edge] = frozenset()
    reuses: bool = False
    first: int = 0
    training: bool = False
    compiled: bool = field(default=False, init=False)
    incoming: tuple[tuple[Edge, Callable[[int], Payload], bool], ...] = field(init=False)
    _num_slices: int = field(init=False)
    _trapped: bool = field(default=False, init=False)
    _whole: bool | None = field(init=False)
    _outgoing: tuple[Edge, ...] = field(init=False)
    _came: dict[int, list[torch.Tensor]] = field(factory=dict, init=False)  # by piece, gradients in such memory
    _resume: Callable[[Slice], None] | None = field(init=False)
    _answers: tuple[int, ...] = field(init=False)  # of the outgoing edges those by which gradients come
    _answered: tuple[SendQueue, ...] = field(init=False)
    _away: tuple[bool, ...] = field(init=False)  # whether each output leaves by message

    def __attrs_post_init__(self) -> None:
        self._num_slices = self.flight.num_slices
        self._outgoing = tuple(queue.edge for queue in self.leaving)
        self._away = tuple(queue.local is None for queue in self.leaving)
        differentiated = {queue.edge for queue in self.gradients_out}
        self.incoming = tuple((queue.edge, queue.take, queue.edge in differentiated) for queue in self.arriving)
        # Where FSDP2 reduces in each backward, at the gradients of a module's inputs, all of it runs at I.
        sharded = any(is_fsdp(module) for _, module in modules_of(self.stage))
        self._whole = False if self.reduced_by_plan else True if sharded else None
        self._resume = getattr(self.stage, "resume", None)
        answering = {queue.edge for queue in self.gradients_in}
        self._answers = tuple(index for index, edge in enumerate(self._outgoing) if edge in answering)
        self._answered = tuple(self.leaving[index] for index in self._answers)

    @property
    def gathers_by_itself(self) -> bool:
        """Whether the stage's modules gather and free their parameters, without the plan."""
        return self._whole is True

    def begin(self, *, training: bool) -> None:
        """Forget what an earlier step left."""
        self.training = training and self.trains
        self.flight.begin()
        self._came.clear()
        self._trapped = self._trapped and not self.flight.suspected
        if self.deallocation is not None:
            self.deallocation.begin()

    def forward(self, piece: int) -> None:
        """``F``."""
        inputs: dict[Edge, Payload] = {}
        kept: list[Payload] = []
        for edge, take, differentiated in self.incoming:
            payload = take(piece)
            if differentiated:
                kept.append(payload)
            else:  # where no gradient goes back, none is computed either
                payload = map_tensors(payload, detached)
            inputs[edge] = payload
        forward: Callable[..., Forwarded] = self.stage.forward
        arguments: tuple[Any, ...] = (piece, inputs)
        part = None
        if self._num_slices > 1:
            microbatch, index = divmod(piece, self._num_slices)
            part = Slice(index, self._num_slices, self.flight.kept.setdefault(microbatch, {}), self.training)
            arguments = (microbatch, inputs, part)
        try:
            if self.training and not self._trapped:
                self._trapped = True
                with reentrant_trap(self.number, self.stage) as ran:
                    produced = forward(*arguments)
                self.flight.ran = next(iter(ran), self.flight.ran)
            elif self.training == torch.is_grad_enabled():
                produced = forward(*arguments)
            else:  # a stage that runs no backward keeps no graph
                with torch.set_grad_enabled(self.training):
                    produced = forward(*arguments)
        except (StopIteration, RuntimeError) as error:
            slices, count = self._num_slices, self.flight.num_pieces // self._num_slices
            found = error_of(error, self.number, piece_name(piece, slices), count, slices)
            if found is None:
                raise
            raise found from error
        name = piece if part is None else piece_name(piece, self._num_slices)
        payloads = payloads_of(produced, self._outgoing, self.number, name, self.declared, self.skipped)
        if part is not None:
            part.close()
        pending = None
        if self.training:
            self.flight.keep(piece, kept, payloads, produced.loss, part, self._answers)
            if self.deallocation is not None and not (part is not None and part.keeps):  # may share its storage
                pending = self.deallocation.pending(self._away, payloads, produced.loss)
        elif part is not None and part.is_last:
            del self.flight.kept[piece // self._num_slices]
        for sends, payload in zip(self.leaving, payloads, strict=True):
            sends.put(piece, payload, pending)

    def _take(self, piece: int) -> InFlight:
        """The state of a piece whose backward begins, once what it has saved is back."""
        if self.flight.offloads and (offload := self.flight.offloads.pop(piece, None)) is not None:
            offload.wait()
        live = self.flight.live.pop(piece)
        if self.reuses:  # a send that is not seen to have ended holds its payload, which may be in received memory
            for queue in self._answered:
                queue.complete(piece)
        for queue in self._answered:
            if piece in queue.pending:
                queue.end(piece)
        return live

    def _forget(self, part: Slice, piece: int) -> None:
        """Forget a microbatch after the backward of its first slice, which is the last to run."""
        if part.is_first:
            del self.flight.kept[piece // self._num_slices]

    def backward(self, piece: int) -> None:
        """``B``: both halves at once."""
        live = self._take(piece)
        roots, gradients = self._starts(live, piece)
        if roots:
            run_backward(roots, gradients)
        own = self._apart(live, piece) if self.reuses else None
        for queue, payload in zip(self.gradients_out, live.inputs, strict=True):
            is_one = isinstance(payload, torch.Tensor)
            gradient = _taken(payload) if is_one else map_tensors(payload, _taken)
            queue.put(piece, gradient if own is None else map_tensors(gradient, own))
        if self.reuses:
            self._let_go(piece)
        if live.part is not None:
            self._forget(live.part, piece)

    def backward_inputs(self, piece: int) -> None:
        """``I``."""
        live = self._take(piece)
        roots, gradients = self._starts(live, piece)
        inputs = differentiable(live.inputs)
        read = [] if live.part is None else live.part.leaves()
        try:
            found, half = backward_inputs(
                roots,
                gradients,
                [*inputs, *read] if read else inputs,
                on_unsplittable=self.flight.require_splittable,
                on_compiled=partial(setattr, self, "compiled", True),
                whole=self._whole,
            )
        except CheckpointError as error:
            if live.part is None:
                raise
            name = piece_name(piece, self._num_slices)
            raise StageOutputError(
                f"stage {self.number} checkpoints activations that read keys and values, and its backward of slice "
                f"{name} in halves would recompute them twice; seq1f1b has whole backwards"
            ) from error
        self.flight.halves[piece] = half
        for leaf, gradient in zip(read, found[len(inputs) :], strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        if live.part is not None:
            self._forget(live.part, piece)
        # As in a whole backward: an unused input has a gradient of zeros, and a gradient that an operator returns as a
        # view (of a transpose, a sum) is made contiguous, as accumulation into `grad` would make it.
        by_input = {
            id(tensor): torch.zeros_like(tensor)
            if gradient is None
            else (gradient if gradient.is_sparse else gradient.contiguous())  # a lane says what sparse ones need
            for tensor, gradient in zip(inputs, found, strict=False)
        }
        # What W begins with it may give to a parameter, whose next gradient is added in place.
        own = self._apart(live, piece, [gradient for call in half.calls for gradient in call.gradients])
        for queue, payload in zip(self.gradients_out, live.inputs, strict=True):
            is_one = isinstance(payload, torch.Tensor)
            gradient = by_input.get(id(payload)) if is_one else map_tensors(payload, lambda one: by_input.get(id(one)))
            queue.put(piece, map_tensors(gradient, own))

    def backward_weights(self, piece: int) -> None:
        """``W``."""
        backward_weights(self.flight.halves.pop(piece))
        if self.reuses:
            self._let_go(piece)

    def _apart(
        self, live: InFlight, piece: int, later: Sequence[torch.Tensor] = ()
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that copies a gradient which is in memory of ``later``, or that messages come to."""
        came = [*flatten(list(live.inputs)), *self._came.get(piece, ())] if self.reuses else ()
        return partial(copied_from, memory_of([*came, *later]))

    def _let_go(self, piece: int) -> None:
        """After the last backward of a piece: parameters whose gradients are in received memory get their own."""
        if came := self._came.pop(piece, None):
            keep_own_gradients(modules_of(self.stage), came)

    def _starts(self, live: InFlight, piece: int) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges at which a backward starts, and the gradient of each: the stage's own loss, and its outputs."""
        roots: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        if live.loss is not None:
            loss = live.loss
            if self.loss_scale is not None:
                loss = self.loss_scale(loss)
                check_loss(loss, self.number, piece_name(piece, self._num_slices), what="loss_scale(loss)")
            node = loss.grad_fn
            if node is None or isinstance(node, BackwardCFunction):  # see `in_flight`
                roots.append(get_gradient_edge(loss))
            else:
                roots.append(GradientEdge(node, loss.output_nr))
            gradients.append(torch.ones_like(loss))
        for queue, ends in zip(self.gradients_in, live.roots, strict=True):
            payload = queue.take(piece)
            if self.reuses and not queue.local:
                payload = self._note(piece, payload)
            arrived = (payload,) if isinstance(payload, torch.Tensor) else flatten(payload)
            for root, gradient in zip(ends, arrived, strict=True):
                if root is None or gradient is None:
                    continue
                if gradient.shape != root.shape:  # the engine might sum it up
                    name = piece_name(piece, self._num_slices)
                    raise StepArgumentError(
                        f"edge {queue.edge} carried a tensor of shape {tuple(root.shape)} forward for microbatch "
                        f"{name}, but a gradient of shape {tuple(gradient.shape)} came back"
                    )
                roots.append(root.edge)
                gradients.append(gradient)
        if live.part is not None:
            if self._resume is not None:
                self._resume(live.part)
            starts = live.part.starts()
            roots += starts[0]
            gradients += starts[1]
        return roots, gradients

    def _note(self, piece: int, payload: Payload) -> Payload:
        """A gradient in memory to which others come; of FSDP2, which may read a view of it later, a copy."""
        if self._whole is True:
            return map_tensors(payload, torch.Tensor.clone)
        self._came.setdefault(piece, []).extend(tensor for tensor in flatten(payload) if tensor is not None)
        return payload


def _taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient to send back for a received tensor, which a stage may hold on to."""
    gradient = gradient_of(tensor)
    tensor.grad = None
    return gradient
