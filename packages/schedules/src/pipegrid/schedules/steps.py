"""One forward and one backward of one stage: what a schedule is made of, with the seeds' names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from pipegrid.schedules.config import option, unwrapped_attribute
from pipegrid.schedules.engine import run_backward


class LossError(ValueError):
    """A loss function returned something that cannot be a loss."""


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Tell every module of ``model`` that has a ``current_microbatch`` which one runs now."""
    for module in model.modules():
        if hasattr(module, "current_microbatch"):
            setattr(module, "current_microbatch", microbatch_id)  # noqa: B010 -- a plain attribute, not a parameter


def forward_step(
    forward_step_func: Callable[..., tuple[Any, Callable[[Any], Any]]],
    data_iterator: Any,
    model: torch.nn.Module,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, torch.Tensor]:
    """Run ``forward_step_func`` on one microbatch; on the last stage, its loss function too.

    ``input_tensor`` (a tensor, a list of tensors, or a dict by module) is handed to the model's
    ``set_input_tensor``. A first stage ignores it and reads ``data_iterator``.

    Returns:
        What the stage hands on (on the last stage the scaled loss; a list where ``input_tensor`` was a list)
        and the number of tokens its loss counted (0 elsewhere).

    Raises:
        LossError: the loss function's result is none of the three documented forms.
    """
    if is_first_microbatch:
        start = unwrapped_attribute(model, "set_is_first_microbatch")
        if start is not None:
            start()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)
    as_list = isinstance(input_tensor, list)
    set_input_tensor = unwrapped_attribute(model, "set_input_tensor")
    if set_input_tensor is not None:
        set_input_tensor(input_tensor if as_list or isinstance(input_tensor, dict) else [input_tensor])
    elif input_tensor is not None and any(item is not None for item in _values(input_tensor)):
        raise ValueError(
            f"{type(model).__name__} has no set_input_tensor(input_tensor), but this stage receives an activation; "
            "give it the method (it is called before each forward with what arrived)"
        )
    extra = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    with _autocast(config, model):
        output, loss_func = forward_step_func(data_iterator, model, *extra)
    output, num_tokens = forward_step_calc_loss(
        model,
        output,
        loss_func,
        config,
        vp_stage,
        collect_non_loss_data,
        num_microbatches,
        forward_data_store,
        cp_group_size,
        is_last_stage,
    )
    if as_list and not isinstance(output, list):
        output = [output]
    return output, num_tokens


def _values(payload: Any) -> list[Any]:
    if isinstance(payload, dict):
        return list(payload.values())
    return list(payload) if isinstance(payload, (list, tuple)) else [payload]


