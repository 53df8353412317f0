"""The computes of one stage, and its state between a forward and its backward.

Where microbatches are cut into slices, each slice counts as a microbatch, by the number of its piece (`Plan.piece_of`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from attrs import define, field
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from pipegrid.schedules.autograd import (
    Offload,
    WeightHalf,
    backward_inputs,
    backward_weights,
    input_path_of,
    require_deallocatable,
    require_splittable,
    run_backward,
)
from pipegrid.schedules.errors import PlanMismatchError, StageInputError, StageOutputError
from pipegrid.schedules.fsdp import is_fsdp
from pipegrid.schedules.runtime.edge_queues import PendingFree, RecvQueue, SendQueue
from pipegrid.schedules.runtime.payloads import detached, flatten, gradient_of, map_tensors
from pipegrid.schedules.runtime.reentrant import reentrant_trap
from pipegrid.schedules.runtime.slices import Kept, Slice
from pipegrid.schedules.runtime.stage import (
    Forwarded,
    Stage,
    changed_in_place,
    check_loss,
    ended,
    modules_of,
    payloads_of,
    trainable,
)
from pipegrid.schedules.runtime.unread import Aliased, Unread, without_graph

if TYPE_CHECKING:
    from pipegrid.transport.edge import Edge
    from pipegrid.transport.protocol import Payload


class Root(NamedTuple):
    """The start of a backward: the graph edge and the shape of an output whose tensor may be gone."""

    edge: GradientEdge
    shape: torch.Size


class InFlight(NamedTuple):
    """A microbatch between its forward and its backward: the start and the end of the backward.

    Without the outputs: the graph keeps those that it needs, and the others go after their send.

    Attributes:
        inputs: per edge that carries a gradient back, what has come along it.
        roots: per edge by which a gradient comes, the starts in what has left along it.
        loss: of the stage itself.
        part: the slice, in a plan with slices.
    """

    inputs: Sequence[Payload]
    roots: Sequence[Sequence[Root | None]]
    loss: torch.Tensor | None
    part: Slice | None = None


@define(eq=False)
class StageRunner:
    """The computes of stage ``number``, each for a microbatch.

    Attributes:
        arriving: the activations of each incoming edge; ``leaving``: of each outgoing one.
        gradients_in: gradients of outgoing edges that carry one back; ``gradients_out``: of incoming ones.
        trains: whether the stage runs a backward.
        splits: whether the plan runs that in halves.
        reduced_by_plan: whether the plan reduces the gradients of a sharded stage (``REDUCE_GRAD``).
        declared: edges whose payloads are declared.
        copiers: the streams of copies to the host and back; None on a device without streams.
    """

    number: int
    stage: Stage
    num_microbatches: int
    arriving: Sequence[RecvQueue]
    leaving: Sequence[SendQueue]
    gradients_in: Sequence[RecvQueue]
    gradients_out: Sequence[SendQueue]
    trains: bool
    splits: bool
    deallocate: bool
    loss_scale: Callable[[torch.Tensor], torch.Tensor] | None
    reduced_by_plan: bool = False
    declared: AbstractSet[Edge] = frozenset()
    num_slices: int = 1
    copiers: tuple[torch.Stream | None, torch.Stream | None] = (None, None)
    training: bool = False
    compiled: bool = field(default=False, init=False)
    """Whether a compiled region has made a backward in halves run whole at I."""
    live: dict[int, InFlight] = field(factory=dict, init=False)
    halves: dict[int, WeightHalf] = field(factory=dict, init=False)
    offloads: dict[int, Offload] = field(factory=dict, init=False)
    kept: dict[int, Kept] = field(factory=dict, init=False)
    """What the slices of each microbatch in flight have kept for the later ones."""
    _looked_at: bool = field(default=False, init=False)
    _trapped: bool = field(default=False, init=False)
    _whole: bool | None = field(init=False)
    _outputs: dict[int, weakref.ref[torch.Tensor]] = field(factory=dict, init=False)
    _rooted: bool = field(default=False, init=False)
    _rootless: int = field(default=0, init=False)
    _inputs: tuple[tuple[Edge, Callable[[int], Payload], bool], ...] = field(init=False)
    _outgoing: tuple[Edge, ...] = field(init=False)
    _answered: tuple[int, ...] = field(init=False)  # of those, by which gradients come
    _lending: tuple[RecvQueue, ...] = field(init=False)
    _resume: Callable[[Slice], None] | None = field(init=False)
    _unread: tuple[Unread, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        edges = [box.edge for box in self.arriving]
        self._outgoing = tuple(box.edge for box in self.leaving)
        # The queues of gradients in the order of those of activations.
        self.gradients_out = sorted(self.gradients_out, key=lambda box: edges.index(box.edge))
        self.gradients_in = sorted(self.gradients_in, key=lambda box: self._outgoing.index(box.edge))
        differentiated = {box.edge for box in self.gradients_out}
        self._inputs = tuple((box.edge, box.take, box.edge in differentiated) for box in self.arriving)
        self._answered = tuple(self._outgoing.index(box.edge) for box in self.gradients_in)
        # Where FSDP2 reduces in each backward, at the gradients of a module's inputs, all of it runs at I.
        sharded = any(is_fsdp(module) for _, module in modules_of(self.stage))
        self._whole = False if self.reduced_by_plan else True if sharded else None
        self._lending = tuple(box for box in self.arriving if box.lends)
        self._resume = getattr(self.stage, "resume", None)
        self._unread = tuple(box.unread for box in (*self.leaving, *self.gradients_out))

    @property
    def incoming(self) -> tuple[tuple[Edge, Callable[[int], Payload], bool], ...]:
        """Per incoming edge the function that takes its payload, and whether a gradient goes back along it."""
        return self._inputs

    def begin(self, *, training: bool) -> None:
        """Forget what an earlier step left."""
        self.training = training and self.trains
        self._rootless = 0
        self._outputs = {key: output for key, output in self._outputs.items() if output() is not None}
        self.live.clear()
        self.halves.clear()
        self.offloads.clear()
        self.kept.clear()

    def _name(self, microbatch: int) -> int | str:
        """How a plan writes it: ``7``, or slice 2 of it as ``7.2``."""
        return microbatch if self.num_slices == 1 else "{}.{}".format(*divmod(microbatch, self.num_slices))

    def _slice(self, piece: int) -> Slice:
        """The slice of a forward, with what the earlier slices of its microbatch have kept."""
        microbatch, index = divmod(piece, self.num_slices)
        return Slice(index, self.num_slices, self.kept.setdefault(microbatch, {}), self.training)

    def forward(self, microbatch: int) -> None:
        """``F``."""
        self._settle()
        inputs: dict[Edge, Payload] = {}
        kept: list[Payload] = []
        for edge, take, differentiated in self._inputs:
            payload = take(microbatch)
            if differentiated:
                kept.append(payload)
            else:  # where no gradient goes back, none is computed either
                payload = map_tensors(payload, detached)
            inputs[edge] = payload
        forward: Callable[..., Forwarded] = self.stage.forward
        arguments: tuple[Any, ...] = (microbatch, inputs)
        part = None
        if self.num_slices > 1:
            part = self._slice(microbatch)
            arguments = (microbatch // self.num_slices, inputs, part)
        try:
            if self.training and not self._trapped:
                self._trapped = True
                with reentrant_trap(self.number, self.stage):
                    produced = forward(*arguments)
            elif self.training == torch.is_grad_enabled():
                produced = forward(*arguments)
            else:  # a stage that runs no backward keeps no graph
                with torch.set_grad_enabled(self.training):
                    produced = forward(*arguments)
        except StopIteration as error:
            count = self.num_microbatches // self.num_slices
            raise ended(self.number, self._name(microbatch), count, self.num_slices) from error
        except RuntimeError as error:
            found = changed_in_place(error, self.number, self._name(microbatch))
            if found is None:
                raise
            raise found from error
        name = microbatch if part is None else self._name(microbatch)
        payloads = payloads_of(produced, self._outgoing, self.number, name, self.declared)
        if part is not None:
            part.close()
        pending = None
        if self.training:
            self._keep(microbatch, kept, payloads, produced.loss, part)
            if self.deallocate and not (part is not None and part.keeps):  # what is kept may share its storage
                pending = self._pending_free(payloads, produced.loss)
        elif part is not None and part.is_last:
            del self.kept[microbatch // self.num_slices]
        aliased: dict[int, Aliased] = {}
        for sends, payload in zip(self.leaving, payloads, strict=True):
            shared = None if len(payloads) == 1 else aliased.setdefault(id(payload), without_graph(payload))
            sends.put(microbatch, payload, pending, shared)

    def _keep(
        self,
        microbatch: int,
        inputs: Sequence[Payload],
        payloads: Sequence[Payload],
        loss: torch.Tensor | None,
        part: Slice | None,
    ) -> None:
        if loss is not None or not payloads:  # a last stage
            check_loss(loss, self.number, self._name(microbatch))
        roots: list[Sequence[Root | None]] = []
        for index in self._answered:
            payload = payloads[index]
            roots.append((_root(payload),) if isinstance(payload, torch.Tensor) else [*map(_root, flatten(payload))])
        live = self.live[microbatch] = InFlight(inputs, roots, loss, part)
        if not self._rooted:
            self._require_root(live, payloads)
        if self.splits and not self._looked_at:
            self._looked_at = True
            starts = [root.edge for part in live.roots for root in part if root is not None]
            if loss is not None:
                starts.append(get_gradient_edge(loss))
            self._require_splittable(input_path_of(starts, _differentiable(live.inputs)))

    def _require_root(self, live: InFlight, payloads: Sequence[Payload]) -> None:
        """Raise if no output of the first step has a graph, although the stage has parameters to train.

        Judged at the last forward: one microbatch alone may well need no gradient (a text without images).
        """
        if live.loss is not None or any(root is not None for part in live.roots for root in part):
            self._rooted = True
            return
        sent = flatten([payloads[index] for index in self._answered])
        self._rootless += any(tensor is not None for tensor in sent)
        if self._rootless == self.num_microbatches and (name := trainable(self.stage)) is not None:
            edges = ", ".join(str(queue.edge) for queue in self.gradients_in)
            raise StageOutputError(
                f"stage {self.number} has parameters that require grad ({name}), but none of the outputs of its "
                f"{self.num_microbatches} microbatches does, and edge {edges} carries gradients back: look for "
                "detach() or no_grad(), or freeze the parameters"
            )

    def _require_splittable(self, path: Iterable[Node]) -> None:
        """Raise with the module behind an unsplittable graph: after the first forward, or at the I of a later one."""
        require_splittable(path, self.number, getattr(self.stage, "model", None))

    def _pending_free(self, payloads: Sequence[Payload], loss: torch.Tensor | None) -> PendingFree:
        """The outputs that leave by message, whose storage goes when they have left."""
        sent = [payload for box, payload in zip(self.leaving, payloads, strict=True) if box.local is None]
        # An input passed straight on is a leaf: its storage is not ours.
        tensors = {id(t): t for t in flatten(sent) if t is not None and t.grad_fn is not None}
        for tensor in tensors.values():
            require_deallocatable(tensor)
            self._require_new(tensor)
        roots = {id(root) for root in flatten([*payloads, loss]) if _differentiated(root)}
        # With several roots the graph of one may have saved another, so none is freed.
        return PendingFree(len(sent), list(tensors.values()) if len(roots) == 1 else [])

    def _require_new(self, tensor: torch.Tensor) -> None:
        """Raise for a tensor that was an output before: it is freed as soon as it has left the first time."""
        before = self._outputs.get(id(tensor))
        if before is not None and before() is tensor:
            raise StageOutputError(
                f"stage {self.number} returned one tensor as the output of two microbatches, which is freed after the "
                "first send; return output.clone(), or set deallocate_outputs=False"
            )
        self._outputs[id(tensor)] = weakref.ref(tensor)

    def offload(self, microbatch: int) -> None:
        """``OFFLOAD``."""
        live = self.live[microbatch]
        starts = [root.edge for part in live.roots for root in part if root is not None]
        if _differentiated(live.loss):
            assert live.loss is not None
            starts.append(get_gradient_edge(live.loss))
        modules = [module for _, module in modules_of(self.stage)]
        held = [tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))]
        offload = self.offloads[microbatch] = Offload(starts, held, self.copiers)
        offload.out()

    def release(self, microbatch: int) -> None:
        """``RELEASE``."""
        self.offloads[microbatch].free()

    def reload(self, microbatch: int) -> None:
        """``RELOAD``."""
        self.offloads[microbatch].back()

    def _take(self, microbatch: int) -> InFlight:
        """The state of a microbatch whose backward begins, once what it has saved is back."""
        if self.offloads and (offload := self.offloads.pop(microbatch, None)) is not None:
            offload.wait()
        self._settle()
        for index in self._answered:
            self.leaving[index].unread.end(microbatch)
        return self.live.pop(microbatch)

    def _settle(self) -> None:
        """Before the stage runs again, which may write what it returned before."""
        for queue in self._unread:
            queue.settle()

    def backward(self, microbatch: int) -> None:
        """``B``: both halves at once."""
        live = self._take(microbatch)
        roots, gradients = self._starts(live, microbatch)
        if roots:
            run_backward(roots, gradients)
        for box, payload in zip(self.gradients_out, live.inputs, strict=True):
            is_one = isinstance(payload, torch.Tensor)
            box.put(microbatch, _taken(payload) if is_one else map_tensors(payload, _taken))
        for queue in self._lending:
            queue.give_back(microbatch)
        self._forget(live.part, microbatch)

    def _forget(self, part: Slice | None, microbatch: int) -> None:
        """Forget a microbatch after the backward of its first slice, which is the last to run."""
        if part is not None and part.is_first:
            del self.kept[microbatch // self.num_slices]

    def backward_inputs(self, microbatch: int) -> None:
        """``I``."""
        live = self._take(microbatch)
        roots, gradients = self._starts(live, microbatch)
        inputs = _differentiable(live.inputs)
        read = [] if live.part is None else live.part.leaves()
        try:
            found, self.halves[microbatch] = backward_inputs(
                roots,
                gradients,
                [*inputs, *read] if read else inputs,
                on_unsplittable=self._require_splittable,
                on_compiled=self._note_compiled,
                whole=self._whole,
            )
        except CheckpointError as error:
            if live.part is None:
                raise
            raise StageInputError(
                f"stage {self.number} checkpoints activations that read keys and values, and its backward of slice "
                f"{self._name(microbatch)} in halves would recompute them twice; seq1f1b has whole backwards"
            ) from error
        for leaf, gradient in zip(read, found[len(inputs) :], strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._forget(live.part, microbatch)
        by_input: dict[int, torch.Tensor] = {}
        for tensor, gradient in zip(inputs, found, strict=False):
            # As in a whole backward: an unused input has a gradient of zeros, and a gradient that an operator returns
            # as a view (of a transpose, a sum) is made contiguous, as accumulation into `grad` would make it.
            by_input[id(tensor)] = torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
        for box, payload in zip(self.gradients_out, live.inputs, strict=True):
            if isinstance(payload, torch.Tensor):
                box.put(microbatch, by_input.get(id(payload)))
            else:
                box.put(microbatch, map_tensors(payload, lambda tensor: by_input.get(id(tensor))))

    def _note_compiled(self) -> None:
        self.compiled = True

    def backward_weights(self, microbatch: int) -> None:
        """``W``."""
        backward_weights(self.halves.pop(microbatch))
        for queue in self._lending:
            queue.give_back(microbatch)

    def _starts(self, live: InFlight, microbatch: int) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges at which a backward starts, and the gradient of each: the stage's own loss, and its outputs."""
        roots: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        if live.loss is not None:
            loss = live.loss
            if self.loss_scale is not None:
                loss = self.loss_scale(loss)
                check_loss(loss, self.number, self._name(microbatch), what="loss_scale(loss)")
            roots.append(get_gradient_edge(loss))
            gradients.append(torch.ones_like(loss))
        for box, ends in zip(self.gradients_in, live.roots, strict=True):
            payload = box.take(microbatch)
            arrived = (payload,) if isinstance(payload, torch.Tensor) else flatten(payload)
            for root, gradient in zip(ends, arrived, strict=True):
                if root is None or gradient is None:
                    continue
                if gradient.shape != root.shape:  # the engine might sum it up
                    raise PlanMismatchError(
                        f"edge {box.edge} carried a tensor of shape {tuple(root.shape)} forward for microbatch "
                        f"{self._name(microbatch)}, but a gradient of shape {tuple(gradient.shape)} came back"
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


def _taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient to send back for a received tensor, which a stage may hold on to."""
    gradient = gradient_of(tensor)
    tensor.grad = None
    return gradient


def _differentiated(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _root(tensor: torch.Tensor | None) -> Root | None:
    if tensor is None or not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    # Before torch 2.13 the node of a Python function lives as long as the graph, which the token of its edge holds.
    if node is None or isinstance(node, BackwardCFunction):
        return Root(get_gradient_edge(tensor), tensor.shape)
    return Root(GradientEdge(node, tensor.output_nr), tensor.shape)


def _differentiable(payloads: Sequence[Payload]) -> list[torch.Tensor]:
    """The tensors of some payloads that require grad, each once."""
    if len(payloads) == 1 and isinstance(payloads[0], torch.Tensor):
        return [payloads[0]] if payloads[0].requires_grad else []
    tensors = [tensor for payload in payloads for tensor in flatten(payload)]
    return list({id(tensor): tensor for tensor in tensors if tensor is not None and tensor.requires_grad}.values())
