"""Deferred weight gradient of the output layer: computed after the last backward has sent its gradient.

The last stage is the first to finish a backward, and every other stage waits for it. Its largest product, the weight
gradient over the whole vocabulary, has no use before the reduction: `output_linear` stores the inputs of the product,
and `finish_embedding_wgrad_compute` computes it in the cooldown, when this stage is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.gradients.errors import GradientError
from pipegrid.gradients.groups import size_of
from pipegrid.gradients.main_grad import add_gradient
from pipegrid.transport.collectives.gathering import gather_flat
from pipegrid.transport.collectives.starting import start, wait_inside

_BUFFERS = ("embedding_activation_buffer", "grad_output_buffer")


def output_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    module: Any,
    config: Any,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``, for an output layer whose weight gradient may be deferred.

    With ``config.defer_embedding_wgrad_compute``, the backward skips the weight's gradient and appends the input to
    ``module.embedding_activation_buffer`` and the output's gradient to ``module.grad_output_buffer`` (lists); with
    ``config.wgrad_deferral_limit`` n > 0, only while fewer than n microbatches are stored.

    Over tp, ``weight`` is this rank's rows (its part of the vocabulary), the output stays sharded along its last axis,
    and the gradient of ``x`` is summed over ``tp_group``. With ``config.sequence_parallel``, ``x`` is sharded along
    its first axis: gathered in the forward, and again for the weight's gradient (only the shard is kept); its gradient
    is reduce-scattered.

    Args:
        x: ``(..., hidden)``; with sequence parallelism ``(sequence / tp, ..., hidden)``.
        weight: ``(vocabulary / tp, hidden)``.
        bias: ``(vocabulary / tp)``; its gradient is never deferred.
        module: has the two buffers.
        config: ``defer_embedding_wgrad_compute``, ``wgrad_deferral_limit``, ``sequence_parallel``.
        tp_group: None is one rank.

    Returns:
        ``(..., vocabulary / tp)``.

    Raises:
        GradientError: deferral is set, and ``module`` lacks a buffer.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> head = torch.nn.Linear(4, 8, bias=False)
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        >>> output_linear(torch.ones(2, 4), head.weight, module=head, config=config).shape
        torch.Size([2, 8])
    """
    deferred = bool(getattr(config, "defer_embedding_wgrad_compute", False))
    if deferred and not _has_buffers(module):
        raise _without_buffers(module)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    group = None if size_of(tp_group) == 1 else tp_group
    shared = group is not None and bool(getattr(config, "sequence_parallel", False))
    limit = int(getattr(config, "wgrad_deferral_limit", 0)) if deferred else None
    output: torch.Tensor = _OutputLinear.apply(x, weight, bias, group, shared, module, limit)  # type: ignore[no-untyped-call]
    return output


class _OutputLinear(torch.autograd.Function):
    """Saves the input before gathering (a shard, under sequence parallelism); ``limit`` None defers nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        shared: bool,
        module: Any,
        limit: int | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.shared, ctx.module, ctx.limit = group, shared, module, limit
        whole = _gather(x, group) if shared else x
        return torch.nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_x = of_weight = of_bias = None
        if needs_x:
            of_x = gradient.matmul(weight)
            if ctx.shared:
                of_x = _reduce_scatter(of_x, ctx.group)
            elif ctx.group is not None:
                wait_inside(start(dist.all_reduce, of_x, group=ctx.group))
        if needs_weight:
            if ctx.limit is not None and (ctx.limit == 0 or len(ctx.module.grad_output_buffer) < ctx.limit):
                ctx.module.embedding_activation_buffer.append(x.detach())
                ctx.module.grad_output_buffer.append(gradient)
            else:
                of_weight = _weight_gradient(_gather(x, ctx.group) if ctx.shared else x, gradient)
        if needs_bias:
            of_bias = gradient.flatten(0, -2).sum(dim=0)
        return of_x, of_weight, of_bias, None, None, None, None


def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.flatten(0, -2).t().matmul(x.flatten(0, -2))


def _gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    whole, handle = _start_gather(x, group)
    wait_inside(handle)
    return whole


def _start_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """An all-gather along the first axis: the output tensor, and its handle, which `wait_inside` waits for."""
    whole = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    return whole, gather_flat(whole, x.contiguous(), group)


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The shard of this rank, along the first axis, of the sum over ranks."""
    shard = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    # torch 2.13 renames reduce_scatter_tensor and warns about the old name; 2.11 has the old one only.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    wait_inside(start(scatter, shard, x.contiguous(), group=group))
    return shard