def _autocast(config: Any, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    if not option(config, "enable_autocast"):
        return contextlib.nullcontext()
    parameter = next(model.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    dtype = option(config, "autocast_dtype") or option(config, "pipeline_dtype")
    return torch.autocast(device, dtype=dtype)


def forward_step_calc_loss(
    model: torch.nn.Module,
    output_tensor: Any,
    loss_func: Callable[..., Any],
    config: Any,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[Any, torch.Tensor]:
    """The loss of one microbatch, scaled so that the sum over microbatches is the step's loss.

    ``loss_func(output_tensor)`` returns one of

    - ``(loss, info)``: the loss is divided by the number of microbatches and multiplied by the cp size (each
      cp rank returns its share of the mean, and the gradient reduction averages over cp as over dp);
    - ``(loss, num_tokens, info)``: divided by ``max(num_tokens, 1)`` and the number of microbatches, unless
      ``config.calculate_per_token_loss``: then it is a pure sum, finished by ``finalize_model_grads_func``;
    - anything at all, with ``collect_non_loss_data``.

    The user's loss tensor is not modified. ``info`` (or the anything) is appended to ``forward_data_store``.

    Returns:
        ``(output, num_tokens)``: the scaled loss on the last stage, ``output_tensor`` elsewhere.
    """
    del model
    if is_last_stage is None:
        raise ValueError("is_last_stage is not known here; pass is_last_stage=True on the stage that has the loss")
    num_tokens = torch.zeros((), dtype=torch.int64)
    if not is_last_stage:
        return output_tensor, num_tokens
    if collect_non_loss_data:
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        return output_tensor, num_tokens
    result = loss_func(output_tensor)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise LossError(
            f"the loss function returned {_describe(result)}; expected (loss, info) or (loss, num_tokens, info), or "
            "anything at all with collect_non_loss_data=True"
        )
    loss, info = result[0], result[-1]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        where = "" if vp_stage is None else f" on chunk {vp_stage}"
        raise LossError(
            f"the loss{where} is {_describe(loss)}; a loss is a tensor with one element: reduce it (mean or sum) in "
            "the loss function"
        )
    if len(result) == 3:
        num_tokens = torch.as_tensor(result[1])
        if not option(config, "calculate_per_token_loss"):
            loss = loss / torch.clamp(num_tokens.to(loss.device), min=1) / num_microbatches
    elif option(config, "calculate_per_token_loss"):
        raise LossError(
            "calculate_per_token_loss is set, but the loss function returned (loss, info) without a number of tokens; "
            "return (sum over tokens, num_tokens, info)"
        )
    else:
        loss = loss * ((cp_group_size or 1) / num_microbatches)
    forward_data_store.append(info)
    return loss, num_tokens


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__} {value!r}"


def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any) -> Any:
    """Backward through one stage.

    Args:
        input_tensor: what the stage's forward received (a tensor, a list, a dict by module, or None).
        output_tensor: what it handed on, of the same kinds; on the last stage the loss.
        output_tensor_grad: gradients of the same structure as ``output_tensor``; None on the last stage.
        model_type: not used; in the signature for callers that pass it by position.
        config: ``grad_scale_func``, ``deallocate_pipeline_outputs``.

    Returns:
        The gradients of ``input_tensor``, in its structure (None on a first stage, and for entries that do not
        require grad).
    """
    del model_type
    inputs = flatten(input_tensor)
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
    outputs = flatten(output_tensor)
    scale = option(config, "grad_scale_func")
    if output_tensor_grad is None:
        if scale is not None:
            outputs = [None if tensor is None else scale(tensor) for tensor in outputs]
        gradients: list[torch.Tensor | None] = [None if loss is None else torch.ones_like(loss) for loss in outputs]
    else:
        gradients = flatten(output_tensor_grad)
    if len(gradients) != len(outputs):
        raise ValueError(
            f"{len(outputs)} outputs but {len(gradients)} gradients; a gradient (or None) is needed for each output"
        )
    backward_roots(outputs, gradients, deallocated=bool(option(config, "deallocate_pipeline_outputs")))
    return map_tensors(input_tensor, gradient_of)


def backward_roots(
    outputs: list[torch.Tensor | None], gradients: list[torch.Tensor | None], *, deallocated: bool = False
) -> None:
    """Backward from those ``outputs`` that require grad and have a gradient."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(outputs, gradients, strict=True)
        if tensor is not None and tensor.requires_grad and gradient is not None
    ]
    if not pairs:
        return
    if deallocated:
        run_backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    else:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient to send back for a received tensor.

    Zeros where it requires grad but was not used, so that what travels has the same form for every microbatch.
    """
    if not tensor.requires_grad:
        return None
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from an output whose storage was freed by `deallocate_output_tensor`.

    ``torch.autograd.backward`` compares the shapes of output and gradient, which a freed output fails; the
    engine itself does not.

    Raises:
        ValueError: the output still has its storage, or no gradient is given for a non-scalar.
    """
    if output.numel() != 1:
        raise ValueError(
            f"output has shape {tuple(output.shape)}: it was not deallocated; call torch.autograd.backward instead"
        )
    if not isinstance(output, torch.Tensor) or not (grad_output is None or isinstance(grad_output, torch.Tensor)):
        raise ValueError(f"output and grad_output must be tensors, got {type(output)} and {type(grad_output)}")
    gradient = torch.ones_like(output, memory_format=torch.preserve_format) if grad_output is None else grad_output
    run_backward([output], [gradient])


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the storage of an activation that was sent; its ``grad_fn`` stays for the backward.

    Raises:
        ValueError: the tensor is a view: freeing it would free its base as well.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    require_deallocatable(out)
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def require_deallocatable(out: torch.Tensor | None) -> None:
    """Refuse a view: freeing it would free its base as well. A leaf is never freed, so it may be one."""
    if out is None or out.grad_fn is None:
        return
    if out._base is not None:  # noqa: SLF001 -- the documented way to ask whether a tensor is a view
        raise ValueError(
            f"an output of shape {tuple(out.shape)} is a view of another tensor and cannot be deallocated; return "
            "output.clone(), or set deallocate_pipeline_outputs=False"
        )


def flatten(payload: Any) -> list[torch.Tensor | None]:
    """The tensors (and None) of a payload, in order."""
    if isinstance(payload, torch.Tensor):
        return [payload]
    if isinstance(payload, dict):
        return [leaf for item in payload.values() for leaf in flatten(item)]
    if isinstance(payload, (list, tuple)):
        return [leaf for item in payload for leaf in flatten(item)]
    return [payload]


def map_tensors(payload: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The payload with ``function`` applied to each tensor; None stays None."""
    if isinstance(payload, torch.Tensor):
        return function(payload)
    if isinstance(payload, dict):
        return {key: map_tensors(item, function) for key, item in payload.items()}
    if isinstance(payload, (list, tuple)):
        return type(payload)(map_tensors(item, function) for item in payload)
    return None if payload is None else function(payload)
