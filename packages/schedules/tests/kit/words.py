"""A model of words whose first stage looks them up in the table by which its last one scores them."""

from __future__ import annotations

import torch
from torch import nn

from .models import WIDTH, Model

WORDS = 7


class WordStage(Model):
    """A layer; the first stage looks words up before it, the last one scores words after it, each by its own copy."""

    def __init__(self, stage, num_stages, config=None):
        super().__init__(config)
        self.first, self.last = stage == 0, stage == num_stages - 1
        torch.manual_seed(stage)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        if self.first or self.last:
            torch.manual_seed(99)
            self.word = nn.Parameter(torch.randn(WORDS, WIDTH, dtype=torch.float64))

    def forward(self, x):
        x = torch.tanh(self.layer(nn.functional.embedding(x, self.word) if self.first else x))
        return x @ self.word.t() if self.last else x


def word_stages(num_stages):
    """All stages of one process, with one table."""
    stages = [WordStage(stage, num_stages) for stage in range(num_stages)]
    stages[-1].word = stages[0].word
    return stages
