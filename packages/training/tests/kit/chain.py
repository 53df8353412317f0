"""The stages of a model in one process: a microbatch through them in turn, and gradients by the names of the model."""

from __future__ import annotations

import torch


def tensors(payload):
    """The tensors of what a stage sends."""
    if isinstance(payload, torch.Tensor):
        return [payload]
    return [one for item in payload for one in tensors(item)] if isinstance(payload, tuple) else []


def sent(payload):
    """The payload as it arrives on the next stage."""
    if isinstance(payload, torch.Tensor):
        return payload.detach().clone().requires_grad_(payload.requires_grad)
    return tuple(map(sent, payload)) if isinstance(payload, tuple) else payload


def step(stages, batch, loss_of):
    """Forward and backward through the stages in turn, as if each were on a rank of its own; the loss."""
    arrived, left = [None], []
    for stage in stages:
        stage.set_input_tensor([arrived[-1]])
        left.append(stage(**batch))
        arrived.append(sent(left[-1]) if not stage.is_last else None)
    loss = loss_of(left[-1])
    loss.backward()
    for outputs, inputs in reversed(list(zip(left[:-1], arrived[1:-1], strict=True))):
        pairs = [
            (output, received.grad)
            for output, received in zip(tensors(outputs), tensors(inputs), strict=True)
            if output.requires_grad and received.grad is not None
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    return loss.detach()


def gradients(whole, stages):
    """For each parameter of the model its name, its gradient and that of the stages, summed over tied copies."""
    of_name = dict(whole.named_parameters(remove_duplicate=False))
    summed, counted = {}, set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if id(parameter) not in counted and parameter.grad is not None:
                key = id(of_name[name])
                summed[key] = summed.get(key, 0) + parameter.grad
            counted.add(id(parameter))
    return [(name, parameter.grad, summed.get(id(parameter))) for name, parameter in whole.named_parameters()]
