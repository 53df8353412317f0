"""What ranks write of an epoch, as data, and the decision of a vote as a pure function."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping

from attrs import asdict, field, frozen

from pipegrid.schedules.monitor.control import Failure
from pipegrid.transport.collectives.differences import by_text

_BITS = 20  # of the number of ranks, and of the check sum of a key's text


@frozen
class Epoch:
    """The ranks that run the job together, from one death to the next; epoch 0 has all of them."""

    number: int
    members: tuple[int, ...]


@frozen
class Verdict:
    """The outcome of a vote; equal on all its members, but for ``committed``.

    Attributes:
        epoch: the next one.
        dead: members of the last epoch that are lost, each with the reason.
        retired: members that live and leave with the dead.
        keys: how many keys are committed since the start of the job.
        committed: whether the key that this rank voted on is; else it is to be done again.
    """

    epoch: Epoch
    dead: Mapping[int, str]
    retired: tuple[int, ...]
    keys: int
    committed: bool = False


@frozen
class Ballot:
    """What a rank last worked on: the key, its number since the start of the job, and whether this rank has done it."""

    number: int
    key: str
    done: bool

    def to_text(self) -> str:
        """As text."""
        return json.dumps([self.number, self.key, self.done])


@frozen
class Alarm:
    """Why an epoch ends: ranks that are lost, with reasons, and the first other reason for a vote."""

    lost: Mapping[int, str] = field(factory=dict)
    why: str = ""

    def __str__(self) -> str:
        lost = "; ".join(f"rank {rank} is lost: {why}" for rank, why in self.lost.items())
        return lost or self.why

    def merged(self, other: Alarm) -> Alarm:
        """With what ``other`` says besides."""
        return Alarm({**other.lost, **self.lost}, self.why or other.why)

    def to_text(self) -> str:
        """As text."""
        return json.dumps([sorted(self.lost.items()), self.why])


@frozen
class Tally:
    """How many ranks have done a key, and a sum over the texts of their keys: it shows whether all had the same."""

    sum: int

    @classmethod
    def of(cls, key: str) -> Tally:
        """One rank that has done ``key``."""
        return cls(((zlib.crc32(key.encode()) & ((1 << _BITS) - 1)) << _BITS) + 1)

    @property
    def count(self) -> int:
        """Ranks that have done it."""
        return self.sum & ((1 << _BITS) - 1)

    def is_of(self, key: str) -> bool:
        """Whether all of them gave this text."""
        return self.sum == self.count * Tally.of(key).sum


def alarm_of(text: str) -> Alarm:
    """Read an alarm."""
    lost, why = json.loads(text)
    return Alarm({int(rank): str(reason) for rank, reason in lost}, why)


def verdict_to_text(outcome: Verdict | Failure) -> str:
    """As text, for every rank the same."""
    if isinstance(outcome, Failure):
        return json.dumps({"failed": asdict(outcome)})
    return json.dumps({**asdict(outcome), "dead": sorted(outcome.dead.items())})


def verdict_of(text: str) -> Verdict | Failure:
    """Read the outcome of a vote."""
    said = json.loads(text)
    if "failed" in said:
        return Failure(**said["failed"])
    epoch = Epoch(said["epoch"]["number"], tuple(said["epoch"]["members"]))
    return Verdict(epoch, dict(said["dead"]), tuple(said["retired"]), said["keys"])


def decide(
    epoch: Epoch, ballots: Mapping[int, Ballot], dead: Mapping[int, str], retired: Collection[int], *, rank: int
) -> Verdict | Failure:
    """The outcome that ``rank`` proposes for a vote at the end of ``epoch``.

    A rank begins a key when all members have done the one before it, so those that go on are at one key or at two
    successive ones. The first of the two is committed if all that are at it have done it; the second is not, unless
    all are at it.

    Args:
        epoch: which ends.
        ballots: of all its members but the dead, at least.
        dead: members that are lost, each with the reason.
        retired: members that leave with them.
        rank: this one, for a failure's text.
    """
    going_on = [member for member in epoch.members if member not in dead and member not in retired]
    counted = {member: ballots[member] for member in going_on or ballots}
    first = min(ballot.number for ballot in counted.values())
    behind = {member: ballot for member, ballot in counted.items() if ballot.number == first}
    if len({ballot.key for ballot in behind.values()}) > 1 or any(b.number > first + 1 for b in counted.values()):
        table = "; ".join(by_text({member: f"{b.key!r}, number {b.number}" for member, b in counted.items()}))
        return Failure(rank, f"the ranks do not work on the same key: {table}", disagreement=True)
    keys = first + all(ballot.done for ballot in behind.values())
    return Verdict(Epoch(epoch.number + 1, tuple(going_on)), dict(dead), tuple(sorted(retired)), keys)
