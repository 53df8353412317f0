"""What both ends of a lane know about the messages to come, and how the receiver's wish is held against it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipegrid.transport.errors import P2PMismatchError, P2PUsageError
from pipegrid.transport.message import Signature
from pipegrid.transport.shape_mode import ShapeMode
from pipegrid.transport.spec import LaneSpec


class Agreement:
    """Signatures that were announced and not used yet: one that stands for all messages, or one per message.

    Both ends keep one each and go through the same states: the sender when it announces and sends, the
    receiver when a header arrives and when it posts a receive.
    """

    def __init__(self, lane: LaneSpec, mode: ShapeMode, standing: Signature | None = None) -> None:
        self._lane = lane
        self._mode = mode
        self._table: deque[Signature] = deque()
        self.standing = standing

    @property
    def stands(self) -> bool:
        """Whether what the first header says holds for all later messages."""
        return self._mode in ("agreed", "given")

    @property
    def outstanding(self) -> int:
        """Messages that were announced one by one and not used yet."""
        return len(self._table)

    def send(self, signature: Signature, sequence: int) -> bool:
        """Use up what message ``sequence`` was announced as; whether it needs a header of its own.

        Raises:
            P2PMismatchError: the message is not what was announced.
            P2PUsageError: see `check`; nothing is used up.
        """
        self.check(signature, sequence)
        if self.standing is None and not self._table:
            if self.stands:
                self.standing = signature
            return True
        announced = self.standing or self._table.popleft()
        if signature != announced:
            raise P2PMismatchError(
                f"message {sequence} of lane {self._lane} is {signature}, but {announced} was announced to rank "
                f"{self._lane.destination}; "
                + (
                    "shapes that change need variable_seq_lengths=True, or renew() on both sides between two messages"
                    if self.standing
                    else "send what the manifest says, in its order"
                )
            )
        return False

    def check(self, signature: Signature, sequence: int, *, ahead: int = 0) -> None:
        """Refuse a message that can be sent neither as announced nor with a header of its own.

        Args:
            signature: of the message.
            sequence: its number.
            ahead: messages that will be sent before it, and have used up nothing yet.

        Raises:
            P2PUsageError: every message must be in a manifest, and this one is not; or it requires grad where the
                receiver was told that nothing does.
        """
        announced = self.standing
        if announced is None and len(self._table) > ahead:
            announced = self._table[ahead]
        if announced is None:
            if self._mode == "manifest":
                raise P2PUsageError(
                    f"message {sequence} of lane {self._lane} is in no manifest; call announce() with the shapes of "
                    f"all messages of the step before the first of them is sent"
                )
            return
        lost = [
            index
            for index, (spec, told) in enumerate(zip(signature.tensors, announced.gradients, strict=False))
            if spec.requires_grad and not told
        ]
        if lost:
            raise P2PUsageError(
                f"in message {sequence} of lane {self._lane}, {signature}, tensor {lost[0]} requires grad, but rank "
                f"{self._lane.destination} was told that it does not and would send no gradient back; "
                + (
                    "call renew() on both sides before what is frozen changes"
                    if self.standing
                    else "announce it with a tensor that requires grad"
                )
            )

    def announce(self, signatures: Sequence[Signature], *, standing: bool) -> None:
        """Take note of what was announced."""
        if standing:
            self.standing = signatures[0]
        else:
            self._table.extend(signatures)

    def receive(self) -> Signature | None:
        """Use up what the next message was announced as; None where a header has to come first."""
        if self.standing is not None:
            return self.standing
        return self._table.popleft() if self._table else None

    def renew(self) -> None:
        """Forget what stands: the next message has a header again."""
        self.standing = None
