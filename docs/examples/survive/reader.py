"""The digit reader as a pipeline of one module: its image encoder and its language model on two stages, in replicas."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from digit_reader.encoder import ImageEncoder
from digit_reader.job import token_loss
from digit_reader.language import LanguageStage
from digit_reader.samples import Samples
from digit_reader.sizes import Sizes
from digit_reader.strips import Split, load_scans
from pipegrid.schedules import PipelineConfig

POSITIONS, REPLICAS, MICROBATCHES, STRIPS = 2, 2, 4, 6
UNITS = REPLICAS * MICROBATCHES
BATCH = UNITS * STRIPS
TESTED = 512
SIZES = Sizes(hidden=48, channels=18)
LAYERS = ("embedding_0",), ("decoder_0", "decoder_1", "loss_0")
LEARNING_RATE, BETAS, WARMUP, MAX_NORM = 3e-3, (0.9, 0.98), 50, 1.0


class Stage(nn.Module):
    """A stage: the image encoder and the texts' embedding, or the decoders and the head. In float64."""

    def __init__(self, number: int, config: PipelineConfig | None = None) -> None:
        super().__init__()
        self.number, self.config = number, config
        self.received: list[Tensor] = []
        self.encoder = None if number else ImageEncoder(SIZES, seed=0)
        self.language = LanguageStage(LAYERS[number], SIZES, seed=0)
        self.double()

    def set_input_tensor(self, received: list[Tensor]) -> None:
        """Called by the step functions with what the stage before has sent."""
        self.received = received

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        """Strips and token ids to the stream, on the first stage; the stream to logits, on the last."""
        y: Tensor = self.language(x if self.encoder is None else self.encoder(x), text)
        return y


def samples(split: Split) -> Samples:
    """The strips of a split."""
    return Samples(split, 0, load_scans(split))


def unit(step: int, replica: int, microbatch: int) -> range:
    """The strips of a microbatch: a function of its numbers, so that any rank may draw them."""
    first = (step - 1) * BATCH + (replica * MICROBATCHES + microbatch) * STRIPS
    return range(first, first + STRIPS)


def optimizer_of(stages: nn.Module) -> torch.optim.Optimizer:
    """An optimizer; each rank steps its own."""
    return torch.optim.AdamW(stages.parameters(), lr=LEARNING_RATE, betas=BETAS)


def optimize(optimizer: torch.optim.Optimizer, norm: Tensor, step: int, steps: int) -> None:
    """Clip gradients of norm ``norm`` and step: a warmup, then half a cosine, down to a fiftieth."""
    rate = min(1.0, step / WARMUP) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * (step - 1) / steps)))
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * rate
        for parameter in group["params"]:
            parameter.grad.mul_(torch.clamp(MAX_NORM / norm, max=1.0))
    optimizer.step()
    optimizer.zero_grad()


def whole() -> nn.ModuleList:
    """All stages."""
    return nn.ModuleList([Stage(number) for number in range(POSITIONS)])


def read(stages: nn.ModuleList, strips: Samples, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of whole strips, a sum over words; how many words; how many strips were read without an error."""
    first, last = stages
    logits = last(first(strips.strips(numbers).double(), strips.inputs(numbers)))
    loss, words, info = token_loss(logits, strips.targets(numbers))
    return loss, words, info["exact"]


def accuracy(stages: nn.ModuleList) -> float:
    """The share of strips of unseen scans that are read exactly."""
    with torch.no_grad():
        return read(stages, samples(Split.TEST), range(TESTED))[2].item() / TESTED


def train_alone(steps: int) -> tuple[nn.ModuleList, list[float]]:
    """The same training in one process, undisturbed: the model, and the losses."""
    stages, strips = whole(), samples(Split.TRAIN)
    optimizer, losses = optimizer_of(stages), []
    for step in range(1, steps + 1):
        loss, words, _ = read(stages, strips, range((step - 1) * BATCH, step * BATCH))
        torch.autograd.backward(loss / words)
        losses.append((loss / words).item())
        norm = torch.nn.utils.get_total_norm([p.grad for p in stages.parameters() if p.grad is not None])
        optimize(optimizer, norm, step, steps)
    return stages, losses
