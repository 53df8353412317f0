"""Every error this package raises on purpose; each says the value, the rule and the remedy. No torch."""

from __future__ import annotations


class P2PError(RuntimeError):
    """Something about point-to-point traffic went wrong; the base of all errors of this package."""


class LaneSpecError(P2PError, ValueError):
    """The description of a lane is not well formed, or contradicts the world."""


class P2PConfigError(P2PError, ValueError):
    """A setting has a value it cannot have, or two settings contradict each other."""


class P2PUsageError(P2PError, ValueError):
    """A call that this lane, edge, rank or moment does not have: nothing was sent."""


class P2PPayloadError(P2PError, ValueError):
    """A payload that cannot be sent as it is: its kind, layout, dtype or device. Nothing was sent."""


class P2PMismatchError(P2PError):
    """The two sides of a lane disagree about what travels on it. Raised on both; the lane is dead."""


class P2PPeerError(P2PError, ConnectionError):
    """The other side of a lane died, closed the lane, or gave it up for the reason that is told."""


class P2PLaneDeadError(P2PError):
    """A lane was used that had failed, or had been closed, before; the text tells of the first failure."""


class P2PTimeoutError(P2PError, TimeoutError):
    """A transfer did not end before its deadline; its lane is dead.

    Attributes:
        rank: the global rank that waited.
        peer: the global rank on the other side.
        lane: the lane, as text.
        sequence: the number of the message on its lane, from 0.
        seconds: how long was waited.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        lane: str,
        sequence: int,
        seconds: float,
        what: str,
        setting: str = "deadline",
    ) -> None:
        super().__init__(
            f"rank {rank} waited {seconds:.3g} s for {what} message {sequence} of lane {lane}, and rank {peer} "
            f"did not do its part. Look at where rank {peer} stands: it is slow, stopped, or in another order; "
            f"if it is only slow, give a longer deadline (P2PConfig.{setting})"
        )
        self.rank = rank
        self.peer = peer
        self.lane = lane
        self.sequence = sequence
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: the constructor takes keywords only."""
        return (_rebuild_timeout, (str(self), self.__dict__))


def _rebuild_timeout(text: str, state: dict[str, object]) -> P2PTimeoutError:
    error: P2PTimeoutError = OSError.__new__(P2PTimeoutError, text)
    RuntimeError.__init__(error, text)
    error.__dict__.update(state)
    return error
