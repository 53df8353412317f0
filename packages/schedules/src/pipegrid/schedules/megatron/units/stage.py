"""Stages whose forwards are not those of their replica alone: by routes, or of `UnitBatches`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.schedules.megatron.call import StepCall
from pipegrid.schedules.megatron.forward import modules_with
from pipegrid.schedules.megatron.stage import MegatronStage, SkippingStage
from pipegrid.schedules.megatron.units.batches import UnitBatches
from pipegrid.schedules.megatron.units.numbers import StageUnits
from pipegrid.schedules.runtime import Forwarded, Slice


@define(eq=False, kw_only=True)
class RoutedStage(MegatronStage):
    """A `MegatronStage` that tells its model, and its data, whose microbatch each forward is of.

    Attributes:
        units: the microbatches of its forwards here.
        homed: modules with a ``current_replica``, the home of a microbatch of another replica; None at home.
        by_number: modules with a ``current_microbatch``, its number at home.
        batches: the data iterator, where it is one by unit.
    """

    units: StageUnits
    homed: Sequence[torch.nn.Module] = field(default=(), init=False)
    by_number: Sequence[torch.nn.Module] = field(default=(), init=False)
    batches: UnitBatches | None = field(default=None, init=False)

    def begin(self, call: StepCall, data_iterator: Any, model: torch.nn.Module, *others: Any) -> None:
        """See `MegatronStage.begin`."""
        self.batches = data_iterator if isinstance(data_iterator, UnitBatches) else None
        if self.batches is not None and self.units.home(0) is None:
            raise StepArgumentError(
                "data_iterator is UnitBatches, and the replica of this rank is not known: pass a pg_collection with "
                "its dp group"
            )
        if self.batches is not None and self.num_slices > 1:
            raise StepArgumentError(
                f"data_iterator is UnitBatches, of whole microbatches: num_slices is {self.num_slices}"
            )
        if self.batches is None and data_iterator is not None and not self.units.in_order_at_home:
            raise StepArgumentError(
                f"by its routes stage {self.stage} does not compute all microbatches of replica {self.units.replica} "
                "in order on this rank, and a plain iterator has these; give data_iterator=UnitBatches(load)"
            )
        super().begin(call, data_iterator, model, *others)
        self.by_number, self.numbered = self.numbered, ()
        self.homed = modules_with(model.modules(), "current_replica")["current_replica"]

    def end(self) -> None:
        """See `MegatronStage.end`; what runs outside of a step is at home."""
        for module in self.homed:
            module.current_replica = None  # type: ignore[assignment]
        self.homed, self.by_number, self.batches = (), (), None
        super().end()

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any], part: Slice | None = None) -> Forwarded:
        """See `MegatronStage.forward`."""
        home, number = self.units.home(microbatch), self.units.microbatch(microbatch)
        for module in self.by_number:
            object.__setattr__(module, "current_microbatch", number)
        for module in self.homed:
            module.current_replica = None if home == self.units.replica else home  # type: ignore[assignment]
        if self.batches is not None:
            self.batches.begin(self.units.units(microbatch))
        return super().forward(microbatch, inputs, part)

    def scale_of_mean(self, microbatch: int, of_cp_share: bool = True, count: int = 1) -> float:
        """See `MegatronStage.scale_of_mean`: a call for several units has a mean over theirs."""
        return super().scale_of_mean(microbatch, of_cp_share, count * self.units.served(microbatch))


class RoutedSkippingStage(RoutedStage, SkippingStage):
    """A `SkippingStage` with units."""
