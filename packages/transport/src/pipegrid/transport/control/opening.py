"""Opening lanes: groups among members only, in one order, each lane proved by a message before it is used."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from pipegrid.topology import (
    GroupCreationTimeoutError,
    GroupSpec,
    GroupStoreError,
    control_store,
    create_groups,
    discard_groups,
)
from pipegrid.topology.rendezvous import meet
from pipegrid.topology.torch_compat import is_dry
from pipegrid.transport.backends import (
    DryMover,
    GlooMover,
    LocalMover,
    Loop,
    Mover,
    NcclMover,
    StagedMover,
    connect_members,
    kind_of,
    lift_timeout,
    nccl_options,
    one_loop,
    warn_of_watchdog,
)
from pipegrid.transport.backends.wire import Wire, timedelta_of
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.control.handshake import StoreCalls
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.errors import (
    P2PConfigError,
    P2PError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
)
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.lane.endpoint import Endpoint
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.messages.payload import flatten, signature_of
from pipegrid.transport.sharing import LaneSharing, PositionLane, communicators_of
from pipegrid.transport.spec import LaneSpec, opening_key
from pipegrid.transport.streams import current_device, new_stream

_Bundle: TypeAlias = tuple[LaneSpec, ...]
"""All lanes of a communicator, of whichever ranks, ascending."""
_Connected: TypeAlias = tuple[Connection, int]
"""The connection of a lane, and its number among all lanes of the communicator."""

# torch hands out 32 streams per device; groups past that share one, and wait for each other.
_MOST_STREAMS = 28


def open_lanes(
    specs: Iterable[LaneSpec],
    *,
    config: Any = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    standing: Mapping[LaneSpec, Any] | None = None,
    declared: Mapping[LaneSpec, str] | None = None,
    carried: Mapping[LaneSpec, PositionLane] | None = None,
    beside: Lanes | None = None,
) -> Lanes:
    """Open those lanes of ``specs`` that this rank is an end of; each has carried a message on return.

    All ranks that are ends of a lane call this with the lane among their specs (and with all lanes of its communicator,
    where lanes share them); further lanes cost nothing. All ranks open lanes in one order.

    Args:
        specs: lanes, in any order.
        config: a `P2PConfig`, or any object with some of its attributes.
        backend: ``"gloo"``, ``"nccl"``, or another one that completes in stream order; None is the default group's for
            ``device``.
        device: where payloads live; None is the current GPU where the backend is NCCL, else the CPU.
        rank: this rank, where the caller knows it.
        standing: per lane, a payload like all that will travel (meta tensors do): shapes that are fixed now, compared
            between the two sides, and never need a header.
        declared: per lane, what its user says of the messages, in words; compared between the two sides.
        carried: per lane, the lane of the plan that it carries: where the communicators of ``config`` are a plan's.
        beside: lanes of this rank, of the same config, which these join: batches and the end are of all.

    Returns:
        the lanes of this rank, with those of ``beside``: a dict with `Lanes.batch`, `Lanes.abort` and `Lanes.close`.

    Raises:
        P2PConfigError: a lane given twice, or beyond the world; settings, backend and device that do not go together.
        P2PMismatchError: the two sides of a lane were given different settings or shapes.
        P2PTimeoutError: the other side of a lane did not come.
    """
    settings = as_config(config)
    here = dist.get_rank() if rank is None else rank
    ordered = _ordered(specs, standing or {})
    backend, place = resolve_device(backend, device)
    mine = [spec for spec in ordered if here in spec.pair]
    fixed = {spec: signature_of(*flatten(payload)) for spec, payload in (standing or {}).items()}
    every = communicators_of([spec for spec in ordered if not spec.is_local], settings.communicators, carried or {})
    own = [bundle for bundle in every if any(here in spec.pair for spec in bundle)]
    submitter = Submitter(settings, shares=False) if beside is None else beside.submitter
    submitter.shares |= any(len(bundle) > 1 for bundle in own)
    lanes: dict[LaneSpec, Lane] = {}
    end_of = partial(Endpoint, rank=here, device=place, config=settings)
    connector = _Connector(here, backend=backend, device=place, config=settings)
    try:
        connections = connector.connect(own) if kind_of(backend).peers else connector.stand_alone(own)
        for spec in sorted(mine, key=lambda spec: opening_key(spec.pair)):
            connection, index = connections.get(spec) or (Connection(LocalMover(place)), 0)
            end = end_of(spec=spec, connection=connection, index=index, standing=fixed.get(spec))
            lanes[spec] = Lane(end, submitter)
            if end.wire is not None:
                _prove(end, end.wire, (declared or {}).get(spec, ""))
    except BaseException:
        discard_groups(connector.groups)
        raise
    every_lane = Lanes(submitter) if beside is None else beside
    every_lane.join({spec: lanes[spec] for spec in mine}, connector.groups)
    return every_lane


def _ordered(specs: Iterable[LaneSpec], standing: Mapping[LaneSpec, Any]) -> list[LaneSpec]:
    ordered, world = sorted(specs), dist.get_world_size()
    faults = [
        *(f"lane {one} is given twice" for one, other in itertools.pairwise(ordered) if one == other),
        *(f"lane {one} has a rank beyond the world of {world}" for one in ordered if one.pair[1] >= world),
        *(f"standing has lane {one}, which is not to be opened" for one in standing.keys() - set(ordered)),
    ]
    if faults:
        raise P2PConfigError(faults[0])
    return ordered


def resolve_device(
    backend: str | None, device: torch.device | str | None, group: dist.ProcessGroup | None = None
) -> tuple[str, torch.device]:
    """The backend that moves payloads, and the device where they live, from the backends of the group."""
    offered = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device is None:
        kind = kind_of(backend or offered.get("cuda", "none"))
        gpu = current_device() if kind.in_streams and "cuda" in kind.devices else None
        device = gpu or torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = current_device() or device
    backend = backend or offered.get(device.type, "none")
    kind = kind_of(backend)
    if device.type not in kind.devices or not dist.is_backend_available(backend):
        raise P2PConfigError(f"backend {backend!r} does not move tensors of {device}; the group offers {offered}")
    if kind.peers and is_dry():
        raise P2PConfigError(
            f"backend {backend!r} would wait for other ranks, but the default group's is 'fake', a dry run: they do "
            f"not exist. Leave the backend to the default group"
        )
    bound = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    if kind.in_streams and bound is not None and bound.type == device.type and bound != device:
        raise P2PConfigError(
            f"backend {backend!r} would move tensors of {device}, but the default process group is bound to {bound}, "
            f"where its groups connect; call torch.cuda.set_device before init_process_group, with the device of its "
            f"device_id or, where none is given, of LOCAL_RANK"
        )
    return backend, device


class _Connector:
    """Connects this rank with the ranks at the other ends of its lanes.

    Attributes:
        groups: all that were made.
    """

    def __init__(self, rank: int, *, backend: str, device: torch.device, config: P2PConfig) -> None:
        self.groups: list[Any] = []
        self._rank, self._device, self._config = rank, device, config
        self._on_device = kind_of(backend).in_streams and not config.staged
        self._staged = not self._on_device and (config.staged or device.type != "cpu")
        self._backend = "gloo" if config.staged and kind_of(backend).peers else backend
        self._receive_stream = new_stream(device) if self._on_device or self._staged else None
        self._aside = new_stream(device) if kind_of(self._backend).keeps_sends else None
        self._timeout = timedelta(seconds=config.open_deadline)
        self._calls = StoreCalls(config.open_deadline)

    def connect(self, bundles: Sequence[_Bundle]) -> dict[LaneSpec, _Connected]:
        """A connection for each lane of this rank on these communicators of it.

        First all pairs of ranks compare what they open, then communicators are made, each in the order of
        `opening_key`.
        """
        if self._on_device and bundles:
            warn_of_watchdog(self._backend)
        if self._on_device and len(bundles) > _MOST_STREAMS:
            warnings.warn(
                f"rank {self._rank} opens {len(bundles)} communicators, each with a stream; beyond {_MOST_STREAMS} "
                f"torch shares streams, and transfers wait for each other. Use "
                f"communicators=fewest_communicators(plan), or open fewer lanes (traffic=)",
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
                with _meeting(between, self._rank, self._config.open_deadline):
                    self._compare(pair, between)
            for ranks in sorted({spec.ranks for spec in wanted}, key=opening_key):
                alike = [spec for spec in wanted if spec.ranks == ranks]
                with _meeting({spec: own[spec] for spec in alike}, self._rank, self._config.open_deadline):
                    found |= self._connect_members({spec: wanted[spec] for spec in alike})
        finally:
            self._calls.end()
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
        """Compare with the other rank of ``pair`` how both make groups: each would wait for one that it alone makes.

        Raises:
            P2PMismatchError: they differ; on both ranks, once both have come.
        """
        rank, config = self._rank, self._config
        groups = "; ".join(f"{spec.label} of ranks {list(spec.ranks)}" for spec in between)
        kind = config.communicators
        here = {
            "lanes": _shortened(", ".join(str(lane) for lane in sorted(itertools.chain(*between.values())))),
            "communicators": _shortened(groups if isinstance(kind, LaneSharing) else kind),
            "backend": self._backend,
            "max_ctas": str(config.max_ctas if self._on_device else None),
            "open_deadline": str(float(config.open_deadline)),
        }
        peer, name = sum(pair) - rank, "-".join(map(str, pair))
        turn = meet(self._store, name, ranks=pair, rank=rank, label=f"lanes {name}", timeout=self._timeout)

        def exchange() -> Any:
            self._store.set(f"{name}/{turn}/{rank}", json.dumps(here))
            return self._store.get(f"{name}/{turn}/{peer}")

        there = json.loads(self._calls.call("while lanes are opened", exchange))
        _require_same(here, there, f"ranks {rank} and {peer} open lanes")

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
            wires = {peer: Wire(channel, peers[index]) for index, peer in there.items()}
            # What a shared one moves both ways is one batch, which comes after the computing of what it sends.
            shared = len(lanes) > 1
            stream = None if shared else self._receive_stream
            connection = Connection(mover, wires, group, is_shared=shared, receive_stream=stream)
            found |= {lane: (connection, index) for index, lane in own.items()}
        return found

    def _create(self, wanted: Iterable[GroupSpec], backend: str, options: Any) -> dict[GroupSpec, Any]:
        made = create_groups(wanted, backend=backend, timeout=self._timeout, pg_options=options)
        self.groups.extend(made.values())
        return made

    @cached_property
    def _store(self) -> Any:
        return self._calls.call("before lanes are opened", lambda: control_store("opening lanes"))

    @cached_property
    def _gloo(self) -> tuple[str, Loop]:
        """Backend and options of groups on a CPU."""
        return one_loop()


@contextmanager
def _meeting(groups: Mapping[GroupSpec, Sequence[LaneSpec]], rank: int, seconds: float) -> Iterator[None]:
    """Failures of group creation, as errors of lanes."""
    try:
        yield
    except P2PError:
        raise
    except RuntimeError as error:
        if isinstance(error, GroupCreationTimeoutError) and not isinstance(error, GroupStoreError):
            named = [spec for spec in groups if repr(spec.label) in str(error)]
            spec = [*named, *groups][0]
            lane = groups[spec][0]
            raise _not_opened(lane, rank, sum(lane.pair) - rank, seconds) from error
        lanes = ", ".join(str(lane) for bundle in groups.values() for lane in bundle)
        raise P2PPeerError(f"rank {rank} could not open lanes {lanes}: {error}") from error


def _not_opened(spec: LaneSpec, rank: int, peer: int, seconds: float) -> P2PTimeoutError:
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


def _prove(end: Endpoint, wire: Wire, declared: str) -> None:
    """Compare the settings of both sides, then carry one message over the way that payloads go."""
    config, spec, rank, peer, standing = end.config, end.spec, end.rank, end.peer, end.standing
    told: dict[str, str] = {
        "lane": str(spec),
        "shapes": config.shape_mode,
        "staged": str(config.staged),
        "pipeline_dtype": str(config.pipeline_dtype),
        "standing": "none" if standing is None else _shortened(str(standing)),
        "payload": _shortened(declared),
        "gradients": "all" if standing is None or all(standing.gradients) else _shortened(str(standing.gradients)),
    }
    seconds = config.open_deadline
    start = time.monotonic()
    try:
        theirs = json.loads(wire.exchange(json.dumps(told).encode(), end.index, timedelta(seconds=seconds)))
        wire.expect_end_notice()
        _require_same(told, theirs, f"ranks {rank} and {peer} open lane {spec}")
        token = torch.zeros(1, dtype=torch.uint8, device=end.device)
        (ticket,) = end.connection.mover.start([(rank == spec.source, [token], end.index, 0)])
        ticket.hold(timedelta_of(start + seconds - time.monotonic()))
    except P2PMismatchError:
        raise
    except RuntimeError as error:
        if time.monotonic() - start >= seconds:
            raise _not_opened(spec, rank, peer, seconds) from error
        raise P2PPeerError(f"rank {peer} was lost while rank {rank} opened lane {spec} with it: {error}") from error


def _require_same(here: dict[str, str], there: dict[str, str], what: str) -> None:
    different = {key: (here[key], there.get(key)) for key in here if here[key] != there.get(key)}
    if different:
        raise P2PMismatchError(f"{what} with different settings (here, there): {different}")


def _shortened(text: str) -> str:
    # Long ones by digest: an error that shows both sides should be readable.
    if len(text) <= 160:
        return text
    return f"{text[:100]}... {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
