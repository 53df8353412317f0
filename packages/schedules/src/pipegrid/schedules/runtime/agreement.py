"""Whether a rank and those that it exchanges messages with are about to run the same step, before the first message.

Each tells the others what it runs and looks at what they say, once a step (see `pipegrid.transport.handshake`).
Whoever comes second to a step that differs sees it, and sends nothing; the one that had begun waits for messages that
will not come, is told so, and sees the same when it looks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import define, field

from pipegrid.schedules.monitor import DisagreementError

if TYPE_CHECKING:
    from pipegrid.schedules.plan.plan import Plan
    from pipegrid.transport.edge import Edge
    from pipegrid.transport.handshake import Handshake


@runtime_checkable
class NeighbourlyCommunicator(Protocol):
    """A communicator between processes that can tell others something beside its lanes."""

    def neighbours(self, edges: Iterable[Edge]) -> Handshake:
        """The ranks at the other ends of ``edges``."""
        ...


@define(eq=False)
class StepAgreement:
    """What this rank has agreed on with those at the other ends of ``edges``.

    Without a `NeighbourlyCommunicator` there is nobody to ask: positions within one process, say.
    """

    plan: Plan
    communicator: object
    edges: tuple[Edge, ...]
    rank: int | None
    _neighbours: Handshake | None = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)
    _what: str = field(default="", init=False)

    def begin(self, kind: str) -> None:
        """A step of this ``kind`` ("a step", "an evaluation") begins; nothing was sent for it yet.

        Raises:
            DisagreementError: another rank has begun something else.
        """
        if not self._asked:
            self._asked = True
            if self.edges and isinstance(self.communicator, NeighbourlyCommunicator):
                self._neighbours = self.communicator.neighbours(self.edges)
        if self._neighbours is None:
            return
        self._what = f"{kind} of {self.plan.num_microbatches} microbatches (plan {self.plan.digest})"
        others = self._neighbours.begin(self._what)
        if others:
            raise DisagreementError(self._told(others))

    def look_again(self) -> str | None:
        """What the others run in the step that failed here, in words, where it is something else and can be known."""
        if self._neighbours is None:
            return None
        try:
            others = self._neighbours.others()
        except RuntimeError:  # the store's server is gone, with the process that failed first, perhaps
            return None
        return self._told(others) if others else None

    def _told(self, others: dict[int, str]) -> str:
        theirs = ", ".join(f"rank {rank} {what}" for rank, what in others.items())
        return (
            f"the ranks do not run the same step: rank {self.rank} runs {self._what}, {theirs}. Give every rank the "
            "same plan, so the same number of microbatches, and call step() and eval() in the same order on all; "
            "rebuild the communicator and the runtime first"
        )
