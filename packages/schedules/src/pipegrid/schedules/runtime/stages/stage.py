"""The interface between the runtime and a stage: what a forward takes, what it returns, and the checks of that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from attrs import frozen
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from pipegrid.autograd.tree import compiled_modules, modules_in
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.gradients.errors import GradientError
from pipegrid.schedules.errors import DataEndedError, StageOutputError
from pipegrid.schedules.runtime.stages.payloads import describe, tensors_of
from pipegrid.schedules.runtime.stages.slices import Slice
from pipegrid.transport.protocol import Payload


@frozen
class Forwarded:
    """The result of a forward.

    Attributes:
        outputs: the payload of each outgoing edge; one payload may go to several.
        loss: the scalar to differentiate, on a stage without outgoing edges; None in a forward-only run. Any other
            stage may have one as well (a balance of experts): the step differentiates the sum of all losses.

    Examples:
        >>> import torch
        >>> Forwarded(outputs={}, loss=torch.tensor(0.5)).loss
        tensor(0.5000)
    """

    outputs: Mapping[Edge, Payload]
    loss: torch.Tensor | None = None


class RuntimeStage(Protocol):
    """The computation of one stage.

    With an attribute ``model`` that is a `torch.nn.Module`, errors name its submodules.
    """

    def forward(self, microbatch: int, inputs: Mapping[Edge, Payload]) -> Forwarded:
        """Run microbatch ``microbatch`` on the payload of each incoming edge.

        In a plan with slices (`SlicedStage`) there is a third argument, the `Slice`.
        """


class SlicedStage(Protocol):
    """The computation of one stage, slice by slice of each microbatch, in the order of the sequence.

    An optional method ``resume(part)`` is called before the backward of a slice, which may recompute its forward.
    """

    def forward(self, microbatch: int, inputs: Mapping[Edge, Payload], part: Slice, /) -> Forwarded:
        """Run slice ``part.index`` of microbatch ``microbatch`` on the payload of each incoming edge.

        With ``part``, keep what the later slices need and read what the earlier ones have kept. The losses of the
        slices add up to that of the microbatch.
        """


def payloads_of(
    produced: Any,
    edges: Sequence[Edge],
    stage: int,
    microbatch: int | str,
    declared: AbstractSet[Edge] = frozenset(),
    skipped: AbstractSet[Edge] = frozenset(),
) -> Sequence[Payload]:
    """The payloads that a forward returned, one for each of ``edges``, in their order; raises for others.

    The communicator checks those of ``declared`` edges. Those of ``skipped`` edges, which the unit does not take, may
    be there as well.
    """
    outputs = produced.outputs if isinstance(produced, Forwarded) else None
    # The common case, one tensor or none, without a lookup: an edge has no fast hash.
    if type(outputs) is dict and len(outputs) == len(edges) < 2:
        for edge, payload in outputs.items():
            if isinstance(payload, torch.Tensor) and (edge is edges[0] or edge == edges[0]):
                return (payload,)
        if not edges:
            return ()
    if not isinstance(outputs, Mapping):
        raise StageOutputError(
            f"the forward of stage {stage} returned {describe(produced)} for microbatch {microbatch}; return "
            "Forwarded({edge: payload, ...}, loss), with a payload for each outgoing edge, or no edge and the loss"
        )
    if outputs.keys() != set(edges) and outputs.keys() - skipped != set(edges):
        raise StepArgumentError(
            f"the forward of stage {stage} returned outputs for {sorted(map(str, outputs))} for microbatch "
            f"{microbatch}; the plan has edges {sorted(map(str, edges))}"
        )
    for edge, payload in outputs.items():
        if not isinstance(payload, torch.Tensor) and edge not in declared:
            name = f"the output of stage {stage} on edge {edge} for microbatch {microbatch}"
            tensors_of(name, payload, StageOutputError)
    return [outputs[edge] for edge in edges]


def check_loss(loss: Any, stage: int, microbatch: int | str, *, what: str = "the loss") -> None:
    """Raise StageOutputError unless the loss is a real number that depends on parameters."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.dtype.is_floating_point and loss.requires_grad:
        return
    found = describe(loss)
    if isinstance(loss, torch.Tensor):
        found += f", {loss.dtype}, requires_grad={loss.requires_grad}"
    raise StageOutputError(
        f"{what} of stage {stage} for microbatch {microbatch} is {found}; a loss is a tensor with one floating-point "
        "element that requires grad. To evaluate, call eval(), or a step function with forward_only=True"
    )


