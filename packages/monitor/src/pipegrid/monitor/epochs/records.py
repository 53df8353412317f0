"""Records of an epoch that ranks write, as data, and the decision of a vote as a pure function."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping

from attrs import Factory, asdict, astuple, evolve, field, frozen

from pipegrid.monitor.control import Failure
from pipegrid.transport.collectives.differences import by_text

_BITS = 20  # of the number of ranks, and of the check sum of a key's text


@frozen
class Epoch:
    """The ranks that run the job together, from one change of members to the next; epoch 0 has all of them.

    Attributes:
        number: from 0.
        members: ascending.
        incarnations: of every rank of the job, the last of its processes that was a member: 1 is the first process
            that was started for the rank. So at most one process of a rank is a member.
        joining: members without the state of the job, which they get from another one.

    Examples:
        >>> Epoch(number=1, members=(0, 2)).members
        (0, 2)
    """

    number: int
    members: tuple[int, ...]
    incarnations: Mapping[int, int] = Factory(lambda self: dict.fromkeys(self.members, 1), takes_self=True)
    joining: tuple[int, ...] = ()

    def has(self, rank: int, incarnation: int) -> bool:
        """Whether this process of ``rank`` is a member."""
        return rank in self.members and self.incarnations[rank] == incarnation


@frozen
class VoteResult:
    """The outcome of a vote; equal on all its members, but for ``committed``.

    Attributes:
        epoch: the next one.
        dead: members of the last epoch that are lost, each with the reason.
        retired: members that live and leave with the dead.
        keys: number of keys committed since the start of the job.
        committed: whether the key that this rank voted on is; else it is to be done again.
        joined: ranks whose new process is a member from now on.

    Examples:
        >>> VoteResult(epoch=Epoch(1, (0, 2)), dead={1: "no heartbeat"}, retired=(), keys=7).dead
        {1: 'no heartbeat'}
    """

    epoch: Epoch
    dead: Mapping[int, str]
    retired: tuple[int, ...]
    keys: int
    committed: bool = False
    joined: tuple[int, ...] = ()


@frozen
class Ballot:
    """A rank's vote: the key that it last worked on, and whether it has done it."""

    number: int  # of the key since the start of the job
    key: str  # its text
    done: bool  # whether this rank has done it
    edge: bool = False  # whether new processes may join before this key
    ready: bool = True  # whether this rank has the state of the job

    def to_text(self) -> str:
        """The ballot as text."""
        return json.dumps(astuple(self))


@frozen
class Alarm:
    """The reasons for an epoch's end: lost ranks and why; another reason; who asks to join, rank to incarnation."""

    lost: Mapping[int, str] = field(factory=dict)
    why: str = ""
    asking: Mapping[int, int] = field(factory=dict)

    def __str__(self) -> str:
        lost = "; ".join(f"rank {rank} is lost: {why}" for rank, why in self.lost.items())
        return lost or self.why

    def merged(self, other: Alarm) -> Alarm:
        """The union with ``other``; where both have a reason, this alarm's holds."""
        asking = {rank: max(each, other.asking.get(rank, 0)) for rank, each in self.asking.items()}
        return Alarm({**other.lost, **self.lost}, self.why or other.why, {**other.asking, **asking})

    def to_text(self) -> str:
        """The alarm as text."""
        return json.dumps([sorted(self.lost.items()), self.why, sorted(self.asking.items())])


@frozen
class DoneCount:
    """The number of ranks that have done a key, and a sum over their keys' texts: it shows whether all had the same."""

    sum: int

    @classmethod
    def of(cls, key: str) -> DoneCount:
        """One rank that has done ``key``."""
        return cls(((zlib.crc32(key.encode()) & ((1 << _BITS) - 1)) << _BITS) + 1)

    @property
    def count(self) -> int:
        """Ranks that have done it."""
        return self.sum & ((1 << _BITS) - 1)

    def is_of(self, key: str) -> bool:
        """Whether all of them gave this text."""
        return self.sum == self.count * DoneCount.of(key).sum


def alarm_of(text: str) -> Alarm:
    """Read an alarm."""
    lost, why, asking = json.loads(text)
    return Alarm(dict(lost), why, dict(asking))


