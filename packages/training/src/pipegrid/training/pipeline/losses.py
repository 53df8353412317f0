"""Losses as sums with what they count, so that a step's mean is that of one process, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime import describe
from pipegrid.training.pipeline.microbatches import Microbatch
from pipegrid.training.stages.slicing.slice_batches import IGNORED

Counted = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]
"""A sum, what it counts, and both again, detached."""


def counted(total: Tensor, count: Tensor | float) -> Counted:
    """What a step function takes with ``calculate_per_token_loss``."""
    number = count if isinstance(count, Tensor) else torch.full((), count, device=total.device)
    return total, number, (total.detach().double(), number.detach().double())


class OwnLoss:
    """The ``loss`` of a Hugging Face model, a mean over tokens, as a sum over them.

    Models count by rules of their own: texts are predicted a token ahead, so that the first label of a row counts
    nowhere; encoder-decoders, classifiers and masked models count each label. Nothing of a model says which, so its
    first loss is compared with both.
    """

    def __init__(self) -> None:
        self._rule: int | None = None  # the index in `Microbatch.labels`

    def __call__(self, output: Any, microbatch: Microbatch) -> Counted:
        """The sum of the tokens' losses, and how many they are."""
        loss, logits, labels = (getattr(output, "loss", None), getattr(output, "logits", None), microbatch.labels)
        if labels is None or loss is None or logits is None:
            raise StageOutputError(
                f"the model returned {describe(output)} with the loss {describe(loss)}; its own loss needs `labels` in "
                "the batch, else give Pipeline(loss=f), f(output, microbatch) -> (sum, count)"
            )
        rule = self._rule
        if rule is None:
            if not labels[1] and (not labels[0] or loss.isnan()):  # a mean over no token, which tells nothing
                return counted(logits.sum() * 0.0, 0)
            rules = _rules(loss.detach(), logits.detach(), microbatch)
            rule = rules[0]
            self._rule = rule if len(rules) == 1 else None  # both count alike here, and perhaps not in the next one
        count = labels[rule]
        return counted(loss * count if count else logits.sum() * 0.0, count)


def given_loss(loss: Callable[..., Any]) -> Callable[[Any, Microbatch], Counted]:
    """``loss(output, inputs)``, a mean over the rows of a microbatch or ``(sum, count)``, as a sum."""

    def summed(output: Any, microbatch: Microbatch) -> Counted:
        found = loss(output, microbatch.inputs)
        if isinstance(found, Tensor):
            return counted(found * microbatch.rows, microbatch.rows)
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
            return counted(*found)
        raise StageOutputError(f"loss returned {describe(found)}; expected a mean over rows, or (sum, count)")

    return summed


def _rules(loss: Tensor, logits: Tensor, microbatch: Microbatch) -> list[int]:
    """Which of `Microbatch.labels` the model's loss may be a mean over; several only where they count alike."""
    assert microbatch.labels is not None
    labels = microbatch.inputs["labels"].to(logits.device)
    close = 1e-2 if loss.dtype in (torch.float16, torch.bfloat16) else 1e-5
    means: list[float] = []
    fits: list[int] = []
    if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
        cuts = (logits, labels), (logits[:, :-1], labels[:, 1:])
        means = [_mean(*each) for each in (cuts if labels.dim() > 1 else cuts[:1])]
        fits = [rule for rule, mean in enumerate(means) if abs(mean - loss.item()) <= close * max(1.0, abs(mean))]
    if len({microbatch.labels[rule] for rule in fits}) == 1:
        return fits
    raise StageOutputError(
        f"the model's loss is {loss.item():.6g}, and the mean cross entropy of its logits over all labels and over "
        f"following tokens is {' and '.join(f'{mean:.6g}' for mean in means) or 'not defined'}: what it is a mean over "
        "is not known. Give Pipeline(loss=f), f(output, microbatch) -> (sum, count)"
    )


def _mean(logits: Tensor, labels: Tensor) -> float:
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED).item()
