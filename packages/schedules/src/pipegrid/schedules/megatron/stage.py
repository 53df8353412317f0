"""A stage made of the user's ``forward_step_func`` and model: the bridge from the seeds' calls to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import LossError, StageOutputError
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.megatron.counts import check_first_val_step
from pipegrid.schedules.megatron.forward import forward_step
from pipegrid.schedules.megatron.shapes import AnnouncedShapes, ExpectedShape
from pipegrid.schedules.runtime import Forwarded
from pipegrid.transport.edge import Edge


@define
class MegatronStage:
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
    shapes: AnnouncedShapes | ExpectedShape | None = None
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
