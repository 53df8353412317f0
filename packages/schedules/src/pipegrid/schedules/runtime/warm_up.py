"""A local forward and backward before the first step, which leaves no trace in a model.

The first use of a kernel loads it, which may wait for the whole device (CUDA loads lazily), and the first call of a
compiled module compiles it. In a pipeline's first step each stage would do so while its neighbours wait, one after the
other. Called on all ranks at once, without messages, they do so side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.runtime.position import BoundPosition
from pipegrid.schedules.runtime.stages.payloads import flatten, map_tensors
from pipegrid.schedules.runtime.stages.stage import Forwarded, modules_of
from pipegrid.transport.protocol import Payload


def warm_up(modules: nn.Module | Iterable[nn.Module], forward: Callable[[], Any], *, backward: bool = True) -> None:
    """Run ``forward`` and the backward of what it returns once, before the first step; leaves the modules as they are.

    All ranks call it at about the same time, with data of the shapes of a step. It sends nothing itself; collectives
    inside of the modules (tensor parallelism, FSDP2) run as in a step.

    Restored are gradients (``.grad`` and ``.main_grad``, which hooks may have written to), buffers, such as the running
    statistics of a batch norm, and torch's random number generators of the CPU and of the modules' devices. What a
    module keeps in other attributes, and what ``forward`` takes from an iterator, is not.

    Args:
        modules: what ``forward`` computes with.
        forward: makes a payload of tensors (or a `Forwarded`), whose tensors with a graph are differentiated.
        backward: False for modules that are only evaluated.

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 4)
        >>> warm_up(stage, lambda: stage(torch.ones(2, 4)).sum())
        >>> stage.weight.grad is None
        True
    """
    held = [modules] if isinstance(modules, nn.Module) else list(modules)
    with _unchanged(held), torch.set_grad_enabled(backward):
        produced = forward()
        if isinstance(produced, Forwarded):
            produced = [*produced.outputs.values(), produced.loss]
        roots = [tensor for tensor in flatten(produced) if tensor is not None and tensor.requires_grad]
        if backward and roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def generator_states(devices: Iterable[torch.device]) -> list[Callable[[], None]]:
    """What restores the random number generators of the CPU and of other ``devices`` to their state now."""
    found: list[Callable[[], None]] = [partial(torch.set_rng_state, torch.get_rng_state())]
    for device in devices:
        of_kind = torch.get_device_module(device.type)
        found.append(partial(of_kind.set_rng_state, of_kind.get_rng_state(device), device))
    return found


@contextmanager
def _unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Restore gradients, buffers and random number generators after the block, also where it raises."""
    parameters = list({id(one): one for module in modules for one in module.parameters()}.values())
    buffers = list({id(one): one for module in modules for one in module.buffers()}.values())
    devices = {one.device for one in (*parameters, *buffers) if one.device.type not in ("cpu", "meta")}
    with ExitStack() as restoring:
        for restore in generator_states(devices):
            restoring.callback(restore)
        for buffer in buffers:
            restoring.callback(_write, buffer, buffer.detach().clone())
        for parameter in parameters:
            restoring.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                main = parameter.main_grad
                restoring.callback(setattr, parameter, "main_grad", main)
                if main is not None:
                    restoring.callback(_write, main, main.detach().clone())
        yield


@torch.no_grad()
def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.copy_(value)


def warm_up_stages(bound: BoundPosition, payloads: Mapping[Edge, Payload]) -> None:
    """`warm_up` of a position's stages, which receive ``payloads``; see `PipelineRuntime.warm_up`."""
    if bound.plan.num_slices > 1 or bound.sharded:
        what = "slices" if bound.plan.num_slices > 1 else "sharded stages"
        raise StepArgumentError(
            f"warm_up() of a plan with {what}; call warm_up(modules, forward) of pipegrid.schedules with a forward of "
            "your own"
        )
    for number, runners in bound.runners.items():
        needed = dict.fromkeys(edge for runner in runners for edge, _, _ in runner.incoming)
        lacking = [str(edge) for edge in needed if edge not in payloads]
        if lacking:
            raise StepArgumentError(f"no payload for edge {', '.join(lacking)}, which stage {number} receives")
    for runners in bound.runners.values():
        for runner in runners:
            modules = [module for _, module in modules_of(runner.stage)]
            inputs = {edge: _received(payloads[edge], differentiated=back) for edge, _, back in runner.incoming}
            warm_up(modules, partial(runner.stage.forward, runner.first, inputs), backward=runner.trains)


def _received(payload: Payload, *, differentiated: bool) -> Payload:
    """A payload as a stage receives it: leaves of a graph, if gradients go back."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return tensor.detach().clone().requires_grad_(differentiated and wide)

    return map_tensors(payload, leaf)
