"""Neighbouring ranks compare the step that they run, before anything is computed from a message of it.

Each rank says what it runs as the step begins, beside its first messages (`pipegrid.transport.control.handshake`), and
waits for what a neighbour says when that one's first message has come; for the others, before gradients are finished.
A rank that comes to a step after its neighbours knows at once. The rank that finds a difference computes nothing from
it and ends its lanes; the others are stopped by that, and see the difference when they look again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from pipegrid.monitor import DisagreementError
from pipegrid.plans.plan import Plan
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.transport.base import Communicator
from pipegrid.transport.collectives.differences import by_text
from pipegrid.transport.control.handshake import Handshake

_LOOK_SECONDS, _POLL_SECONDS = 0.2, 0.005
_DIFFERENT = "the ranks do not run the same step"


@define(eq=False)
class StepAgreement:
    """Compares a step with the ranks at the other ends of this rank's edges, where the communicator knows them.

    Queues use their messages when the ranks at their other ends are known to agree.
    """

    plan: Plan
    communicator: Communicator
    queues: Sequence[RecvQueue | SendQueue]  # not the position: its stages would live until cycles are collected
    rank: int | None
    deadline: float  # seconds to wait for what a neighbour says
    _neighbours: Sequence[Handshake] | None = field(default=None, init=False)  # before the first step
    _of_queues: list[tuple[RecvQueue, Callable[[], None]]] = field(factory=list, init=False)
    _what: str = field(default="", init=False)
    _batch: str | None = field(default=None, init=False)
    _said: tuple[str, str, str | None] | None = field(default=None, init=False)
    _signature: str | None = field(default=None, init=False)

    def begin(self, kind: str, agree: str = "", batch: str | None = None) -> None:
        """Tell the neighbours of a step of this ``kind`` ("a step"), and ``agree``, what else is compared.

        DisagreementError where one is known to run something else. ``batch``: signature of the step's batch, where
        messages of one that was seen before need no headers.
        """
        if self._said != (kind, agree, batch):
            self._said, self._batch, plan = (kind, agree, batch), batch, self.plan
            self._what = f"{kind} of {plan.num_microbatches} microbatches (plan {plan.digest}){agree and f' {agree}'}"
            text = f"{self._what} {batch}".encode()
            self._signature = batch and hashlib.blake2b(text, digest_size=6).hexdigest()
        if self._neighbours is None:
            self._neighbours = self._connect()
        for one in self._neighbours:
            one.say(self._what, self._signature)
        others: dict[int, str] = {}
        for one in self._neighbours:
            if (what := one.difference()) is not None:
                others[one.peer] = what
        if others:
            raise DisagreementError(self._difference(others))
        for queue, hear in self._of_queues:
            queue.agree = hear

    def _connect(self) -> Sequence[Handshake]:
        found: Sequence[Handshake] | None = None
        communicator, queues = self.communicator, self.queues
        edges = tuple(sorted({queue.edge for queue in queues if not queue.local and queue.replica is None}))
        across = tuple(sorted({(queue.edge, queue.replica) for queue in queues if queue.replica is not None}))
        if across:
            found = communicator.neighbours_across(edges, across)
        elif edges:
            found = communicator.neighbours(edges)
        for queue in () if found is None else queues:
            if isinstance(queue, SendQueue):
                continue
            if queue.replica is not None:
                own = communicator.neighbours_across([], [(queue.edge, queue.replica)])
            else:
                own = None if queue.local else communicator.neighbours([queue.edge])
            self._of_queues += [] if own is None else [(queue, partial(self._hear, own))]
        return found or ()

    def end(self) -> None:
        """Hear the neighbours that have sent nothing, before gradients are finished; errors as of `begin`."""
        self._hear(self._neighbours or ())
        for one in () if self._batch is None else self._neighbours or ():
            one.end()

    def _hear(self, neighbours: Sequence[Handshake]) -> None:
        others: dict[int, str] = {}
        for one in neighbours:
            if not one.alike and (what := one.hear(self.deadline)) is not None:
                others[one.peer] = what
        if others:
            raise DisagreementError(self._difference(others))

    def look_again(self, told: str | None) -> str | None:
        """The known difference between this rank's failed step and the others'; None where none is known.

        ``told``: why a neighbour has ended this step, which it may have found out first.
        """
        if told is not None and told.startswith(_DIFFERENT):
            return told
        others: dict[int, str] = {}
        end = time.monotonic() + _LOOK_SECONDS
        while not others:
            said = {one.peer: (one.look(), one.difference()) for one in self._neighbours or ()}
            others = {peer: different for peer, (_, different) in said.items() if different is not None}
            if all(what is not None for what, _ in said.values()) or time.monotonic() >= end:
                break
            time.sleep(_POLL_SECONDS)
        if self._batch is None:  # a step that ended before all were told differs from none of what they tell
            others = {peer: what for peer, what in others.items() if what.partition("\n")[0] != self._what}
        return self._difference(others) if others else None

    def _difference(self, others: dict[int, str]) -> str:
        others = {peer: what.partition("\n")[0] for peer, what in others.items()}
        if all(what == self._what for what in others.values()):
            return (
                f"{_DIFFERENT}: {self._what}, and the batch of rank {', '.join(map(str, others))} has other shapes "
                f"than that of rank {self.rank}, which were alike before. Give every rank of a replica the same batch; "
                'or set variable_seq_lengths=True and shapes="header"'
            )
        own = {} if self.rank is None else {self.rank: self._what}
        return (
            f"{_DIFFERENT}: {'; '.join(by_text(own | others))}. Give every rank the same "
            "plan, and call step() and eval() in one order; rebuild the communicator and the runtime first"
        )
