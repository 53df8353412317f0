"""One backward of one stage, and the release of sent activations, under Megatron's names."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch

from pipegrid.autograd import free_storage, run_backward, shape_of_gradient
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.runtime import describe, gradient_of, map_tensors, tensors_of


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any = None, config: Any = None
) -> Any:
    """Backward through one stage: ``backward_step(input, output, gradient, config)``, or with a model type before it.

    Args:
        input_tensor: input of the stage's forward (a tensor, a list, a dict by module, or None).
        output_tensor: its output, in one of these forms; on the last stage the loss.
        output_tensor_grad: gradients of the same structure as ``output_tensor``; None on the last stage.
        model_type: not used; in the signature for callers that pass it by position. Without a ``config`` it is one.
        config: ``grad_scale_func``, ``deallocate_pipeline_outputs``.

    Returns:
        The gradients of ``input_tensor``, in its structure (None on a first stage, and for entries that do not
        require grad).

    Raises:
        StepArgumentError: no config, a payload without tensors, or gradients that do not match the outputs.
    """
    config = model_type if config is None else config
    if config is None or isinstance(config, enum.Enum):
        raise StepArgumentError(
            f"config is {describe(config)}; call backward_step(input_tensor, output_tensor, output_tensor_grad, config)"
        )
    for tensor in tensors_of("input_tensor", input_tensor):
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
        raise StepArgumentError(f"{len(outputs)} outputs but {len(gradients)} gradients; each output has one, or None")
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output is not None and output.requires_grad and gradient is not None
    ]
    if pairs:
        # torch's own function compares shapes, which a freed output fails
        backward = run_backward if option(config, "deallocate_pipeline_outputs") else torch.autograd.backward
        backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return map_tensors(input_tensor, gradient_of)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from an output whose storage `deallocate_output_tensor` has freed.

    ``torch.autograd.backward`` compares the shapes of output and gradient, which a freed output fails; the
    engine itself does not.

    Args:
        output: freed, or a loss.
        grad_output: of the shape before freeing; None is a one, for an output that always had one element.

    Raises:
        StepArgumentError: the gradient is missing, or has another shape than the output before freeing.
    """
    shape = shape_of_gradient(output)
    if grad_output is None and math.prod(shape) == 1:
        grad_output = output.new_ones(shape)
    if grad_output is None or tuple(grad_output.shape) != shape:  # the engine would sum a larger one
        raise StepArgumentError(
            f"grad_output is {describe(grad_output)}, and output had shape {shape} before it was freed; pass the "
            "gradient that was received for it"
        )
    run_backward([output], [grad_output])


def deallocate_output_tensor(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the storage of an activation that was sent; its ``grad_fn`` stays for the backward.

    Raises:
        StepArgumentError: a view, whose base shares the storage.
    """
    if out is not None and deallocate_pipeline_outputs:
        free_storage(out)