def clear_embedding_activation_buffer(config: Any, model: Any, is_last_stage: bool) -> Any:
    """Clear the buffers before a step: an aborted one may have left entries.

    ``model`` is this rank's stage, or its chunks, with the output layer in the last.

    Returns:
        The module with the buffers, for `finish_embedding_wgrad_compute`; None without deferral.

    Raises:
        GradientError: deferral is set, and neither the model nor a module it wraps has the buffers.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        >>> clear_embedding_activation_buffer(config, torch.nn.Linear(4, 8), is_last_stage=True)
    """
    if not is_last_stage or not getattr(config, "defer_embedding_wgrad_compute", False):
        return None
    inner = chunk = model[-1] if isinstance(model, (list, tuple)) and model else model
    while inner is not None and not _has_buffers(inner):
        inner = getattr(inner, "module", None)
    if inner is None:
        raise _without_buffers(chunk)
    for name in _BUFFERS:
        getattr(inner, name).clear()
    return inner


@torch.no_grad()
def finish_embedding_wgrad_compute(config: Any, embedding_module: Any, is_last_stage: bool, tp_group: Any) -> None:
    """Compute the deferred weight gradients of the output layer, oldest first, and empty the buffers.

    Added to the weight's ``main_grad`` if it has one, else to ``grad``: with all microbatches deferred, the same sum in
    the same order as without deferral. Under sequence parallelism, the gather of the next microbatch's input overlaps
    this one's product. No effect with empty buffers.

    Args:
        config: ``defer_embedding_wgrad_compute``, ``sequence_parallel``.
        embedding_module: result of `clear_embedding_activation_buffer`. Its weight is ``output_layer.weight``, or
            without one the result of ``shared_embedding_or_output_weight()``.
        is_last_stage: whether this rank has the output layer.
        tp_group: None is one rank.

    Raises:
        GradientError: there is no weight, or the buffers hold different numbers of microbatches.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        >>> finish_embedding_wgrad_compute(config, torch.nn.Linear(4, 8), is_last_stage=True, tp_group=None)
    """
    if not is_last_stage or not getattr(config, "defer_embedding_wgrad_compute", False):
        return
    inputs, gradients = embedding_module.embedding_activation_buffer, embedding_module.grad_output_buffer
    if len(inputs) != len(gradients):
        raise GradientError(
            f"{type(embedding_module).__name__} has {len(inputs)} inputs of its output layer in {_BUFFERS[0]} and "
            f"{len(gradients)} gradients in {_BUFFERS[1]}; each input needs its gradient"
        )
    if not inputs:
        return
    weight = _weight_of(embedding_module)
    shared = size_of(tp_group) > 1 and bool(getattr(config, "sequence_parallel", False))
    following = _start_gather(inputs[0], tp_group) if shared else None
    while inputs:
        x = inputs.pop(0)
        if following is not None:
            x, handle = following
            wait_inside(handle)
            following = _start_gather(inputs[0], tp_group) if inputs else None
        add_gradient(weight, _weight_gradient(x, gradients.pop(0)))


def deferred_weight_gradients(config: Any, model: Any, *, is_last_stage: bool, tp_group: Any) -> Callable[[], None]:
    """Clear the buffers for a new step, and return the function that computes its deferred gradients (idempotent).

    Call it before any sum of the weight's gradient: the ``REDUCE`` of a tied weight, and the data-parallel reduction.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=False)
        >>> finish = deferred_weight_gradients(config, torch.nn.Linear(4, 8), is_last_stage=True, tp_group=None)
        >>> finish()
    """
    module = clear_embedding_activation_buffer(config, model, is_last_stage)
    return partial(finish_embedding_wgrad_compute, config, module, is_last_stage and module is not None, tp_group)


def _has_buffers(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), list) for name in _BUFFERS)


def _without_buffers(module: Any) -> GradientError:
    return GradientError(
        f"model {type(module).__name__} has no lists {' and '.join(_BUFFERS)}; with defer_embedding_wgrad_compute the "
        "module of the output layer has both, empty at first"
    )


def _weight_of(module: Any) -> torch.nn.Parameter:
    if (weight := getattr(getattr(module, "output_layer", None), "weight", None)) is None:
        weight = getattr(module, "shared_embedding_or_output_weight", lambda: None)()
    if not isinstance(weight, torch.nn.Parameter):  # another tensor would lose its gradient
        raise GradientError(f"{type(module).__name__} has no Parameter as output_layer.weight, nor a shared one")
    return weight