def result_to_text(outcome: VoteResult | Failure) -> str:
    """The outcome as text, the same on every rank."""
    if isinstance(outcome, Failure):
        return json.dumps({"failed": asdict(outcome)})
    epoch = {**asdict(outcome.epoch), "incarnations": sorted(outcome.epoch.incarnations.items())}
    return json.dumps({**asdict(outcome), "epoch": epoch, "dead": sorted(outcome.dead.items())})


def result_of(text: str) -> VoteResult | Failure:
    """Read the outcome of a vote."""
    said = json.loads(text)
    if "failed" in said:
        return Failure(**said["failed"])
    of = said["epoch"]
    epoch = Epoch(of["number"], tuple(of["members"]), dict(of["incarnations"]), tuple(of["joining"]))
    lists = {name: tuple(said[name]) for name in ("retired", "joined")}
    return VoteResult(**{**said, **lists, "epoch": epoch, "dead": dict(said["dead"])})


Retire = Callable[[frozenset[int]], Iterable[int]]
"""The living ranks that leave with the given dead."""


def admissible(epoch: Epoch, asking: Mapping[int, int], living: Collection[int], retire: Retire) -> dict[int, int]:
    """The processes that ask to join and can: their incarnations by rank.

    Of ranks without a living process, each incarnation once; none that would retire at once, as peers are missing.
    """
    found = {
        rank: incarnation
        for rank, incarnation in asking.items()
        if rank not in living and incarnation > epoch.incarnations.get(rank, incarnation)
    }
    while found:
        missing = epoch.incarnations.keys() - found.keys() - {*living}
        if not (without := found.keys() & {*retire(frozenset(missing))}):
            break
        found = {rank: incarnation for rank, incarnation in found.items() if rank not in without}
    return found


def decide(
    epoch: Epoch, ballots: Mapping[int, Ballot], alarm: Alarm, retire: Retire = lambda _: (), *, rank: int
) -> VoteResult | Failure:
    """The outcome that ``rank`` proposes for a vote at the end of ``epoch``.

    A rank begins a key when all members have done the one before it, so those that go on are at one key or at two
    successive ones. The first of the two is committed if all that are at it have done it; the second is not, unless
    all are at it.

    New processes join where the next key is one that they may begin with. If nothing else has changed, members that
    have not got the state of the job leave: they have failed, or made others fail.

    ``ballots`` are of all members of the epoch but the lost ones, at least.
    """
    living = [member for member in epoch.members if member not in alarm.lost]
    retired = set(retire(frozenset(alarm.lost))) & set(living)
    going_on = [member for member in living if member not in retired]
    counted = {member: ballots[member] for member in going_on or ballots}
    first = min(ballot.number for ballot in counted.values())
    behind = {member: ballot for member, ballot in counted.items() if ballot.number == first}
    if len({ballot.key for ballot in behind.values()}) > 1 or any(b.number > first + 1 for b in counted.values()):
        table = "; ".join(by_text({member: f"{b.key!r}, number {b.number}" for member, b in counted.items()}))
        return Failure(rank, f"the ranks do not work on the same key: {table}", disagreement=True)
    keys = first + all(ballot.done for ballot in behind.values())
    following = next((ballot for ballot in counted.values() if ballot.number == keys), None)
    come = following is not None and following.edge and bool(going_on)
    joined = admissible(epoch, alarm.asking, going_on, retire) if come else {}
    joining = {member for member in going_on if not ballots[member].ready}
    if joining and not alarm.lost and not joined:
        without = dict.fromkeys(sorted(joining), "it has not got the state of the job")
        return decide(epoch, ballots, evolve(alarm, lost=without), retire, rank=rank)
    if going_on and len(joining) == len(going_on):
        return Failure(rank, "no rank with the state of the job is left: start all again, from the last checkpoint")
    members = tuple(sorted({*going_on, *joined}))
    joining_next = tuple(sorted({*joining, *joined}))
    following_epoch = Epoch(epoch.number + 1, members, {**epoch.incarnations, **joined}, joining_next)
    return VoteResult(following_epoch, dict(alarm.lost), tuple(sorted(retired)), keys, joined=tuple(sorted(joined)))
