"""Losses of microbatches, weighed so that their mean is the mean of one process, however a step is cut.

A step is a mean over microbatches that is divided last (``weighted_microbatches``): a loss that is a mean over tokens
is weighed, before its backward, by its tokens among those of the job. So a loss that a layer attaches, once for each
microbatch, is in the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from pipegrid.core.fields import Amount, checked
from pipegrid.schedules import WithLoss
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime import describe
from pipegrid.stages.generators import generators_as_before
from pipegrid.stages.slicing.slice_batches import IGNORED
from pipegrid.training.pipeline.counts import (
    ELEMENTS,
    FOLLOWING,
    FOLLOWING_ELEMENTS,
    LABELS,
    MICROBATCHES,
    NAMES,
    ROWS,
    StepCounts,
    Weight,
)
from pipegrid.training.pipeline.microbatches import Microbatch, is_uneven, padding_of
from pipegrid.training.pipeline.parts import LossPart, apart, doubled, halves, mapped, padded_apart, zero_of

TOLD = 5
"""Sums of a step over its losses, float64: of each the loss times its weight, the weight and, if it is a sum, the
weight of one counted, the square of that, and a one."""
Told = Tensor | tuple[Tensor, Weight]
"""What a loss adds to the `TOLD` sums: ``[TOLD]``, or a mean (one element, in its dtype) and its weight."""
Weighed = tuple[Tensor, Tensor, Told]
"""What a step function takes: the loss times its weight, the weight, and what it tells."""

MicrobatchLoss = Callable[[Any, Microbatch, StepCounts], Weighed]  # the weighed loss of the output of a last stage

_ROUNDING, _CLOSE = 1e-9, 1e-5
_SUM = "Give Pipeline(loss=f), f(output, microbatch) -> (sum, count)"
_WEIGHED = "loss returned a mean, in a step in which microbatches weigh otherwise by rows than by labels, and"


def are_apart(sums: Sequence[float], microbatches: float) -> bool:
    """Whether the weights of a step do not add up to its ``microbatches``; ``sums`` as of `require_mean`."""
    return abs(sums[1] - microbatches) > _ROUNDING * microbatches


def require_mean(sums: Sequence[float], microbatches: float, *, attached: bool) -> None:
    """Raise a `StageOutputError` where the weights of a step do not make the mean of one process.

    Replicas have weighed by different rules; or, where a layer or a stage has ``attached`` a loss of its own, that has
    another divisor. ``sums``: of `Weighed`, over the job.
    """
    _, weights, once, squares, number = sums
    apart = are_apart(sums, microbatches)
    if abs(number * squares - once**2) > _ROUNDING * once**2 or (apart and not number):
        raise StageOutputError(
            "the loss is a mean over one thing in some microbatches, and over another in others; return (sum, count)"
        )
    if apart and attached:
        raise StageOutputError(
            "a layer attaches a loss, or a stage returns WithLoss, and loss returns (sum, count) with a count that is "
            f"none of {', '.join(NAMES)}: attached losses are divided by {weights:g}, in place of {microbatches:g} "
            "microbatches. Return a mean, or count one of these"
        )


def _mean(loss: Tensor, count: float, rule: int, counts: StepCounts) -> Weighed:
    """A mean over ``count``, of what ``rule`` counts."""
    known = counts.of_means.get((rule, count, loss.dtype)) or counts.of_mean(rule, count, loss.dtype)
    weight, factor, told = known
    return loss if factor is None else loss * factor, weight, (loss.detach(), told)


def sum_of(told: Sequence[Told]) -> Tensor:
    """The sums over what at least one loss tells, ``[TOLD]`` float64 on its device; means of one weight at once."""
    rows: list[Tensor] = []
    alike: dict[int, tuple[Weight, list[Tensor]]] = {}
    for one in told:
        if isinstance(one, Tensor):
            rows.append(one)
        else:
            value, weight = one
            alike.setdefault(id(weight), (weight, []))[1].append(value.reshape(()) if value.dim() else value)
    for (_, rest), values in alike.values():
        rows.append(torch.cat([torch.stack(values).double().sum() * rest[:1], rest * len(values)]))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(dim=0)


def sum_on_host(told: Sequence[Told]) -> list[float]:
    """`sum_of` of losses on the host, where adding a number costs less than making a tensor."""
    sums = [0.0] * TOLD
    for one in told:
        if isinstance(one, Tensor):
            sums = list(map(add, sums, one.tolist()))
        else:
            value, (weight, rest) = one
            weight = rest[0].item() if weight is None else weight
            sums[0] += value.item() * weight
            sums[1] += weight
    return sums


@frozen
class _Kind:
    """A kind of a model's own loss: a mean over labels, or over the means of rows, or with padding as zeros."""

    name: str
    rule: int
    follows: bool  # logits are of the labels that follow

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean, of logits ``[rows, ..., classes]``."""
        if self.follows:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat if flat.dtype == torch.float64 else flat.float()
        if self.rule in (LABELS, FOLLOWING):
            return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED)
        each = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="none").view(len(labels), -1)
        if self.rule == ROWS:
            return (each.sum(dim=1) / (labels.reshape(len(labels), -1) != IGNORED).sum(dim=1)).mean()
        return each.mean()


_KINDS = (
    _Kind("all labels", LABELS, follows=False),
    _Kind("following tokens", FOLLOWING, follows=True),
    _Kind("rows, of the means over their labels", ROWS, follows=False),
    _Kind("rows, of the means over their following tokens", ROWS, follows=True),
    _Kind("all labels and padding", ELEMENTS, follows=False),
    _Kind("following tokens and padding", FOLLOWING_ELEMENTS, follows=True),
)
"""Rules that a later microbatch can tell from those before them come last."""


class OwnLoss:
    """The ``loss`` that a model returns beside its ``logits``, as those of Hugging Face do.

    Nothing of a model says what its loss is a mean over, so it is compared with the cross entropy of the logits, over
    all labels or those that follow, by tokens, by rows, or with padding. Compared again in each microbatch that shows
    what none before has shown (several rows, padding, weights), and in all that weigh otherwise by the kinds that are
    left. Kinds that have one value and other weights (a text in each microbatch) are told apart by the graph of the
    loss.
    """

    def __init__(self) -> None:
        self._left: tuple[_Kind, ...] = _KINDS
        self._seen: set[frozenset[str]] = set()
        self._rule: int | None = None  # by which microbatches were weighed, where that mattered

    def __call__(self, output: Any, microbatch: Microbatch, counts: StepCounts) -> Weighed:
        """The mean, by the weight of what it is over; a `StageOutputError` without a loss, or where that is unknown."""
        loss, logits, labels = (getattr(output, "loss", None), getattr(output, "logits", None), microbatch.labels)
        if labels is None or loss is None or logits is None:
            raise StageOutputError(
                f"the model returned {describe(output)} with the loss {describe(loss)}; its own loss needs `labels` in "
                "the batch, else give Pipeline(loss=f), f(output, microbatch) -> (sum, count)"
            )
        own = microbatch.counts
        if not labels[1] and (not labels[0] or bool(loss.isnan())):  # a mean over no token
            return _mean(zero_of(logits), 0.0, FOLLOWING if labels[0] else self._left[0].rule, counts)
        if microbatch.pattern not in self._seen or not counts.alike(own, [kind.rule for kind in self._left]):
            self._compare(loss.detach(), logits.detach(), microbatch)
            if loss.requires_grad:  # an evaluation leaves to a step what no value tells
                self._seen.add(microbatch.pattern)
                self._tell_apart(loss, logits, microbatch, own, counts)
        rule = self._left[0].rule
        return _mean(loss, own[rule], rule, counts) if own[rule] else _mean(zero_of(logits), 0.0, rule, counts)

    @property
    def left(self) -> list[str]:
        """The kinds that the loss may be, by all that was seen of it."""
        return [kind.name for kind in self._left]

    def _compare(self, loss: Tensor, logits: Tensor, microbatch: Microbatch) -> None:
        """Drop the kinds of another value."""
        close = 1e-2 if loss.dtype in (torch.float16, torch.bfloat16) else 1e-5
        value, labels = loss.item(), microbatch.inputs["labels"].to(logits.device)
        means: dict[_Kind, float] = {}
        if not labels.is_floating_point() and logits.shape[:-1] == labels.shape:
            kinds = [kind for kind in _KINDS if labels.dim() > 1 or not kind.follows]
            means = {kind: kind.of(logits, labels).item() for kind in kinds}
        fits = [kind for kind, mean in means.items() if abs(mean - value) <= close * max(1.0, abs(mean))]
        left = tuple([kind for kind in self._left if kind in fits])
        if not left:
            before = " or ".join(self.left)
            found = ", ".join(f"{mean:.6g} over {kind.name}" for kind, mean in means.items())
            raise StageOutputError(
                f"the model's loss is {value:.6g}, and the mean cross entropy of its logits is {found or 'not defined'}"
                f"{'' if self._left == _KINDS else f'; earlier microbatches had a mean over {before}'}: what it is a "
                f"mean over is not known. {_SUM}"
            )
        self._left = left

    def _tell_apart(
        self, loss: Tensor, logits: Tensor, microbatch: Microbatch, own: Sequence[int], counts: StepCounts
    ) -> None:
        """Drop the kinds that have one value here, and other weights, until those left weigh it alike."""
        if counts.alike(own, [kind.rule for kind in self._left]):
            return
        kinds = set(self._left)
        if len({kind.follows for kind in kinds}) > 1:  # means of logits that are alike differ in their gradients alone
            kinds &= _of_gradient(loss, logits, microbatch, kinds)
        rules = _rules_of_graph(loss)
        kinds = {kind for kind in kinds if rules is None or kind.rule in rules}
        self._left = tuple([kind for kind in self._left if kind in kinds])
        by_tokens = [kind.rule for kind in self._left if kind.rule in (ROWS, LABELS, FOLLOWING)]
        if not self._left or not counts.alike(own, by_tokens):
            names = " or ".join(self.left) or "what is not known"
            raise StageOutputError(
                f"the model's loss is a mean over {names}, which have one value in a microbatch of {microbatch.rows} "
                "rows, and weigh it differently in the step. Give more rows to a microbatch, or Pipeline(loss=f), "
                "f(output, microbatch) -> (sum, count)"
            )
        rule = self._left[0].rule
        if self._rule not in (None, rule):
            raise StageOutputError(
                f"the model's loss is a mean over {self._left[0].name}, and earlier microbatches were weighed by "
                f"{NAMES[self._rule or 0]}. {_SUM}"
            )
        self._rule = rule


def _of_gradient(loss: Tensor, logits: Tensor, microbatch: Microbatch, kinds: set[_Kind]) -> set[_Kind]:
    """The kinds with the gradient of ``loss`` on ``logits``; all where it has none."""
    found = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0] if logits.requires_grad else None
    if found is None:
        return kinds
    leaf, labels = logits.detach().requires_grad_(), microbatch.inputs["labels"].to(logits.device)
    means = {kind: torch.autograd.grad(kind.of(leaf, labels), leaf)[0] for kind in kinds}
    return {kind for kind, gradient in means.items() if (gradient - found).norm() <= 1e-2 * found.norm()}


_ABOVE = ("Div", "Mul")  # nodes by numbers
_SELECT = ("Index", "MaskedSelect")
_VIEWS = ("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
_NO_REDUCTION, _MEAN = 0, 1  # of torch's NllLoss


def _rules_of_graph(loss: Tensor) -> set[int] | None:
    """Rules that the graph of ``loss`` allows: one reduction of tokens' losses is none of rows. None: not known.

    They are read from the loss down to torch's cross entropy, along nodes that change no value or divide by a number.
    """
    node: Any = loss.grad_fn
    by_tokens, with_padding = {LABELS, FOLLOWING}, {ELEMENTS, FOLLOWING_ELEMENTS}
    found: set[int] | None = None
    while node is not None:
        name = type(node).__name__.removesuffix("Backward0")
        if name.startswith("NllLoss"):
            reduction = node._saved_reduction  # noqa: SLF001 (documented: what a node has saved)
            if found is not None or reduction == _NO_REDUCTION:
                return found if reduction == _NO_REDUCTION else None
            return by_tokens if reduction == _MEAN else by_tokens | with_padding
        if name in ("Mean", "Sum") and found is None:
            found = with_padding if name == "Mean" else by_tokens | with_padding
        elif found is not None and (name in _SELECT or (name == "Mul" and _by_mask(node))):
            found = by_tokens | with_padding
        elif name not in _VIEWS and (name not in _ABOVE or found is not None):
            return None
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) != 1:
            return None
        node = following[0]
    return None


def _by_mask(node: Any) -> bool:
    factor: Tensor | None = node._saved_other  # noqa: SLF001 (documented: what a node has saved)
    return factor is not None and bool(((factor == 0) | (factor == 1)).all())


class GivenLoss:
    """``loss(output, inputs)`` of a user: a mean, or ``(sum, count)``; either of them in a `WithLoss` beside another.

    A mean says not what it is over. Where that matters (a microbatch weighs otherwise by its rows than by its labels),
    the function is called once with a microbatch without padding, with one of much padding, and with both: the rule by
    which the first two means make the third is that of all microbatches. A microbatch that shows what none before has
    shown is compared with the means of its halves; where these tell nothing, since the model makes the loss, entries
    with negative whole numbers, which losses ignore, must have equally many in each row. Of ``(sum, count)``, what is
    counted is found likewise.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self._rule: int | None = None  # of a mean
        self._counted: tuple[int, ...] | None = None  # what a count may be of
        self._adds_up = False  # a count was the sum of those of halves
        self._seen: set[frozenset[str]] = set()

    def __call__(self, output: Any, microbatch: Microbatch, counts: StepCounts) -> Weighed:
        """The loss, weighed among those of the step, and the one beside it; another result is a `StageOutputError`."""
        found = self._loss(output, microbatch.inputs)
        found, beside = (found.output, found.loss) if isinstance(found, WithLoss) else (found, None)
        if isinstance(found, Tensor) and found.numel() == 1:
            weighed = self._of_mean(found, output, microbatch, counts)
        elif isinstance(found, tuple) and len(found) == 2 and _is_sum(found[0]) and _is_count(found[1]):
            weighed = self._of_sum(found[0], found[1], output, microbatch, counts)
        else:
            raise StageOutputError(
                f"loss returned {describe(found)}; expected a mean, or (sum, count), where a count needs no gradient"
            )
        return weighed if beside is None else (weighed[0] + beside, *weighed[1:])

    def _of_mean(self, loss: Tensor, output: Any, microbatch: Microbatch, counts: StepCounts) -> Weighed:
        own = microbatch.counts
        if self._rule is None and microbatch.labels and not counts.alike(own, _rules_for(microbatch)):
            self._rule = self._found(output, microbatch, counts)
        rule = ROWS if self._rule is None else self._rule
        if not own[rule]:
            return _mean(zero_of(output), 0.0, rule, counts)
        if microbatch.pattern not in self._seen:
            rules = _rules_for(microbatch) if self._rule is None else (rule,)
            if not self._is_of_halves(output, microbatch, rules) and self._rule is None:
                _require_even(microbatch, counts)
            if _tells(microbatch):
                self._seen.add(microbatch.pattern)
        return _mean(loss, own[rule], rule, counts)

    def _of_sum(
        self, total: Tensor, count: Tensor | float, output: Any, microbatch: Microbatch, counts: StepCounts
    ) -> Weighed:
        if not isinstance(count, Tensor):
            count = checked(count, Amount, "the count of (sum, count)", StageOutputError)
        number = torch.as_tensor(count, device=total.device).detach().double().reshape(())
        own = microbatch.counts
        # An accuracy of 0 or 1 looks like a count: a later one is looked at, where the host need not wait for it.
        looked_at = not self._adds_up and (self._counted is None or number.device.type == "cpu")
        if looked_at and not float(number).is_integer():
            self._require_of_counts(output, microbatch)
        if self._counted is None or not counts.alike(own, self._counted):
            first = self._counted is None
            value = checked(float(number), Amount, "the count of (sum, count)", StageOutputError)
            kept = range(len(NAMES)) if self._counted is None else self._counted
            self._counted = tuple([rule for rule in kept if own[rule] == value])
            if self._counted and (first or not counts.alike(own, self._counted)):
                self._counted = self._counting(output, microbatch, counts)
        one = counts.weight(self._counted[0], 1.0) if self._counted else torch.ones_like(number)
        weight = counts.weight(self._counted[0], number) if self._counted else number
        told = [total.detach().double().reshape(()) * one, weight, one, one.square(), torch.ones_like(one)]
        return total * one.to(total.dtype), weight, torch.stack(told)

    def _found(self, output: Any, microbatch: Microbatch, counts: StepCounts) -> int:
        """The rule that a mean follows."""
        parts = _apart(output, microbatch, counts)
        if parts is None:
            raise StageOutputError(
                f"{_WEIGHED} nothing in the output has rows, by which it could be found out; return (sum, count)"
            )
        try:
            values, means, fits = self._means(parts, _rules_for(microbatch))
        except Exception as error:
            raise StageOutputError(
                f"{_WEIGHED} has failed with labels that were changed to find out which it is; return (sum, count)"
            ) from error
        if len({means[rule] for rule in fits}) == 1:
            return fits[0]
        raise StageOutputError(
            f"loss returned the means {values[0]:.6g} and {values[1]:.6g} of two microbatches, and {values[2]:.6g} of "
            f"both as one; {_shown(means)}. Return (sum, count), or (mean, 1) for a mean over microbatches"
        )

    def _is_of_halves(self, output: Any, microbatch: Microbatch, rules: Sequence[int]) -> bool:
        """Raise where the mean of a microbatch is made of those of its halves by none of ``rules``.

        False where they tell nothing: of one row, and of a loss that the model has made, which is not cut.
        """
        parts = halves(output, microbatch.inputs, microbatch.rows)
        if parts is not None:
            return self._fit(parts, rules, "of its first rows and the others")
        for name in _masks(microbatch) if self._rule is None else ():
            given = microbatch.inputs
            filled = {**given, name: torch.ones_like(given[name])}
            with torch.no_grad(), generators_as_before():  # no gradients, and random numbers leave no trace
                alike, masked = (apart(output, first, given, microbatch.rows) for first in (given, filled))
            try:
                takes_rows = bool(self._means(alike, rules)[2])
            except Exception:  # noqa: BLE001 (of the script's code, which is right for one row)
                takes_rows = False
            if takes_rows:
                self._fit(masked, rules, f"with all of {name!r} and as it is, in one row each")
        return False

    def _fit(self, parts: tuple[LossPart, LossPart, LossPart], rules: Sequence[int], what: str) -> bool:
        """Raise where two means make that of both by none of ``rules``; whether they tell anything."""
        values, means, fits = self._means(parts, rules)
        if not fits and math.isfinite(values[2]):  # what is no number is no mean over anything
            raise StageOutputError(
                f"loss returned the mean {values[2]:.6g} of a microbatch, and {values[0]:.6g} and {values[1]:.6g} "
                f"{what}; {_shown(means)}. Return (sum, count), or (mean, 1) for a mean over microbatches"
            )
        return not values[0] == values[1] == values[2]

    def _require_of_counts(self, output: Any, microbatch: Microbatch) -> None:
        """Raise where what is no whole number is a mean of those of halves, such as an accuracy, and not their sum."""
        parts = halves(output, microbatch.inputs, microbatch.rows)
        if parts is None:
            return
        with torch.no_grad(), generators_as_before():  # no gradients, and random numbers leave no trace
            one, other, both = [float(self._of_part(part)[1]) for part in parts]
        self._adds_up = abs(one + other - both) <= _CLOSE * abs(both)
        if not self._adds_up and min(one, other) < both < max(one, other):
            raise StageOutputError(
                f"loss returned the count {both:.6g} of a microbatch, and {one:.6g} and {other:.6g} of its first rows "
                "and the others. Return a mean alone, or (sum, count); other numbers, such as an accuracy, are not "
                "part of a loss"
            )

    def _counting(self, output: Any, microbatch: Microbatch, counts: StepCounts) -> tuple[int, ...]:
        """The rules that the loss follows among those with one number in this microbatch, which may be chance."""
        parts = _apart(output, microbatch, counts)
        with torch.no_grad(), generators_as_before():  # no gradients, and random numbers leave no trace
            more = doubled(output, microbatch.inputs, microbatch.rows) if parts is None else parts[2]
            if more is None:
                return ()
            count = float(self._of_part(more)[1])
        return tuple([rule for rule in self._counted or () if more.counts[rule] == count])

    def _means(
        self, parts: Sequence[LossPart], rules: Sequence[int]
    ) -> tuple[list[float], dict[int, float], list[int]]:
        """The means of two parts and of both as one; by rule, what the first two make together; the rules that fit."""
        with torch.no_grad(), generators_as_before():  # no gradients, and random numbers leave no trace
            values = [float(self._of_part(part)) for part in parts]
        means = {}
        for rule in rules:
            weights = [part.counts[rule] for part in parts[:2]]
            terms = [value * weight for value, weight in zip(values, weights, strict=False) if weight]
            means[rule] = sum(terms) / sum(weights) if sum(weights) else math.nan
        most = _CLOSE * max((abs(each) for each in values if not math.isnan(each)), default=math.nan)
        return values, means, [rule for rule, mean in means.items() if abs(mean - values[2]) <= most]

    def _of_part(self, part: LossPart) -> Any:
        """The result for a part of a microbatch, without the loss beside it."""
        found = self._loss(part.output, part.inputs)
        return found.output if isinstance(found, WithLoss) else found


