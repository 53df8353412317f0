"""Models of the step functions, one call of a step function, and the same step in one process."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.schedules import PipelineConfig, forward_backward_pipelining_without_interleaving


def config_for(ranks, **options):
    """In float64, with sends that block and messages that are staged as the run asks for."""
    given = {"pipeline_dtype": torch.float64, "strict": ranks.strict_sends, "staged": ranks.backend == "staged"}
    return PipelineConfig(**given | options)


class Model(nn.Module):
    """What a step function asks of a model: its config, and a place for what arrives."""

    def __init__(self, config=None):
        super().__init__()
        self.config, self.received = config, [None]

    def set_input_tensor(self, received):
        self.received = received


class Wrapped(Model):
    """A module as a step function takes it."""

    def __init__(self, module, config=None):
        super().__init__(config)
        self.module = module

    def forward(self, x):
        return self.module(x)


class Part(Model):
    """A stage: one linear layer with a tanh behind it. Its weights depend on ``seed`` alone."""

    def __init__(self, seed, width, config=None, *, dtype=torch.float64):
        super().__init__(config)
        torch.manual_seed(seed)
        self.layer = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def mean_loss(output):
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def counted_loss(output, counted, *, per_token):
    """The mean; or with ``per_token`` the sum over the tokens that count, and how many they are."""
    if per_token:
        return (output.square().mean(dim=-1) * counted).sum(), counted.sum(), None
    return output.square().mean(), None


def forward_step(iterator, model, *, data, loss=mean_loss):
    """What has arrived goes through the model; on a first stage ``data(next(iterator))`` does."""
    (x,) = model.received
    return model(data(next(iterator)) if x is None else x), loss


def call(function=forward_backward_pipelining_without_interleaving, *, model, count, **options):
    """A call of a step function with ``count`` microbatches, by number; ``options`` are added, or come instead."""
    numbers = [iter(range(count)) for _ in model] if isinstance(model, list) else iter(range(count))
    given = {"data_iterator": numbers, "num_microbatches": count, "seq_length": 1, "micro_batch_size": 1}
    return function(model=model, **given | options)


def chain_in_one_process(parts, batches, divisor, loss=mean_loss):
    """A step of a chain of ``parts`` without a pipeline, with their gradients; the infos of ``loss`` by microbatch."""
    infos = []
    for x in batches:
        for part in parts:
            x = part(x)
        scalar, *_, info = loss(x)
        (scalar / divisor).backward()
        infos.append(info)
    return infos


def require_same_gradients(model, expected, *, rtol=1e-11, atol=1e-14):
    """Of each parameter in turn."""
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=rtol, atol=atol)
