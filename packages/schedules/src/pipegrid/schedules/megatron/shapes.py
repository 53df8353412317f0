"""Check of message shapes against the arguments of a step, before the send; neighbours agree on shapes without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, checked
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.runtime import flatten

Shape: TypeAlias = tuple[int, ...]


@frozen
class AnnouncedShapes:
    """Shapes of a stage's messages by ``adjust_tensor_shapes_fn``; an empty one (``variable_seq_lengths``) fits any."""

    received: tuple[Shape, ...]
    sent: tuple[Shape, ...]

    def check(self, payload: Any, *, sent: bool, stage: int, microbatch: int) -> None:
        """Raise StageOutputError for another number of tensors, or another shape, than announced."""
        expected = self.sent if sent else self.received
        found = [tuple(tensor.shape) for tensor in flatten(payload) if tensor is not None]
        fits = [not shape or shape == other for shape, other in zip(expected, found, strict=False)]
        if len(expected) != len(found) or not all(fits):
            raise StageOutputError(
                f"stage {stage} {'sends' if sent else 'received'} tensors of shapes {found} for microbatch "
                f"{microbatch}, but adjust_tensor_shapes_fn announces {list(expected)}"
            )


def announced_shapes(adjust: Callable[..., Any], shapes: Sequence[Shape]) -> AnnouncedShapes:
    """Shapes from ``adjust(receive_shapes, send_shapes)``, applied to those of the arguments (`get_tensor_shapes`)."""
    adjusted = adjust(list(shapes), list(shapes))
    try:
        received, sent = adjusted
        return AnnouncedShapes(_as_shapes(received), _as_shapes(sent))
    except (TypeError, ValueError):
        raise StepArgumentError(
            f"adjust_tensor_shapes_fn returned {adjusted!r}; expected (receive shapes, send shapes)"
        ) from None


def _as_shapes(shapes: Any) -> tuple[Shape, ...]:
    return tuple(tuple(int(size) for size in shape) for shape in shapes)


@frozen
class SentShape:
    """Shape of the one tensor that a stage sends: tokens of a microbatch, on any leading axes, then ``hidden_size``.

    ``exact`` is False where the groups that share a sequence are unknown; then any even share matches.
    """

    sequences: tuple[int, ...]
    micro_batch_size: int
    hidden_size: int
    exact: bool

    def check(self, payload: Any, *, sent: bool, stage: int, microbatch: int) -> None:
        """Raise StageOutputError for a sent tensor of another shape; several are not determined by the arguments."""
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
            f"{'' if self.exact else ', or an even share of the sequence'}. For other lengths set "
            "config.variable_seq_lengths, for activations of another form config.hidden_size=None"
        )

    def _fits(self, tokens: int, sequence: int) -> bool:
        share, rest = divmod(tokens, self.micro_batch_size)
        if rest or share == 0:
            return False
        return share == sequence if self.exact else sequence % share == 0


def sent_shape(
    *, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None, config: Any, tp_group: Any, cp_group: Any
) -> SentShape | None:
    """The shape of every message, if the config fixes it; else None.

    A config fixes it with a ``hidden_size`` and an explicit ``variable_seq_lengths=False``: that of another library may
    have a ``hidden_size`` that is unrelated to messages. The sequence is the encoder's or the decoder's.
    """
    hidden_size, shapes = option(config, "hidden_size"), option(config, "shapes")
    fixed = getattr(config, "variable_seq_lengths", None) is False and shapes in (None, "given", "agreed")
    if hidden_size is None or not fixed:
        return None
    shared = [cp_group, *([tp_group] if option(config, "sequence_parallel") else [])]
    exact = None not in shared
    ranks = math.prod(group.size() for group in shared if group is not None)
    lengths = [seq_length] if decoder_seq_length is None else [seq_length, decoder_seq_length]
    lengths = [checked(length, Count, "seq_length", StepArgumentError) for length in lengths]
    if any(length % ranks for length in lengths):
        return None  # uneven shares depend on the model
    return SentShape(
        tuple(dict.fromkeys(length // ranks for length in lengths)),
        checked(micro_batch_size, Count, "micro_batch_size", StepArgumentError),
        checked(hidden_size, Count, "config.hidden_size", StepArgumentError),
        exact,
    )
