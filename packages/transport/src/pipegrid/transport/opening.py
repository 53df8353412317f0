"""Opening lanes: groups among members only, in one order, each proved by a message before anything uses it."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist

from pipegrid.topology import (
    GroupCreationTimeoutError,
    GroupSpec,
    WorldSizeUnknownError,
    control_store,
    create_groups,
    destroy_groups,
)
from pipegrid.transport.backends.gloo import WaitedLane
from pipegrid.transport.backends.gloo_loop import one_loop
from pipegrid.transport.backends.local import LocalLane
from pipegrid.transport.backends.nccl import StreamedLane
from pipegrid.transport.batch import Submitter
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.errors import (
    LaneSpecError,
    P2PConfigError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
)
from pipegrid.transport.handshake import Handshake, PeerHandshake
from pipegrid.transport.lane import Lane
from pipegrid.transport.message import Signature
from pipegrid.transport.payload import flatten, signature_of
from pipegrid.transport.progress import Progress
from pipegrid.transport.spec import LaneSpec
from pipegrid.transport.wire import Communicator, Wire, post

_DROPPED = (
    ": nothing held what open_lanes() returned (or its communicator) any more, or the process ended; keep it as long "
    "as its lanes are used, and close() it then"
)


class Lanes(dict[LaneSpec, Lane]):
    """The lanes that a rank opened together, by spec. A context manager: `close` at the end."""

    def __init__(self, lanes: Mapping[LaneSpec, Lane], *, submitter: Submitter, groups: Sequence[Any]) -> None:
        super().__init__(lanes)
        self._submitter = submitter
        ends = tuple(self.values())
        self._parts = ends, Progress(ends, submitter), groups
        self._handshakes: dict[int, PeerHandshake] = {}
        # At exit, too: threads that wait in the backend must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, _close, *self._parts, _DROPPED)

    def batch(self, *, together: bool = True) -> AbstractContextManager[None]:
        """Issue the sends and receives that this thread starts inside as one simultaneous batch, at the end.

        In the order of lanes, whatever the order of calls. If the block raises, nothing is issued.

        Args:
            together: False issues them one after the other, at the end all the same. Strict mode and shared
                communicators take no notice: there, two ranks that both send first would wait for each other.
        """
        return self._submitter.batch(together=together)

    def abort(self, reason: str) -> None:
        """End all lanes at once, and tell the other sides why: what this rank does when it fails elsewhere."""
        for lane in self.values():
            lane.abort(reason)

    def neighbours(self, ranks: Iterable[int]) -> Handshake:
        """Those of ``ranks`` at the other ends of lanes, to tell them before a step what this rank runs in it.

        Told on a store of the lanes' own, which takes one connection to the default group's store.
        """
        wanted = set(ranks)
        for lane in self.values():
            if lane.peer in wanted and lane.peer not in self._handshakes and lane.group is not None:
                # Both ends know the group by one name, and no other group ever has it.
                self._handshakes[lane.peer] = PeerHandshake.between(lane.rank, lane.peer, lane.group.group_name)
        peers = [self._handshakes[rank] for rank in sorted(wanted) if rank in self._handshakes]
        return Handshake(self._store, peers)

    @cached_property
    def _store(self) -> Any:
        return control_store("neighbours")

    def close(self) -> None:
        """End the lanes and free their groups. Transfers still under way fail. Twice is harmless."""
        if self._finalizer.detach() is not None:
            _close(*self._parts, "")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(ends: Sequence[Lane], progress: Progress, groups: Sequence[Any], why: str) -> None:
    progress.stop()
    for lane in ends:
        lane.fail(P2PLaneDeadError(f"lane {lane.spec} was closed on rank {lane.rank}{why}"), kind="closed")
    for lane in ends:
        lane.join()
    destroy_groups(groups)


def open_lanes(
    specs: Iterable[LaneSpec],
    *,
    config: Any = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    standing: Mapping[LaneSpec, Any] | None = None,
) -> Lanes:
    """Open those lanes of ``specs`` that this rank is an end of; each has carried a message on return.

    All ranks that are ends of a lane must call this with the lane among their specs (and with all lanes of the
    same two ranks, where lanes share communicators); further lanes cost nothing. Lanes are opened in one order
    that is the same on every rank.

    Args:
        specs: lanes, in any order.
        config: a `P2PConfig`, or any object with some of its attributes.
        backend: ``"gloo"`` or ``"nccl"``; None is the default group's for ``device``.
        device: where payloads live; None is the current GPU where the backend is NCCL, else the CPU.
        rank: this rank, where the caller knows it.
        standing: per lane, a payload like those that will travel (meta tensors do): shapes that are fixed now,
            compared between the two sides, and need no header ever.

    Returns:
        the lanes of this rank: a dict with `Lanes.batch`, `Lanes.abort` and `Lanes.close`.

    Raises:
        LaneSpecError: a lane given twice, or past the world.
        P2PConfigError: settings, backend and device that do not go together.
        P2PMismatchError: the two sides of a lane were given different settings or shapes.
        P2PTimeoutError: the other side of a lane did not come.
    """
    settings = as_config(config)
    here = dist.get_rank() if rank is None else rank
    ordered = _ordered(specs, standing or {})
    backend, place = resolve_device(backend, device)
    mine = [spec for spec in ordered if here in spec.pair]
    fixed = {spec: signature_of(*flatten(payload)) for spec, payload in (standing or {}).items()}
    communicators, groups = _connect(
        [spec for spec in mine if not spec.is_local], here, backend=backend, device=place, config=settings
    )
    submitter = Submitter(settings)
    lanes: dict[LaneSpec, Lane] = {}
    try:
        for spec in mine:
            options: dict[str, Any] = {
                "spec": spec,
                "rank": here,
                "config": settings,
                "submitter": submitter,
                "standing": fixed.get(spec),
            }
            if spec.is_local:
                lanes[spec] = LocalLane(device=place, **options)
                continue
            communicator, index = communicators[spec]
            wire = Wire(communicator, index)
            _prove(spec, wire, here, settings, fixed.get(spec))
            lanes[spec] = (StreamedLane if wire.streamed else WaitedLane)(wire, **options)
    except BaseException:
        destroy_groups(groups)
        raise
    return Lanes(lanes, submitter=submitter, groups=groups)


def _ordered(specs: Iterable[LaneSpec], standing: Mapping[LaneSpec, Any]) -> list[LaneSpec]:
    ordered = sorted(specs)
    for first, second in itertools.pairwise(ordered):
        if first == second:
            raise LaneSpecError(f"lane {first} is given twice; give lanes between the same ranks different labels")
    world = dist.get_world_size()
    for spec in ordered:
        if spec.pair[1] >= world:
            raise LaneSpecError(
                f"lane {spec} has rank {spec.pair[1]}, but the world has {world} ranks; "
                f"start more processes or place the lane lower"
            )
    unknown = [str(spec) for spec in standing if spec not in set(ordered)]
    if unknown:
        raise LaneSpecError(f"standing gives shapes for {unknown}, which are not among the lanes to open")
    return ordered


def resolve_device(
    backend: str | None, device: torch.device | str | None, group: dist.ProcessGroup | None = None
) -> tuple[str, torch.device]:
    """The backend that moves payloads, and the device where they live, from what the group has.

    Raises:
        P2PConfigError: the group has no backend for the device, or the two do not go together.
    """
    offered = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device is None:
        wants_gpu = (backend or offered.get("cuda")) == "nccl" and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if wants_gpu else torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise P2PConfigError(
            f"the device is {device!r}, which torch does not know; give one such as 'cpu' or 'cuda:0'"
        ) from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if backend is None:
        backend = offered.get(device.type)
        if backend is None:
            raise P2PConfigError(
                f"lanes for device {device} need a backend, but the default group offers {offered}; initialise it "
                f"with one for {device.type}, or name the backend"
            )
    if (backend, device.type) not in (("gloo", "cpu"), ("nccl", "cuda")):
        raise P2PConfigError(
            f"backend {backend!r} with device {device}: gloo moves CPU tensors and nccl CUDA tensors; give the "
            f"device that belongs to the backend"
        )
    return backend, device


def _connect(
    specs: Sequence[LaneSpec], rank: int, *, backend: str, device: torch.device, config: P2PConfig
) -> tuple[dict[LaneSpec, tuple[Communicator, int]], list[Any]]:
    """A communicator, and an index in it, for each lane of this rank; and all groups that were made."""
    if not specs:
        return {}, []
    bundles: dict[tuple[object, ...], list[LaneSpec]] = {}
    for spec in specs:
        key = spec.pair if config.communicators == "shared" else (spec.pair, spec)
        bundles.setdefault(key, []).append(spec)
    data = {_group_spec(bundle, "data"): bundle for bundle in bundles.values()}
    streamed = backend != "gloo"
    timeout = timedelta(seconds=config.open_deadline)
    gloo, loop = one_loop()
    data_backend, options = (backend, _options(backend, config)) if streamed else (gloo, loop)
    with _meeting(data, rank, config.open_deadline):
        made = create_groups(data, rank=rank, backend=data_backend, timeout=timeout, pg_options=options)
    groups = list(made.values())
    try:
        control = made
        if streamed:
            twins = {_group_spec(bundle, "control"): spec for spec, bundle in data.items()}
            with _meeting({twin: data[spec] for twin, spec in twins.items()}, rank, config.open_deadline):
                pairs = create_groups(twins, rank=rank, backend=gloo, timeout=timeout, pg_options=loop)
            groups += pairs.values()
            control = {twins[twin]: group for twin, group in pairs.items()}
    except BaseException:
        destroy_groups(groups)
        raise
    found: dict[LaneSpec, tuple[Communicator, int]] = {}
    for group_spec, bundle in data.items():
        communicator = Communicator(
            data=made[group_spec],
            backend=made[group_spec] if streamed else loop.take_backend(made[group_spec]),
            control=control[group_spec],
            peer=1 - group_spec.ranks.index(rank),
            device=device,
            streamed=streamed,
            lanes=len(bundle),
        )
        found.update({lane: (communicator, index) for index, lane in enumerate(bundle)})
    return found, groups


@contextmanager
def _meeting(groups: Mapping[GroupSpec, Sequence[LaneSpec]], rank: int, seconds: float) -> Iterator[None]:
    """What goes wrong while groups are made, as errors of lanes."""
    try:
        yield
    except GroupCreationTimeoutError as error:
        # It names the group, by its label.
        spec, bundle = next((item for item in groups.items() if repr(item[0].label) in str(error)), None) or next(
            iter(groups.items())
        )
        raise _not_opened(bundle[0], rank, spec.ranks[1 - spec.ranks.index(rank)], seconds) from error
    except WorldSizeUnknownError:
        raise
    except RuntimeError as error:
        lanes = ", ".join(str(lane) for bundle in groups.values() for lane in bundle)
        raise P2PPeerError(f"a rank was lost while rank {rank} opened lanes {lanes}: {error}") from error


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


def _group_spec(bundle: Sequence[LaneSpec], use: str) -> GroupSpec:
    names = ",".join(map(str, bundle))
    if len(bundle) > 1:
        names = f"{len(bundle)} lanes/{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
    return GroupSpec(bundle[0].pair, f"transport/{names}/{use}", shared=False)


def _options(backend: str, config: P2PConfig) -> Any:
    if backend != "nccl" or config.max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = config.max_ctas
    return options


def _prove(spec: LaneSpec, wire: Wire, rank: int, config: P2PConfig, standing: Signature | None) -> None:
    """Compare what both sides were told, then carry one message over the way that payloads go."""
    told: dict[str, str] = {
        "lane": str(spec),
        "shapes": config.shape_mode,
        "communicators": config.communicators,
        "pipeline_dtype": str(config.pipeline_dtype),
        "standing": "none" if standing is None else _shortened(str(standing)),
        "gradients": "all" if standing is None or all(standing.gradients) else _shortened(str(standing.gradients)),
    }
    seconds = config.open_deadline
    start = time.monotonic()
    peer = spec.destination if rank == spec.source else spec.source
    try:
        theirs = json.loads(wire.exchange_hello(json.dumps(told).encode(), timedelta(seconds=seconds)))
        wire.expect_note()
        _require_same(told, theirs, spec, rank, peer)
        token = torch.zeros(1, dtype=torch.uint8, device=wire.device)
        (works,) = post([(wire, [token], rank == spec.source)])
        if isinstance(works, RuntimeError):
            raise works
        wire.finish(works, seconds)
    except P2PMismatchError:
        raise
    except RuntimeError as error:
        if time.monotonic() - start >= seconds:
            raise _not_opened(spec, rank, peer, seconds) from error
        raise P2PPeerError(f"rank {peer} was lost while rank {rank} opened lane {spec} with it: {error}") from error


def _require_same(here: dict[str, str], there: dict[str, str], spec: LaneSpec, rank: int, peer: int) -> None:
    different = {key: (here[key], there.get(key)) for key in here if here[key] != there.get(key)}
    if different:
        raise P2PMismatchError(
            f"ranks {rank} and {peer} open lane {spec} with different settings (here, there): {different}; "
            f"give both the same"
        )


def _shortened(text: str) -> str:
    # Long ones by digest: an error that shows both sides should be readable.
    if len(text) <= 160:
        return text
    return f"{text[:100]}... {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
