"""The promise, tried out: the gradients of the pipelined step against the same step in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from digit_reader.job import Job, dtype_of, token_loss
from digit_reader.modules import IMAGES, LANGUAGE, SIGNAL
from digit_reader.options import Options
from digit_reader.parts import joined, whole_of
from digit_reader.samples import Samples
from digit_reader.stepping import run_step

BOUNDS = {"float32": 1e-5, "float64": 1e-10}
"""The largest relative difference that a dtype may show."""


class Unsharded(nn.Module):
    """The whole model in one process, cut nowhere."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.encoders = options.encoders
        self.modules_by_name = nn.ModuleDict({name: whole_of(options, name) for name in (*self.encoders, LANGUAGE)})

    def gradients(self, samples: Samples, indices: range) -> dict[tuple[str, str], torch.Tensor]:
        """Gradients of the token-weighted loss over ``indices``, by module and name of the parameter."""
        dtype = next(self.parameters()).dtype
        read = {IMAGES: samples.strips, SIGNAL: samples.signals}
        seen = {name: self.modules_by_name[name](read[name](indices).to(dtype)) for name in self.encoders}
        logits = self.modules_by_name[LANGUAGE](joined(seen, self.encoders), samples.inputs(indices))
        loss, tokens, _ = token_loss(logits, samples.targets(indices))
        torch.autograd.backward(loss / tokens)
        return {
            (module, name): _gradient(parameter)
            for module, whole in self.modules_by_name.items()
            for name, parameter in whole.named_parameters()
        }


def first_step_difference(job: Job, samples: Samples) -> float:
    """The `largest_difference` after one step from the start; the same on every rank."""
    run_step(job, samples, 0)
    return largest_difference(job, samples, range(job.options.batch))


def largest_difference(job: Job, samples: Samples, indices: range) -> float:
    """Over all parameters of the job, ||a - b|| / max(||b||, 1e-3 ||all|| / sqrt(tensors)); the same on every rank.

    Every rank recomputes the whole step alone (the model is small) and compares what it holds. The floor keeps
    parameters whose gradient is zero in exact arithmetic from dividing rounding by rounding.
    """
    expected = Unsharded(job.options).to(dtype_of(job.options)).gradients(samples, indices)
    everything = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    floor = 1e-3 * everything / len(expected) ** 0.5
    worst = torch.zeros((), dtype=torch.float64)
    for module, parts in job.modules.items():
        for name, parameter in (found for part in parts for found in part.named_parameters()):
            b = expected[module, name]
            difference = (_gradient(parameter).cpu() - b).norm() / torch.maximum(b.norm(), floor)
            worst = torch.maximum(worst, difference.double())
    # Not a number is as far off as can be, and must not get lost in a maximum.
    worst = torch.nan_to_num(worst, nan=torch.inf).to(job.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
