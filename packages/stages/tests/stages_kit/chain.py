"""The stages of a model in one process: a microbatch through them in turn, and gradients by the names of the model."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pipegrid.stages import pipeline_stage


def stages_of(make, layout, *, ranks=None, **options):
    """All stages of a model, in float64, with the values of seed 1.

    Cut as on ``ranks`` ranks, to which the stages go in turn; by default as on one for each stage.
    """
    stages = [None] * (layout.count("|") + 1)
    for rank in range(ranks or len(stages)):
        torch.manual_seed(1)
        numbers = range(rank, len(stages), ranks or len(stages))
        for number, stage in zip(
            numbers, pipeline_stage(make, layout, numbers, allow_empty=True, **options), strict=True
        ):
            stages[number] = stage.double()
    return stages


def sent(payload):
    """The payload as it arrives on the next stage."""
    return tree_map_only(torch.Tensor, lambda sent: sent.detach().clone().requires_grad_(sent.requires_grad), payload)


def step(stages, batch, loss_of):
    """Forward and backward through the stages in turn, as if each were on a rank of its own; the loss."""
    links, under_way, left = [], {}, None  # (stage, output, its copy elsewhere); values by edge; the last output
    for number, stage in enumerate(stages):
        values = {edge: tensors for edge, tensors in under_way.items() if edge.destination == number}
        arrived, given = sent(left), sent(values)
        links += [(number - 1, *pair) for pair in zip(tree_leaves(left), tree_leaves(arrived), strict=True)]
        for edge, tensors in values.items():
            links += [(edge.source, *pair) for pair in zip(tensors, given[edge], strict=True)]
        stage.set_input_tensor([arrived])
        stage.set_skips(given)
        left = stage(**batch)
        under_way |= stage.take_skips()
    loss = loss_of(left)
    loss.backward()
    for number in reversed(range(len(stages) - 1)):
        pairs = [
            (output, received.grad)
            for source, output, received in links
            if source == number and isinstance(output, torch.Tensor) and output.requires_grad
            if received.grad is not None
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
