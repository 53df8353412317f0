"""Shapes of activations that follow from the arguments of a step, compared with those of the messages.

Neighbours agree on shapes by themselves; this check finds a stage whose output differs from the arguments before it is
sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attrs import frozen

from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.megatron.counts import get_tensor_shapes, require_size
from pipegrid.schedules.runtime import flatten


class AnnouncedShapesError(ValueError):
    """``adjust_tensor_shapes_fn`` cannot be used as given."""


@frozen
class AnnouncedShapes:
    """The shapes that ``adjust_tensor_shapes_fn`` says a stage receives and sends: checked against what does travel.

    An empty shape (``variable_seq_lengths``) is any.
    """

    received: tuple[tuple[int, ...], ...]
    sent: tuple[tuple[int, ...], ...]

    def check(self, payload: Any, *, sent: bool, stage: int, microbatch: int) -> None:
        """Compare a payload's tensors with what was announced.

        Raises:
            StageOutputError: another number of tensors, or another shape.
        """
        expected = self.sent if sent else self.received
        found = [tuple(tensor.shape) for tensor in flatten(payload) if tensor is not None]
        fits = [not shape or shape == other for shape, other in zip(expected, found, strict=False)]
        if len(expected) != len(found) or not all(fits):
            raise StageOutputError(
                f"stage {stage} {'sends' if sent else 'received'} tensors of shapes {found} for microbatch "
                f"{microbatch}, but adjust_tensor_shapes_fn announces {list(expected)}"
            )


def announced_shapes(
    adjust: Callable[..., Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> AnnouncedShapes:
    """What ``adjust(receive_shapes, send_shapes)`` makes of `get_tensor_shapes`.

    Raises:
        AnnouncedShapesError: the config has no ``hidden_size``, or ``adjust`` does not return two lists of shapes.
    """
    if option(config, "hidden_size") is None and not option(config, "variable_seq_lengths"):
        raise AnnouncedShapesError(
            "adjust_tensor_shapes_fn adjusts the shapes (sequence, batch, hidden), and the config has no hidden_size; "
            "set it"
        )
    shapes = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=tp_group,
        cp_group=cp_group,
    )
    adjusted = adjust(list(shapes), list(shapes))
    try:
        received, sent = adjusted
        return AnnouncedShapes(_as_shapes(received), _as_shapes(sent))
    except (TypeError, ValueError):
        raise AnnouncedShapesError(
            f"adjust_tensor_shapes_fn returned {adjusted!r}; expected (receive shapes, send shapes), each a list with "
            "one shape per tensor"
        ) from None


def _as_shapes(shapes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in shape) for shape in shapes)


@frozen
class ExpectedShape:
    """The one tensor that a stage sends: ``hidden_size`` last, and before it the tokens of a microbatch on this rank.

    These may lie on any axes (``(sequence, batch)``, ``(batch, sequence)``, or one), since all that travels is a
    tensor. ``exact`` is False where the groups that share a sequence are not known; then it may be any even share.
    """

    sequences: tuple[int, ...]
    micro_batch_size: int
    hidden_size: int
    exact: bool

    def check(self, payload: Any, *, sent: bool, stage: int, microbatch: int) -> None:
        """Compare what a stage sends. Of several tensors the arguments of a step say nothing.

        Raises:
            StageOutputError: another shape.
        """
        tensors = [tensor for tensor in flatten(payload) if tensor is not None]
        if not sent or len(tensors) != 1 or not tensors[0].is_floating_point():
            return
        *tokens, hidden = tensors[0].shape or (0,)
        if hidden == self.hidden_size and any(self._fits(math.prod(tokens), sequence) for sequence in self.sequences):
            return
        shapes = " or ".join(str((sequence, self.micro_batch_size, self.hidden_size)) for sequence in self.sequences)
        raise StageOutputError(
            f"stage {stage} sends a tensor of shape {tuple(tensors[0].shape)} for microbatch {microbatch}, but "
            f"seq_length, micro_batch_size and config.hidden_size make it {shapes}"
            f"{'' if self.exact else ', or an even share of the sequence'}; return that, or pass what holds. Where "
            "microbatches differ set config.variable_seq_lengths; where activations have another form, leave "
            "config.hidden_size None"
        )

    def _fits(self, tokens: int, sequence: int) -> bool:
        share, rest = divmod(tokens, self.micro_batch_size)
        if rest or share == 0:
            return False
        return share == sequence if self.exact else sequence % share == 0


def expected_shape(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> ExpectedShape | None:
    """The shape that every message must have, where the config fixes it; else None.

    It does where it has a ``hidden_size`` and says that ``variable_seq_lengths`` is False: a config that is not made
    for pipelines may well have a ``hidden_size``, but says nothing about messages. The sequence is that of the encoder
    or of the decoder, where both are given.

    Raises:
        StepArgumentError: one of the sizes is no integer of at least 1.
    """
    hidden_size = option(config, "hidden_size")
    fixed = getattr(config, "variable_seq_lengths", None) is False and option(config, "shapes") in (None, *_FIXED)
    if hidden_size is None or not fixed:
        return None
    shared = [cp_group, *([tp_group] if option(config, "sequence_parallel") else [])]
    exact = None not in shared
    ranks = math.prod(group.size() for group in shared if group is not None)
    lengths = [seq_length] if decoder_seq_length is None else [seq_length, decoder_seq_length]
    for length in lengths:
        require_size("seq_length", length, "give the tokens of a sample, or set config.variable_seq_lengths")
    if any(length % ranks for length in lengths):
        return None  # uneven shares are the model's business
    return ExpectedShape(
        tuple(dict.fromkeys(length // ranks for length in lengths)),
        require_size("micro_batch_size", micro_batch_size, "give the samples of a microbatch"),
        require_size("config.hidden_size", hidden_size, "set it to the last axis of activations, or leave it None"),
        exact,
    )


_FIXED = ("given", "agreed")
"""How a receiver learns what to expect, where every message is alike."""
