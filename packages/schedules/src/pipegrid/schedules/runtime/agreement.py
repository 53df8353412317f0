"""The handshake before a step: neighbouring ranks compare what they are about to run, before the first message.

Each rank writes what it runs and reads what the others wrote, once a step (`pipegrid.transport.control.handshake`). The
rank that comes second to a step that differs sends nothing; the one that had begun is stopped by its neighbour's
abort, and sees the difference when it looks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from pipegrid.schedules.monitor import DisagreementError
from pipegrid.topology.bounded_calls import SilentStoreError
from pipegrid.transport.collectives.differences import by_text
from pipegrid.transport.errors import P2PLaneDeadError

if TYPE_CHECKING:
    from pipegrid.schedules.plan import Plan
    from pipegrid.transport.base import Communicator
    from pipegrid.transport.control.handshake import Handshake
    from pipegrid.transport.edge import Edge

_LOOK_SECONDS = 0.5


@define(eq=False)
class StepAgreement:
    """Compares a step with the ranks at the other ends of this rank's edges.

    Where the communicator has no ``neighbours(edges)`` (positions within one process) nothing is compared.

    Attributes:
        edges: those to other positions of this replica.
        across: those to another replica, each with that.
        rank: this rank; None in one process.
        deadline: seconds of every handshake, but for the first one's connecting (`Lanes.neighbours`).
    """

    plan: Plan
    communicator: Communicator
    edges: tuple[Edge, ...]
    across: tuple[tuple[Edge, int], ...]
    rank: int | None
    deadline: float
    _handshake: Handshake | None = field(default=None, init=False)
    _connected: bool = field(default=False, init=False)
    _what: str = field(default="", init=False)

    def begin(self, kind: str, agree: str = "") -> None:
        """Compare before a step of this ``kind`` ("a step", "an evaluation"); ``agree``: what else must be alike.

        Raises:
            DisagreementError: a neighbour runs something else.
            SilentStoreError: the store did not answer in time, or its process has ended.
            P2PLaneDeadError: the communicator was closed.
        """
        self._what = (
            f"{kind} of {self.plan.num_microbatches} microbatches (plan {self.plan.digest}){agree and f' {agree}'}"
        )
        try:
            if not self._connected:
                self._connected = True
                if self.across:
                    self._handshake = self.communicator.neighbours_across(self.edges, self.across)
                elif self.edges:
                    self._handshake = self.communicator.neighbours(self.edges)
            if self._handshake is None:
                return
            others = self._handshake.begin(self._what, seconds=self.deadline)
        except P2PLaneDeadError:
            raise
        except RuntimeError as error:
            raise SilentStoreError(
                f"the store on which ranks compare steps does not answer: its process has stopped or ended ({error})"
            ) from error
        if others:
            raise DisagreementError(self._difference(others))

    def look_again(self) -> str | None:
        """The difference between this rank's failed step and the others', None where there is none or none is known."""
        if self._handshake is None:
            return None
        try:
            others = self._handshake.others(seconds=_LOOK_SECONDS)
        except RuntimeError:  # the store has stopped or ended, perhaps with the process that failed first
            return None
        return self._difference(others) if others else None

    def _difference(self, others: dict[int, str]) -> str:
        own = {} if self.rank is None else {self.rank: self._what}
        return (
            f"the ranks do not run the same step: {'; '.join(by_text(own | others))}. Give every rank the same "
            "plan, and call step() and eval() in one order; rebuild the communicator and the runtime first"
        )
