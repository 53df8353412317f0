"""A handshake before each step: ranks at the two ends of lanes compare what they are about to run. No torch.

It goes over a small store beside the lanes: each rank writes one key per neighbour and reads one of each. A rank writes
before it reads, so the second to come to a step sees the first one's key: two that run different steps cannot both
begin, and no rank waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from attrs import define, field

from pipegrid.topology.bounded_calls import BoundedCalls, SilentStoreError
from pipegrid.transport.errors import P2PLaneDeadError, P2PPeerError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")


@define(eq=False)
class StoreCalls:
    """Calls of a store with a deadline, whose failures are errors of lanes.

    Attributes:
        seconds: each call's deadline, where it has none of its own.
    """

    seconds: float
    _calls: BoundedCalls = field(factory=lambda: BoundedCalls("pipegrid-handshake"), init=False)

    def call(self, what: str, action: Callable[[], T], *, seconds: float | None = None) -> T:
        """The result of ``action``.

        Raises:
            P2PPeerError: the deadline passed, or that of an earlier call whose answer has not come yet; or the store
                is lost.
            P2PLaneDeadError: the communicator was closed.
        """
        if self._calls.closed:
            raise P2PLaneDeadError("the communicator was closed on this rank")
        limit = self.seconds if seconds is None else seconds
        silent = f"no answer from the store for {limit:.3g} s {what}; look at the process that hosts it"
        if self._calls.stuck:
            raise P2PPeerError(silent)
        try:
            return self._calls.run(action, seconds=limit)
        except SilentStoreError as error:
            raise P2PPeerError(silent) from error
        except Exception as error:
            raise P2PPeerError(f"the store was lost {what} ({error})") from error

    def end(self) -> None:
        """End the thread that makes the calls; later ones raise. Idempotent."""
        self._calls.close()


@define(eq=False)
class PeerHandshake:
    """The announcements of this rank and rank ``peer``: ``mine`` and ``theirs`` are keys of the store.

    A rank may be some steps ahead of the other, so it says since which step it runs what, as far back as the other is
    known to have come.
    """

    peer: int
    mine: str
    theirs: str
    _step: int = field(default=0, init=False)
    _said: list[tuple[int, str]] = field(factory=list, init=False)
    _as_text: str = field(default="", init=False)
    _heard: int = field(default=0, init=False)

    @classmethod
    def between(cls, rank: int, peer: int, pair: str) -> PeerHandshake:
        """The handshake of ``rank`` with ``peer`` over a connection that both call ``pair``."""
        return cls(peer, f"{pair}/{rank}", f"{pair}/{peer}")

    @property
    def known(self) -> bool:
        """Whether the peer has ever written its key, as far as this rank knows."""
        return self._heard > 0

    def next(self, what: str) -> str:
        """The value to write before this rank runs ``what``."""
        self._step += 1
        if not self._said or self._said[-1][1] != what:
            self._said.append((self._step, what))
            self._as_text = json.dumps(self._said)
        return f"[{self._step}, {self._as_text}]"

    def difference(self, value: bytes) -> str | None:
        """The step that the peer runs, if it differs from this rank's; None also before the peer has announced it."""
        step, said = json.loads(value)
        self._heard = step
        while len(self._said) > 1 and self._said[1][0] <= step:  # the other will not ask for older ones
            self._said.pop(0)
            self._as_text = json.dumps(self._said)
        if step < self._step:
            return None
        theirs: str = next(what for since, what in reversed(said) if since <= self._step)
        return None if theirs == self._said[-1][1] else theirs


@define(eq=False)
class Handshake:
    """The handshakes of this rank with some of the ranks at the other ends of its lanes.

    Attributes:
        calls: make the calls of the store, with a deadline.
    """

    store: Store
    peers: Sequence[PeerHandshake]
    calls: StoreCalls = field(factory=lambda: StoreCalls(300.0))

    def begin(self, what: str, *, seconds: float | None = None) -> dict[int, str]:
        """Announce to the neighbours that this rank is about to run ``what``. Waits for no rank.

        Every rank calls it once for each step that it runs with these neighbours. ``seconds``: the store's deadline, in
        place of that of ``calls``.

        Returns:
            what each neighbour runs in this step, of those that have come to it and run something else.
        """
        return self.calls.call("before a step", lambda: self._begin(what), seconds=seconds)

    def others(self, *, seconds: float | None = None) -> dict[int, str]:
        """As `begin`, for the step that was begun: neighbours that have come since and run something else."""
        return self.calls.call("in a step", self._others, seconds=seconds)

    def _begin(self, what: str) -> dict[int, str]:
        for one in self.peers:
            self.store.set(one.mine, one.next(what))
        return self._others()

    def _others(self) -> dict[int, str]:
        here = [one for one in self.peers if one.known or self.store.check([one.theirs])]
        if len(here) > 1 and self.store.has_extended_api():  # type: ignore[attr-defined]  # public, untyped
            values = self.store.multi_get([one.theirs for one in here])
        else:
            values = [self.store.get(one.theirs) for one in here]
        found = {one.peer: one.difference(value) for one, value in zip(here, values, strict=True)}
        return {peer: what for peer, what in found.items() if what is not None}
