"""One forward and one backward of one stage: what a schedule is made of, with the seeds' names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pipegrid.schedules.arguments import require, require_function, require_integer
from pipegrid.schedules.autocasting import autocast
from pipegrid.schedules.config import option, unwrapped_attribute
from pipegrid.schedules.engine import run_backward, shape_of_gradient
from pipegrid.schedules.errors import StepArgumentError

_MODEL = "give a torch.nn.Module"


class LossError(ValueError):
    """A loss function returned something that cannot be a loss."""


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Tell every module of ``model`` that has a ``current_microbatch`` which one runs now.

    Raises:
        StepArgumentError: no module, or no number of a microbatch.
    """
    require("model", model, torch.nn.Module, _MODEL, error=StepArgumentError)
    require_integer("microbatch_id", microbatch_id, "microbatches count from 0", least=0, error=StepArgumentError)
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
        StepArgumentError: an argument of another kind, or ``forward_step_func`` did not return ``(output, loss_func)``.
            Only the last stage calls ``loss_func``, so that others may return None in its place.
        LossError: the loss function's result is none of the three documented forms.
    """
    remedy = "give a function f(data_iterator, model) that returns (output, loss_func)"
    require_function("forward_step_func", forward_step_func, remedy, error=StepArgumentError)
    require("model", model, torch.nn.Module, _MODEL, error=StepArgumentError)
    if is_first_microbatch:
        start = unwrapped_attribute(model, "set_is_first_microbatch")
        if start is not None:
            start()
    if current_microbatch is not None:
        name, remedy = "current_microbatch", "microbatches count from 0"
        require_integer(name, current_microbatch, remedy, least=0, error=StepArgumentError)
        set_current_microbatch(model, current_microbatch)
    as_list = isinstance(input_tensor, list)
    set_input_tensor = unwrapped_attribute(model, "set_input_tensor")
    if set_input_tensor is not None:
        set_input_tensor(input_tensor if as_list or isinstance(input_tensor, dict) else [input_tensor])
    elif input_tensor is not None and any(item is not None for item in _values(input_tensor)):
        raise StepArgumentError(
            f"{type(model).__name__} has no set_input_tensor(input_tensor), but this stage receives an activation; "
            "give it the method (it is called before each forward with what arrived)"
        )
    extra = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    with autocast(config, model):
        result = forward_step_func(data_iterator, model, *extra)
    output, loss_func = _output_and_loss(result, is_last_stage=is_last_stage)
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


def _output_and_loss(result: Any, *, is_last_stage: bool) -> tuple[Any, Any]:
    """Taken apart only where it is a pair: an activation whose first axis is 2 comes apart as well."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        found = _describe(result)
    elif not callable(result[1]) and (is_last_stage or result[1] is not None):
        found = f"({_describe(result[0])}, {_describe(result[1])})"
    else:
        return result[0], result[1]
    raise StepArgumentError(
        f"forward_step_func returned {found}; it returns (output, loss_func), and loss_func is called with the output "
        "on the last stage: return model(...), loss_func"
    )


