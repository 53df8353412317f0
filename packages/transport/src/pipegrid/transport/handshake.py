"""What ranks at the two ends of lanes tell each other before a step: what they are about to run. No torch.

It goes over a small store, beside the lanes: each rank writes one key per neighbour and reads one of each. A rank
writes before it reads, so whoever comes second to a step sees what the first said: two that run different things
cannot both begin, and nobody waits for anybody.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from attrs import define, field


class HandshakeStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def has_extended_api(self) -> bool:
        """Whether the store has ``multi_get``."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read several values that are there, at once."""
        ...


@define(eq=False)
class PeerHandshake:
    """What this rank and rank ``peer`` have said to each other; ``pair`` names the two ends on both of them.

    A rank may be some steps ahead of the other, so it says since which step it runs what: as far back as the other is
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
        """The one of ``rank`` with ``peer`` over a connection that both call ``pair``."""
        return cls(peer, f"{pair}/{rank}", f"{pair}/{peer}")

    @property
    def known(self) -> bool:
        """Whether the other has ever said anything, as far as this rank knows."""
        return self._heard > 0

    def next(self, what: str) -> str:
        """This rank is about to run ``what``: the value to write."""
        self._step += 1
        if not self._said or self._said[-1][1] != what:
            self._said.append((self._step, what))
            self._as_text = json.dumps(self._said)
        return f"[{self._step}, {self._as_text}]"

    def difference(self, value: bytes) -> str | None:
        """What the other runs in this rank's step, where that is something else; None too where it has not come."""
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
    """Some of the ranks at the other ends of this rank's lanes."""

    store: HandshakeStore
    peers: Sequence[PeerHandshake]

    def begin(self, what: str) -> dict[int, str]:
        """Tell them that this rank is about to run ``what``. Waits for nobody.

        Every rank calls it once for each step that it runs with these neighbours.

        Returns:
            what each of them runs in this step, of those that have come to it and run something else.
        """
        for one in self.peers:
            self.store.set(one.mine, one.next(what))
        return self.others()

    def others(self) -> dict[int, str]:
        """As `begin`, for the step that was begun: who has come since and runs something else."""
        here = [one for one in self.peers if one.known or self.store.check([one.theirs])]
        if len(here) > 1 and self.store.has_extended_api():
            values = self.store.multi_get([one.theirs for one in here])
        else:
            values = [self.store.get(one.theirs) for one in here]
        found = {one.peer: one.difference(value) for one, value in zip(here, values, strict=True)}
        return {peer: what for peer, what in found.items() if what is not None}
