"""Data of a stage by unit, for plans in which a stage computes microbatches of other replicas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from attrs import define, field

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import checked_fields, instance

Unit = tuple[int, int]
"""The home replica of a microbatch, and its number there; in this order units are added."""

_Load = Annotated[Callable[[int, int], Any], instance(Callable, "a function of a replica and a microbatch")]


@define(eq=False, field_transformer=checked_fields(StepArgumentError))
class UnitBatches:
    """The ``data_iterator`` of a stage whose ``next()`` is the batch of the microbatch that the stage computes now.

        def load(replica, microbatch):
            return dataset[first + replica * per_replica + microbatch]

        forward_backward(..., data_iterator=UnitBatches(load), routes=routes)

    A plain iterator has the microbatches of one replica in order. With routes a stage also computes those of others,
    and not in order. Of a module that is called once for several microbatches, each ``next()`` is the batch of one of
    them, in order, and the iteration ends after the last: ``batches = list(data_iterator)``.

    Attributes:
        load: called for the home replica of a microbatch and its number there, on the rank that computes it, whichever
            that is. It returns equal batches on every rank.
        units: (replica, microbatch) of what the stage computes now; several in a call for several microbatches.
    """

    load: _Load
    units: tuple[Unit, ...] = field(factory=tuple, init=False)
    _read: int = field(default=0, init=False)

    def begin(self, units: Sequence[Unit]) -> None:
        """Called by the step functions before a forward of ``units``."""
        self.units, self._read = tuple(units), 0

    def __iter__(self) -> UnitBatches:
        return self

    def __next__(self) -> Any:
        if self._read == len(self.units):
            raise StopIteration
        unit = self.units[self._read]
        self._read += 1
        return self.load(*unit)
