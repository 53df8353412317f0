"""Models for step functions, one call of a step function, and the same step in one process."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from autograd_kit.blocks import WIDTH
from pipegrid.schedules import forward_backward_no_pipelining


class Model(nn.Module):
    """What a step function asks of a model: its config, and a place for what arrives."""

    def __init__(self, config=None):
        super().__init__()
        self.config, self.received = config, [None]

    def set_input_tensor(self, received):
        self.received = received


class Part(Model):
    """A stage in float64: linear layers, each with a tanh behind it. Its weights depend on ``seed`` alone."""

    def __init__(self, seed, config=None, *, layers=1):
        super().__init__(config)
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(layers)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def microbatch(index, lane=0, *, rows=3):
    generator = torch.Generator().manual_seed(1000 + 100 * lane + index)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def uneven(index):
    """A microbatch whose number of rows depends on its number."""
    return microbatch(index, rows=2 + index % 3)


def mean_loss(output):
    return output.square().mean(), {"loss": output.square().mean().item()}


def token_loss(output):
    return output.square().sum(), torch.tensor(len(output)), {"tokens": len(output)}


def forward_step(iterator, model, *, data=microbatch, loss=mean_loss):
    """The sum of what has arrived goes through the model; on a first stage ``data(next(iterator))`` does.

    The model may be in a wrapper, as its ``module``.
    """
    received = getattr(model, "module", model).received
    first, *others = (received.values() if isinstance(received, dict) else received) or [None]
    return model(data(next(iterator)) if first is None else sum(others, first)), loss


def step_on(lane, device="cpu"):
    """The forward step with the microbatches of a lane."""
    return partial(forward_step, data=lambda index: microbatch(index, lane).to(device))


def call(function=forward_backward_no_pipelining, *, model, count=4, **options):
    """A call of a step function with ``count`` microbatches, by number; ``options`` are added, or come instead."""
    numbers = [iter(range(count)) for _ in model] if isinstance(model, list) else iter(range(count))
    given = {"forward_step_func": forward_step, "data_iterator": numbers, "num_microbatches": count}
    sizes = {"seq_length": 1, "micro_batch_size": 1}
    return function(model=model, **given | sizes | options)


def in_one_process(parts, batches, divisor, loss=mean_loss):
    """The step without a pipeline: gradients are left in ``parts``; returns the infos of ``loss`` by microbatch."""
    infos = []
    for x in batches:
        for part in parts:
            x = part(x)
        scalar, *_, info = loss(x)
        (scalar / divisor).backward()
        infos.append(info)
    return infos
