"""Ranks at the two ends of lanes tell each other what they are about to run, and compare it before a message is used.

What a rank runs goes over the control channel of one lane to each neighbour as its step begins, beside its first
messages: no rank waits for an answer before it sends. A neighbour's word is compared with this rank's own step before
anything is computed from what it has sent.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import define, field

from pipegrid.transport.backends.wire import STEP, PostedHeader
from pipegrid.transport.config import STEPS_KEPT

if TYPE_CHECKING:
    from pipegrid.transport.lane.lane import Lane

_UNHEARD = 2  # steps whose messages may not have been read yet: see `Handshake.say`
_KNOWN, _NEW = "known ", "new "


@define(eq=False)
class Handshake:
    """The exchange of each step's text with rank ``peer``, over the control channel of ``lane``, which joins the two.

    A rank may be ahead of the other by a step, of which it has heard nothing yet; messages are read in order.

    On lanes with ``shapes="learned"``, the signature of the batch is said as well. A signature that both have had in
    the same step is *known* to both afterwards: their lanes then have the shapes of its messages. Each tells whether it
    is. Two that know the signatures of their batches must have the same one; where it is new to both, they may differ:
    a rank of another module may be given other parts of the batch.
    """

    peer: int
    lane: Lane
    lanes: list[Lane] = field(factory=list, init=False)  # all between the two ranks
    said: str = field(default="", init=False)  # what this rank runs in this step
    heard: str | None = field(default=None, init=False)  # what the peer runs in it; None before that is known
    alike: bool = field(default=False, init=False)  # whether it is known to go with what this rank runs
    _known: dict[str, None] = field(factory=dict, init=False)
    _batch: str | None = field(default=None, init=False)  # of this step, while lanes follow it
    _coming: PostedHeader | RuntimeError = field(init=False)  # an error: the peer had ended before
    _sent: deque[Any] = field(factory=lambda: deque(maxlen=_UNHEARD), init=False)
    _learns: bool = field(init=False)  # whether lanes follow the signatures of batches

    def __attrs_post_init__(self) -> None:
        self._learns = self.lane.config.shape_mode == "learned"
        self._expect()

    def _expect(self) -> None:
        wire = self.lane.wire
        assert wire is not None  # `Lanes.neighbours` takes such lanes
        try:
            self._coming = PostedHeader(wire, self.lane.index, STEP)
        except RuntimeError as error:  # for `hear`: what the peer sent before its end may still be read
            self._coming = error

    def say(self, what: str, batch: str | None = None) -> None:
        """Tell the peer that this rank is about to run ``what``, on a batch of that signature.

        gloo delivers no message whose work is dropped. A rank that begins a step has heard the peer in the one before,
        which had then heard this rank two steps before: older works are done.
        """
        wire = self.lane.wire
        assert wire is not None
        if self.lane.ending.error is not None:
            self.lane.ending.require_alive()
        learns = batch is not None and self._learns
        self._batch = batch if learns else None
        known = self._batch in self._known
        self.said = what if not learns else f"{what}\n{_KNOWN if known else _NEW}{batch}"
        self.heard, self.alike = None, False
        if learns:
            for lane in self.lanes:
                lane.begin_step(batch if known else None, learn=not known)
        try:
            self._sent.append(wire.send_header(self.said.encode(), self.lane.index, STEP))
        except RuntimeError as error:
            self._lost(error)

    def hear(self, seconds: float) -> str | None:
        """Wait until it is known what the peer runs, unless it is; that, if it differs from this rank's step.

        Raises:
            P2PError: the peer has ended, or ended the lane, or said nothing for so many ``seconds``.
        """
        if (heard := self.heard) is None:
            if isinstance(self._coming, RuntimeError):
                self._lost(self._coming)
            try:
                heard = self.heard = self._coming.take(timedelta(seconds=seconds)).decode()
            except RuntimeError as error:
                self._lost(error)
            self._expect()
        self.alike = self.said.startswith(heard) or self._both_new(heard)
        return None if self.alike else heard

    def difference(self) -> str | None:
        """What the peer runs, as far as it has said so, if it is known to differ. Also where the lane has ended."""
        what = self.look()
        return None if what is None or self.said.startswith(what) or self._both_new(what) else what

    def differs(self) -> bool:
        """Whether the peer has said that it runs another step, and nobody has heard it yet. From any thread."""
        unheard = self.heard is None and bool(self.said) and self.lane.ending.error is None
        return unheard and self.difference() is not None

    def _both_new(self, what: str) -> bool:
        """Whether ``what``, perhaps the beginning of a text, differs from this rank's by the batch, new to both."""
        (own, _, batch), (other, _, others) = self.said.partition("\n"), what.partition("\n")
        return own == other and batch.startswith(_NEW) and others.startswith(_NEW)

    def end(self) -> None:
        """End a step in which the peer was heard: its shapes are known from now on, if the batches were alike."""
        if self._batch is not None:
            if self._batch not in self._known and self.heard == self.said:
                self._known[self._batch] = None
                for lane in self.lanes:
                    lane.learn(self._batch)
                if len(self._known) > STEPS_KEPT:
                    del self._known[next(iter(self._known))]
            for lane in self.lanes:
                lane.begin_step()
            self._batch = None

    def look(self) -> str | None:
        """The peer's text, as far as it has come; None before. Looks at memory alone: the lane may have ended."""
        if self.heard is not None or isinstance(self._coming, RuntimeError):
            return self.heard
        come = self._coming.look()
        return None if come is None else come.decode(errors="ignore")

    def _lost(self, error: RuntimeError) -> NoReturn:
        self.lane.ending.explain(error, None)
        raise self.lane.ending.error or error
