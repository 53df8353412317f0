"""One backward of one stage, and the release of sent activations, under Megatron's names."""

from __future__ import annotations

import math
from typing import Any

import torch

from pipegrid.schedules.autograd import free_storage, run_backward, shape_of_gradient
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.runtime import describe, gradient_of, map_tensors, tensors_of


def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any) -> Any:
    """Backward through one stage.

    Args:
        input_tensor: input of the stage's forward (a tensor, a list, a dict by module, or None).
        output_tensor: its output, in one of these forms; on the last stage the loss.
        output_tensor_grad: gradients of the same structure as ``output_tensor``; None on the last stage.
        model_type: not used; in the signature for callers that pass it by position.
        config: ``grad_scale_func``, ``deallocate_pipeline_outputs``.

    Returns:
        The gradients of ``input_tensor``, in its structure (None on a first stage, and for entries that do not
        require grad).

    Raises:
        StepArgumentError: a payload without tensors, or gradients that do not match the outputs.
    """
    del model_type
    inputs = tensors_of("input_tensor", input_tensor)
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
            tensor.retain_grad()
    outputs = tensors_of("output_tensor", output_tensor)
    scale = option(config, "grad_scale_func")
    if output_tensor_grad is None:
        if scale is not None:
            outputs = [None if tensor is None else scale(tensor) for tensor in outputs]
        gradients: list[torch.Tensor | None] = [None if loss is None else torch.ones_like(loss) for loss in outputs]
    else:
        gradients = tensors_of("output_tensor_grad", output_tensor_grad)
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


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from an output whose storage `deallocate_output_tensor` has freed.

    ``torch.autograd.backward`` compares the shapes of output and gradient, which a freed output fails; the
    engine itself does not.

    Args:
        output: one element: freed, or a loss.
        grad_output: of the shape before freeing; None is a one, for an output that always had one element.

    Raises:
        StepArgumentError: an argument is not a tensor, the output still has its storage, or the gradient is missing or
            has another shape than the output before freeing.
    """
    if not isinstance(output, torch.Tensor) or not (grad_output is None or isinstance(grad_output, torch.Tensor)):
        raise StepArgumentError(
            f"output is {describe(output)} and grad_output {describe(grad_output)}; both must be tensors, or "
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
            "has a default: pass the gradient that was received for it"
        )
    if grad_output is not None and tuple(grad_output.shape) != shape:
        raise StepArgumentError(
            f"grad_output has shape {tuple(grad_output.shape)}, but output had shape {shape} before it was freed, and "
            "the engine would sum a larger one to that shape; pass the gradient that was received for it"
        )
    run_backward([output], [output.new_ones(shape) if grad_output is None else grad_output])


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the storage of an activation that was sent; its ``grad_fn`` stays for the backward.

    Raises:
        StepArgumentError: no tensor, or a view: its base shares the storage.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if not isinstance(out, torch.Tensor):
        raise StepArgumentError(f"out is {describe(out)}; it must be a tensor: call once for each tensor of a payload")
    free_storage(out)
