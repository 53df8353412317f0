"""The errors of this package: what, value and rule, and the remedy where it is not obvious. No torch."""

from __future__ import annotations

from pipegrid.core.errors import P2PError, P2PUsageError


class P2PMismatchError(P2PError):
    """The two sides of a lane disagree about a message. Raised on both sides; the lane is dead."""


class P2PPeerError(P2PError, ConnectionError):
    """The peer died, closed the lane, or ended it for a cause of its own, which the text gives first."""


class P2PLaneDeadError(P2PError):
    """A lane or a communicator was used after it had failed or was closed; the text gives the first failure."""


class CollectiveFailedError(RuntimeError):
    """A collective was not done by its deadline, or a rank of its group died or was ended."""


class P2PTimeoutError(P2PError, TimeoutError):
    """A transfer was not done by its deadline; its lane is dead.

    Attributes:
        rank: the global rank that waited.
        peer: the global rank on the other side.
        lane: the lane, as text.
        sequence: the number of the message on its lane, from 0.
        seconds: the deadline.

    Examples:
        >>> error = P2PTimeoutError(rank=0, peer=1, lane="0>1", sequence=3, seconds=60.0, what="a receive")
        >>> error.lane, error.seconds
        ('0>1', 60.0)
    """

    def __init__(
        self, *, rank: int, peer: int, lane: str, sequence: int, seconds: float, what: str, setting: str = "deadline"
    ) -> None:
        super().__init__(
            f"rank {rank} waited {seconds:.3g} s for {what} message {sequence} of lane {lane}: no answer from rank "
            f"{peer}, which may itself be waiting for another rank; look at what rank {peer} was doing, or, if it is "
            f"only slow, give a longer deadline (P2PConfig.{setting})"
        )
        self.rank, self.peer, self.lane, self.sequence, self.seconds = rank, peer, lane, sequence, seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: the constructor takes keywords only."""
        return (_rebuild_timeout, (str(self), self.__dict__))


def _rebuild_timeout(text: str, state: dict[str, object]) -> P2PTimeoutError:
    error: P2PTimeoutError = OSError.__new__(P2PTimeoutError, text)
    RuntimeError.__init__(error, text)
    error.__dict__.update(state)
    return error


def text_of(error: object) -> str:
    """``str(error)``; the type's name where that is empty or raises."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 -- a user's __str__ may raise anything
        return f"{type(error).__name__} (its text cannot be read: {type(failure).__name__})"
    return text or type(error).__name__


def relayed(text: str, relay: str) -> str:
    """The text of an error that is passed on: the cause stays first, who passed it on follows in brackets."""
    first, newline, rest = text.partition("\n")
    return f"{first} ({relay}){newline}{rest}"


__all__ = [
    "CollectiveFailedError",
    "P2PError",
    "P2PLaneDeadError",
    "P2PMismatchError",
    "P2PPeerError",
    "P2PTimeoutError",
    "P2PUsageError",
]
