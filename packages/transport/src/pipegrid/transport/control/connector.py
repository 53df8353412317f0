"""Connects this rank with the ranks at the other ends of its lanes: they compare what they open, then make groups."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch

from pipegrid.core.lanes import LaneSharing, LaneSpec, opening_key
from pipegrid.topology import GroupCreationTimeoutError, GroupSpec, GroupStoreError, control_store, create_groups
from pipegrid.topology.bounded_calls import BoundedCalls, SilentStoreError
from pipegrid.topology.rendezvous import Rendezvous
from pipegrid.transport.backends import (
    DryMover,
    GlooMover,
    Loop,
    Mover,
    NcclMover,
    StagedMover,
    connect_members,
    kind_of,
    lift_timeout,
    nccl_options,
    never_preempt,
    one_loop,
    warn_of_watchdog,
)
from pipegrid.transport.backends.wire import ControlWire
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PError, P2PMismatchError, P2PPeerError, P2PTimeoutError
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.streams import new_stream

_Bundle: TypeAlias = tuple[LaneSpec, ...]  # all lanes of a communicator, of whichever ranks, ascending
_Connected: TypeAlias = tuple[Connection, int]  # of a lane, and its number among all lanes of the communicator
_MOST_STREAMS = 28  # torch hands out 32 per device; groups past that share one, and wait for each other

T = TypeVar("T")


class Connector:
    """Connects this rank with the ranks at the other ends of its lanes."""

    def __init__(self, rank: int, *, backend: str, device: torch.device, config: P2PConfig) -> None:
        self.groups: list[Any] = []  # all that were made
        # How often lanes between this rank and one of its peers had been opened before; their number is the same.
        self.turn = 0
        self._rank, self._device, self._config = rank, device, config
        self._on_device = kind_of(backend).in_streams and not config.staged
        self._staged = not self._on_device and (config.staged or device.type != "cpu")
        self._backend = "gloo" if config.staged and kind_of(backend).peers else backend
        self._receive_stream = new_stream(device) if self._on_device or self._staged else None
        self._aside = new_stream(device) if kind_of(self._backend).keeps_sends else None
        self._timeout = timedelta(seconds=config.open_deadline)
        self._calls = BoundedCalls("pipegrid-opening")

    def connect(self, bundles: Sequence[_Bundle]) -> dict[LaneSpec, _Connected]:
        """A connection for each lane of this rank on these communicators of it.

        All pairs of ranks compare what they open, then communicators are made, each in the order of `opening_key`.
        """
        if self._on_device and bundles:
            warn_of_watchdog(self._backend)
        if self._on_device and len(bundles) > _MOST_STREAMS:
            warnings.warn(
                f"rank {self._rank} opens {len(bundles)} communicators, each with a stream; beyond {_MOST_STREAMS} "
                "torch shares streams, and transfers wait for each other. Use "
                "communicators=fewest_communicators(plan), or open fewer lanes (traffic=)",
                stacklevel=3,
            )
        wanted = {_group_spec(bundle, "data"): bundle for bundle in bundles}
        own = {spec: [lane for lane in lanes if self._rank in lane.pair] for spec, lanes in wanted.items()}
        found: dict[LaneSpec, _Connected] = {}
        try:
            for pair in sorted({lane.pair for lanes in own.values() for lane in lanes}, key=opening_key):
                between = {
                    spec: here for spec, lanes in own.items() if (here := [lane for lane in lanes if lane.pair == pair])
                }
                with self._meeting(between):
                    self._compare(pair, between)
            for ranks in sorted({spec.ranks for spec in wanted}, key=opening_key):
                alike = [spec for spec in wanted if spec.ranks == ranks]
                with self._meeting({spec: own[spec] for spec in alike}):
                    found |= self._connect_members({spec: wanted[spec] for spec in alike})
        finally:
            self._calls.close()
        return found

    def stand_alone(self, bundles: Sequence[_Bundle]) -> dict[LaneSpec, _Connected]:
        """A connection for each of these lanes in a dry run, where no other rank exists."""
        found: dict[LaneSpec, _Connected] = {}
        for bundle in bundles:
            (group,) = self._create([_group_spec(bundle, "data")], self._backend, None).values()
            connection = Connection(DryMover(), group=group, is_shared=len(bundle) > 1)
            found |= {lane: (connection, index) for index, lane in enumerate(bundle)}
        return found

    def _compare(self, pair: tuple[int, int], between: Mapping[GroupSpec, Sequence[LaneSpec]]) -> None:
        """Raise P2PMismatchError on both ranks of ``pair`` where they make other groups: each would wait for ever."""
        rank, config = self._rank, self._config
        groups = "; ".join(f"{spec.label} of ranks {list(spec.ranks)}" for spec in between)
        kind = config.communicators
        here = {
            "lanes": shortened(", ".join(str(lane) for lane in sorted(itertools.chain(*between.values())))),
            "communicators": shortened(groups if isinstance(kind, LaneSharing) else kind),
            "backend": self._backend,
            "max_ctas": str(config.max_ctas if self._on_device else None),
            "open_deadline": str(float(config.open_deadline)),
        }
        peer, name = sum(pair) - rank, "-".join(map(str, pair))
        turn = Rendezvous(self._store, pair, rank, f"lanes {name}", self._timeout).meet(name)
        self.turn = max(self.turn, turn)

        def exchange() -> Any:
            self._store.set(f"{name}/{turn}/{rank}", json.dumps(here))
            return self._store.get(f"{name}/{turn}/{peer}")

        there = json.loads(self._ask("while lanes are opened", exchange))
        require_same(here, there, f"ranks {rank} and {peer} open lanes")

    def _connect_members(self, wanted: Mapping[GroupSpec, _Bundle]) -> dict[LaneSpec, _Connected]:
        """Connections over communicators of the same ranks."""
        _, loop = gloo = self._gloo
        channels: dict[GroupSpec, Any] = {}
        if self._on_device:
            made = self._create(wanted, self._backend, nccl_options(self._backend, self._config.max_ctas))
            channels = self._create([_group_spec(lanes, "control") for lanes in wanted.values()], *gloo)
        else:
            made = self._create(wanted, *gloo)
        found: dict[LaneSpec, _Connected] = {}
        for spec, lanes in wanted.items():
            group, own = made[spec], {index: lane for index, lane in enumerate(lanes) if self._rank in lane.pair}
            there = {index: sum(lane.pair) - self._rank for index, lane in own.items()}
            peers = {index: spec.ranks.index(peer) for index, peer in there.items()}
            mover: Mover
            if self._on_device:
                kind = kind_of(self._backend, group)
                connect_members(group, self._device, kind, self._config.open_deadline)
                lift_timeout(group)
                mover = NcclMover(group, peers, self._device, kind, self._aside)
            else:
                mover = GlooMover(loop.take_backend(group), peers, len(lanes))
                mover = StagedMover(mover, self._device) if self._staged else mover
            channel = channels.get(_group_spec(lanes, "control"), group)
            wires = {peer: ControlWire(channel, peers[index]) for index, peer in there.items()}
            # What a shared one moves both ways is one batch, which comes after the computing of what it sends.
            shared = len(lanes) > 1
            stream = None if shared else self._receive_stream
            connection = Connection(mover, wires, group, is_shared=shared, receive_stream=stream)
            found |= {lane: (connection, index) for index, lane in own.items()}
        return found

    def _create(self, wanted: Iterable[GroupSpec], backend: str, options: Any) -> dict[GroupSpec, Any]:
        made = create_groups(wanted, backend=backend, timeout=self._timeout, pg_options=options)
        if isinstance(options, Loop):
            never_preempt()
        self.groups.extend(made.values())
        return made

    @contextmanager
    def _meeting(self, groups: Mapping[GroupSpec, Sequence[LaneSpec]]) -> Iterator[None]:
        """Failures of group creation, as errors of lanes."""
        try:
            yield
        except P2PError:
            raise
        except RuntimeError as error:
            if isinstance(error, GroupCreationTimeoutError) and not isinstance(error, GroupStoreError):
                named = [spec for spec in groups if repr(spec.label) in str(error)]
                lane = groups[[*named, *groups][0]][0]
                late = not_opened(lane, self._rank, sum(lane.pair) - self._rank, self._config.open_deadline)
                raise late from error
            lanes = ", ".join(str(lane) for bundle in groups.values() for lane in bundle)
            raise P2PPeerError(f"rank {self._rank} could not open lanes {lanes}: {error}") from error

    @cached_property
    def _store(self) -> Any:
        return self._ask("before lanes are opened", lambda: control_store("opening lanes"))

    def _ask(self, what: str, action: Callable[[], T]) -> T:
        """The result of a call of the store, whose failures are errors of lanes."""
        limit = self._config.open_deadline
        try:
            return self._calls.run(action, seconds=limit)
        except SilentStoreError as error:
            silent = f"no answer from the store for {limit:.3g} s {what}; look at the process that hosts it"
            raise P2PPeerError(silent) from error
        except Exception as error:
            raise P2PPeerError(f"the store was lost {what} ({error})") from error

    @cached_property
    def _gloo(self) -> tuple[str, Loop]:
        """Backend and options of groups on a CPU."""
        return one_loop()


def not_opened(spec: LaneSpec, rank: int, peer: int, seconds: float) -> P2PTimeoutError:
    """The error of a lane whose other end did not come."""
    return P2PTimeoutError(
        rank=rank,
        peer=peer,
        lane=str(spec),
        sequence=0,
        seconds=seconds,
        what="opening, before",
        setting="open_deadline",
    )


def _group_spec(bundle: _Bundle, use: str) -> GroupSpec:
    names = ",".join(map(str, bundle))
    if len(bundle) > 1:
        names = f"{len(bundle)} lanes/{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
    ranks = sorted({rank for lane in bundle for rank in lane.pair})
    return GroupSpec(ranks, f"transport/{names}/{use}", shared=False)


def require_same(here: dict[str, str], there: dict[str, str], what: str) -> None:
    """Raise P2PMismatchError for settings that differ between two ranks; ``what`` they do begins the text."""
    different = {key: (here[key], there.get(key)) for key in here if here[key] != there.get(key)}
    if different:
        raise P2PMismatchError(f"{what} with different settings (here, there): {different}")


def shortened(text: str) -> str:
    """``text``, long ones by their digest: an error that shows both sides should be readable."""
    if len(text) <= 160:
        return text
    return f"{text[:100]}... {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