def _is_sum(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_count(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.numel() == 1 and not value.requires_grad)


def _tells(microbatch: Microbatch) -> bool:
    """Whether means of halves tell a mean over rows from one without padding in entries other than ``labels``."""
    half, rest = microbatch.rows // 2, microbatch.rows - microbatch.rows // 2
    entries = [padding_of(microbatch.inputs[name]) for name in _padded(microbatch)]
    return not half or all(int(one[:half].sum()) * rest != int(one[half:].sum()) * half for one in entries)


def _padded(microbatch: Microbatch) -> list[str]:
    """The padded entries other than ``labels``."""
    found = [name.removesuffix(" padded") for name in microbatch.pattern if name.endswith(" padded")]
    return [name for name in found if name != "labels"]


def _masks(microbatch: Microbatch) -> list[str]:
    """The entries of zeros and ones of which microbatches of a step have unequally many."""
    names = [name.removesuffix(" uneven") for name in microbatch.pattern if name.endswith(" uneven")]
    given = [(name, microbatch.inputs[name]) for name in sorted(names)]
    return [name for name, value in given if bool(((value == 0) | (value == 1)).all())]


def _require_even(microbatch: Microbatch, counts: StepCounts) -> None:
    """Raise where a mean, of which parts tell nothing, may be over what is not padding in an entry."""
    uneven = [name for name in _padded(microbatch) if is_uneven(microbatch.inputs[name])]
    if uneven and counts.numbers()[MICROBATCHES] > 1:
        raise StageOutputError(
            f"loss returned a mean, and whether it is one over rows, or over what is not negative in {uneven[0]!r}, of "
            f"which rows have unequal numbers, cannot be found out from a microbatch of {microbatch.rows} rows whose "
            "loss the model makes, or of one row. Return (sum, count), or (mean, 1) for a mean over microbatches"
        )


def _rules_for(microbatch: Microbatch) -> tuple[int, ...]:
    """The rules that a mean of a microbatch may follow."""
    labels = microbatch.inputs.get("labels")
    known = microbatch.labels is not None and isinstance(labels, Tensor) and not labels.is_floating_point()
    return (ROWS, LABELS, FOLLOWING) if known else (ROWS,)


def _apart(output: Any, microbatch: Microbatch, counts: StepCounts) -> tuple[LossPart, LossPart, LossPart] | None:
    """`padded_apart`; on the host where nothing in the step is padded, since a device may not survive such a label."""
    inputs: Mapping[str, Any] = microbatch.inputs
    if not isinstance(inputs.get("labels"), Tensor):
        return None
    if counts.numbers()[LABELS] == counts.numbers()[ELEMENTS]:
        output, inputs = mapped(output, Tensor.cpu), mapped(inputs, Tensor.cpu)
    with torch.no_grad(), generators_as_before():  # no gradients, and random numbers leave no trace
        return padded_apart(output, inputs, microbatch.rows)


def _shown(means: Mapping[int, float]) -> str:
    return "a mean over " + ", ".join(f"{NAMES[rule]} is {mean:.6g}" for rule, mean in means.items())