def error_of(error: Exception, stage: int, microbatch: int | str, count: int, num_slices: int) -> Exception | None:
    """The error for data that have ended, or an in-place change of a received tensor, which is a leaf; None for others.

    ``count``: of microbatches.
    """
    if isinstance(error, StopIteration):
        each = "microbatch" if num_slices == 1 else f"of {num_slices} slices of a microbatch"
        return DataEndedError(
            f"the iterator of stage {stage} ended at microbatch {microbatch} of {count} (they count from 0); a step "
            f"takes one item for each {each}"
        )
    if "leaf Variable" not in str(error) or "in-place" not in str(error):
        return None
    return StageOutputError(
        f"the forward of stage {stage} changes a tensor in place for microbatch {microbatch} that it received, or a "
        f"parameter: a gradient is collected there. Compute a new tensor, or change x.clone(). Torch says: {error}"
    )


def require_bare(stages: Mapping[int, Any]) -> None:
    """Raise GradientError for a `DistributedDataParallel`, in which a user may wrap a module between two steps.

    It decides in each forward whether the next backward reduces, and knows no halves.
    """
    for number, stage in stages.items():
        for value in (stage, getattr(stage, "model", None), *getattr(stage, "__dict__", {}).values()):
            for module in modules_in(value) if isinstance(value, torch.nn.Module) else ():
                if isinstance(module, DistributedDataParallel):
                    name = next(name for name, each in modules_of(stage) if each is module)
                    raise GradientError(
                        f"stage {number} has a DistributedDataParallel ({name}), which would reduce the wrong "
                        "gradients: in this plan other forwards come before a backward, or it is split. Give the stage "
                        "the bare module, and call reduce_gradients(...) after the step"
                    )


def modules_of(stage: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a stage with their names: itself, or its attributes, ``model`` among them."""
    held = {"model": getattr(stage, "model", None), **getattr(stage, "__dict__", {})}
    for name, value in [("the stage itself", stage), *held.items()]:
        if isinstance(value, torch.nn.Module):
            for inner, module in value.named_modules():
                yield f"{name}.{inner}" if inner else name, module


def trainable(stage: Any) -> str | None:
    """The name of a parameter of a stage that requires grad, None without any."""
    for name, value in getattr(stage, "__dict__", {}).items():
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            return str(name)
    for name, module in modules_of(stage):
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                return f"{name}.{own}"
    return None


def graph_nodes(starts: Iterable[Node]) -> list[Node]:
    """Every node of a graph."""
    left = list(starts)
    seen = dict.fromkeys(left)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                left.append(node)
    return list(seen)


@contextmanager
def reentrant_trap(number: int, stage: Any) -> Iterator[list[str]]:
    """Raise in forwards of this thread for a reentrant checkpoint that trains nothing, in silence.

    ``checkpoint(..., use_reentrant=True)`` runs its region without grad and makes one node of it, whose inputs are the
    tensors that are passed in. Where none of them requires grad there is no node: parameters inside get no gradient. In
    a pipeline that is a first stage whose embedding is frozen, or data that comes as embeddings.

    Not where modules are compiled: they would be compiled anew without the hook that looks. The list gets the name of a
    trainable parameter when the first module with one runs.
    """
    if compiled_modules(getattr(stage, "model", None)):
        yield []
        return
    thread = threading.get_ident()
    ran: list[str] = []

    def look(module: torch.nn.Module, args: Any) -> None:
        del args
        if (ran and torch.is_grad_enabled()) or threading.get_ident() != thread:
            return
        name = next((name for name, own in module.named_parameters(recurse=False) if own.requires_grad), None)
        if name is None:
            return
        ran.append(f"{type(module).__name__}.{name}")
        region = None if torch.is_grad_enabled() else _region(sys._getframe())  # noqa: SLF001 -- documented, for this
        if region is not None and not any(isinstance(one, torch.Tensor) and one.requires_grad for one in region):
            raise StageOutputError(
                f"stage {number}: {type(module).__name__} (its parameter {name!r} requires grad) is checkpointed with "
                "use_reentrant=True, and no input of the region requires grad: its parameters would get no gradient. "
                "Use use_reentrant=False"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield ran
    finally:
        handle.remove()


def _region(frame: FrameType | None) -> tuple[Any, ...] | None:
    """The arguments of the innermost reentrant checkpoint that runs; None outside of one."""
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["args"]


def for_another_replica(stage: RuntimeStage, forward: Callable[[], None]) -> None:
    """``forward`` of a microbatch of another replica, after which running statistics are as before.

    Each replica has those of its own microbatches: else they would depend on who has died. Other buffers are the
    stage's own matter: a count that is summed over replicas belongs to whichever rank computes.
    """
    held = [
        (module, name, buffer)
        for _, module in modules_of(stage)
        if getattr(module, "track_running_stats", False)
        for name, buffer in module._buffers.items()  # noqa: SLF001 -- torch has no list of one module's own entries
        if buffer is not None
    ]
    for module, name, buffer in held:  # copies, not the values put back: a backward may need what its forward has read
        module._buffers[name] = torch.clone(buffer)  # noqa: SLF001
    try:
        forward()
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer  # noqa: SLF001
