"""Greedy decoding: the model writes one word after another and reads its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from digit_reader.vocabulary import BEGIN, PAD, TEXT_LENGTH


def greedy(logits_of: Callable[[Tensor], Tensor], batch: int) -> Tensor:
    """The token ids ``[batch, TEXT_LENGTH]`` that a model writes for ``batch`` strips.

    ``logits_of`` maps text ``[batch, TEXT_LENGTH]`` to logits ``[batch, TEXT_LENGTH, vocabulary]``; whatever computes
    them, in one process or along a pipeline. It is called once per position.
    """
    text = torch.full((batch, TEXT_LENGTH), PAD)
    text[:, 0] = BEGIN
    written = torch.full((batch, TEXT_LENGTH), PAD)
    for position in range(TEXT_LENGTH):
        written[:, position] = logits_of(text)[:, position].argmax(dim=-1)
        text[:, position + 1 : position + 2] = written[:, position : position + 1]
    return written


def exact(written: Tensor, targets: Tensor) -> Tensor:
    """Per strip, whether every word up to the end is right: ``[batch]`` of bool.

    ``written`` may also be the likeliest tokens given the *right* words so far, from a single forward pass: as long
    as each is right, greedy decoding is given the same words, so both agree on whether all are.
    """
    return ((written == targets) | (targets == PAD)).all(dim=1)