def _values(payload: Any) -> list[Any]:
    if isinstance(payload, dict):
        return list(payload.values())
    return list(payload) if isinstance(payload, (list, tuple)) else [payload]


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
      ``config.calculate_per_token_loss``: then it is a pure sum, finished by ``finalize_model_grads_func``.
      ``num_tokens`` may be the sum of tokens' weights, which need not be whole;
    - anything at all, with ``collect_non_loss_data``.

    The user's loss tensor is not modified. ``info`` (or the anything) is appended to ``forward_data_store``.

    Returns:
        ``(output, num_tokens)``: the scaled loss on the last stage, ``output_tensor`` elsewhere.

    Raises:
        StepArgumentError: an argument of another kind.
        LossError: the loss function's result is none of the documented forms.
    """
    del model
    require_integer("num_microbatches", num_microbatches, "give those of a step", error=StepArgumentError)
    if cp_group_size is not None:
        require_integer(
            "cp_group_size", cp_group_size, "give the ranks of cp, 1 or None without", error=StepArgumentError
        )
    remedy = "give a list, to which what the loss function says is appended"
    require("forward_data_store", forward_data_store, list, remedy, error=StepArgumentError)
    if is_last_stage is None:
        raise StepArgumentError("is_last_stage is None; pass is_last_stage=True on the stage that has the loss")
    num_tokens = torch.zeros((), dtype=torch.int64)
    if not is_last_stage:
        return output_tensor, num_tokens
    require_function("loss_func", loss_func, "give a function of the output", error=StepArgumentError)
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
        num_tokens = _tokens(result[1])
        if not option(config, "calculate_per_token_loss"):
            # Weights are counted in float64, which must not widen the loss.
            loss = (loss / torch.clamp(num_tokens.to(loss.device), min=1) / num_microbatches).to(loss.dtype)
    elif option(config, "calculate_per_token_loss"):
        raise LossError(
            "calculate_per_token_loss is set, but the loss function returned (loss, info) without a number of tokens; "
            "return (sum over tokens, num_tokens, info)"
        )
    else:
        loss = loss * ((cp_group_size or 1) / num_microbatches)
    forward_data_store.append(info)
    return loss, num_tokens.detach()


def _tokens(counted: Any) -> torch.Tensor:
    """A number of tokens, to be added up exactly: whole ones as int64, weighted ones as float64."""
    if not isinstance(counted, (int, float, torch.Tensor)) or (
        isinstance(counted, torch.Tensor) and counted.numel() != 1
    ):
        raise LossError(
            f"the loss function counted {_describe(counted)} as num_tokens; return their number, or the sum of their "
            "weights: an int, a float or a tensor with one element"
        )
    whole = isinstance(counted, int) if not isinstance(counted, torch.Tensor) else not counted.is_floating_point()
    return torch.as_tensor(counted, dtype=torch.int64 if whole else torch.float64).reshape(())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if callable(value) or (isinstance(value, (list, dict)) and value):
        return f"a {type(value).__name__}"
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

    Raises:
        StepArgumentError: something else than tensors, or gradients that are not those of the outputs.
    """
    del model_type
    inputs = _tensors("input_tensor", input_tensor)
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
    outputs = _tensors("output_tensor", output_tensor)
    scale = option(config, "grad_scale_func")
    if output_tensor_grad is None:
        if scale is not None:
            outputs = [None if tensor is None else scale(tensor) for tensor in outputs]
        gradients: list[torch.Tensor | None] = [None if loss is None else torch.ones_like(loss) for loss in outputs]
    else:
        gradients = _tensors("output_tensor_grad", output_tensor_grad)
    if len(gradients) != len(outputs):
        raise StepArgumentError(
            f"{len(outputs)} outputs but {len(gradients)} gradients; a gradient (or None) is needed for each output"
        )
    deallocated = bool(option(config, "deallocate_pipeline_outputs"))
    for output, gradient in zip(outputs, gradients, strict=True):
        if not (deallocated or output is None or gradient is None or output.shape == gradient.shape):
            raise StepArgumentError(
                f"output_tensor_grad has a tensor of shape {tuple(gradient.shape)} for an output of shape "
                f"{tuple(output.shape)}; pass the gradient that was received for it"
            )
    backward_roots(outputs, gradients, deallocated=deallocated)
    return map_tensors(input_tensor, gradient_of)


def _tensors(name: str, payload: Any) -> list[torch.Tensor | None]:
    tensors = flatten(payload)
    for tensor in tensors:
        remedy = "a payload is made of tensors, None, and lists, tuples and dicts of them"
        require(f"a part of {name}", tensor, (torch.Tensor, type(None)), remedy, error=StepArgumentError)
    return tensors


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

    Args:
        output: has one element, because it was freed or is a loss.
        grad_output: of the shape that ``output`` had before; None is a one, for an output that always had one element.

    Raises:
        StepArgumentError: no tensors, the output still has its storage, or no gradient is given for an output that had
            another number of elements than one, or one of another shape.
    """
    if not isinstance(output, torch.Tensor) or not (grad_output is None or isinstance(grad_output, torch.Tensor)):
        raise StepArgumentError(
            f"output is {_describe(output)} and grad_output {_describe(grad_output)}; both must be tensors, or "
            "grad_output None: call custom_backward once for each tensor of a payload"
        )
    if output.numel() != 1:
        raise StepArgumentError(
            f"output has shape {tuple(output.shape)}: it was not deallocated; call torch.autograd.backward instead"
        )
    shape = shape_of_gradient(output)
    if grad_output is None and math.prod(shape) != 1:
        raise StepArgumentError(
            f"output had shape {shape} before it was freed, and no gradient was given; only an output of one element "
            "has one by itself: pass the gradient that was received for it"
        )
    if grad_output is not None and tuple(grad_output.shape) != shape:
        raise StepArgumentError(
            f"grad_output has shape {tuple(grad_output.shape)}, but output had shape {shape} before it was freed, and "
            "the engine would sum up what is too large; pass the gradient that was received for it"
        )
    run_backward([output], [output.new_ones(shape) if grad_output is None else grad_output])


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the storage of an activation that was sent; its ``grad_fn`` stays for the backward.

    Raises:
        StepArgumentError: no tensor, or a view: freeing it would free its base as well.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    require("out", out, torch.Tensor, "call it once for each tensor of a payload", error=StepArgumentError)
    require_deallocatable(out)
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def require_deallocatable(out: torch.Tensor | None) -> None:
    """Refuse a view: freeing it would free its base as well. A leaf is never freed, so it may be one."""
    if out is None or out.grad_fn is None:
        return
    if out._base is not None:  # noqa: SLF001 -- the documented way to ask whether a tensor is a view
        raise StepArgumentError(
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
        items = [map_tensors(item, function) for item in payload]
        # A named tuple takes its fields one by one.
        return type(payload)(*items) if hasattr(payload, "_fields") else type(payload)(items)
    return None if payload is None else function(payload)
