"""A stage made of the user's ``forward_step_func`` and model: the bridge from the seeds' calls to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.config import option
from pipegrid.schedules.counts import check_first_val_step, get_tensor_shapes
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.runtime import Forwarded
from pipegrid.schedules.steps import LossError, flatten, forward_step
from pipegrid.transport.edge import Edge


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
    adjust: Callable[..., Any] | None,
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> AnnouncedShapes | None:
    """What ``adjust(receive_shapes, send_shapes)`` makes of `get_tensor_shapes`; None without it.

    Neighbours agree on shapes by themselves, so nothing has to be told; but who announces shapes is told where they
    do not hold.

    Raises:
        AnnouncedShapesError: the config has no ``hidden_size``, or ``adjust`` does not return two lists of shapes.
    """
    if adjust is None:
        return None
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


@define
class SeedStage:
    """Runs one microbatch of one stage through `forward_step`.

    In a graph of one module, what travels is a tensor (or whatever payload the user's function returns). In a
    graph of several, it is a dict: received by the name of the module it comes from, returned by the name of
    the module it belongs to.

    ``window``: how many forwards the rank runs before its first backward. ``forwards``: per microbatch, how many
    forwards of any of its chunks the rank runs before this one; by default the microbatch's number.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: torch.nn.Module
    config: Any
    graph: ModuleGraph
    stage: int
    num_microbatches: int
    cp_group_size: int = 1
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    window: int = 1
    forwards: tuple[int, ...] = ()
    vp_stage: int | None = None
    shapes: AnnouncedShapes | None = None
    infos: list[Any] = field(factory=list)
    num_tokens: torch.Tensor | None = None

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
        """See `pipegrid.schedules.runtime.Stage.forward`."""
        outgoing = tuple(edge for edge in self.graph.stage_edges if edge.source == self.stage)
        if self.shapes is not None:
            for payload in inputs.values():
                self.shapes.check(payload, sent=False, stage=self.stage, microbatch=microbatch)
        output, num_tokens = forward_step(
            self.forward_step_func,
            self.data_iterator,
            self.model,
            self.num_microbatches,
            self._received(inputs),
            self.infos,
            self.config,
            self.cp_group_size,
            self.collect_non_loss_data,
            self._checkpoint(microbatch),
            check_first_val_step(self.first_val_step, self.forward_only, microbatch == 0),
            current_microbatch=microbatch,
            vp_stage=self.vp_stage,
            is_last_stage=not outgoing,
        )
        if outgoing:
            if self.shapes is not None:
                self.shapes.check(output, sent=True, stage=self.stage, microbatch=microbatch)
            return Forwarded(self._by_edge(output, outgoing, microbatch))
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
        if self.collect_non_loss_data or self.forward_only:
            return Forwarded({})
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            raise LossError(
                f"the loss of microbatch {microbatch} on stage {self.stage} does not depend on anything that requires "
                "grad; call with forward_only=True to evaluate"
            )
        return Forwarded({}, output)

    def _received(self, inputs: Mapping[Edge, Any]) -> Any:
        if len(self.graph.modules) == 1:
            return next(iter(inputs.values()), None)
        return {self.graph.module_of(edge.source)[0]: payload for edge, payload in inputs.items()}

    def _by_edge(self, output: Any, outgoing: Sequence[Edge], microbatch: int) -> dict[Edge, Any]:
        if len(self.graph.modules) == 1:
            return dict.fromkeys(outgoing, output)
        module = self.graph.module_of(self.stage)[0]
        if not isinstance(output, dict) or set(output) != {module}:
            found = f"keys {sorted(output)}" if isinstance(output, dict) else type(output).__name__
            raise StageOutputError(
                f"stage {self.stage} (module {module!r}) returned {found} for microbatch {microbatch}; with several "
                f"modules a forward returns a dict {{{module!r}: tensor}}"
            )
        return dict.fromkeys(outgoing, output[module])

    def _checkpoint(self, microbatch: int) -> bool | None:
        """Of each window of forwards in flight, the first few keep their activations as the model says."""
        partial = option(self.config, "num_microbatches_with_partial_activation_checkpoints")
        if partial is None:
            return None
        forward = self.forwards[microbatch] if self.forwards else microbatch
        return bool(forward % self.window >= partial)
