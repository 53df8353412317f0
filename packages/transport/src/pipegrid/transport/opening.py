"""Opening lanes: groups among members only, in one order, each lane proved by a message before it is used."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist

from pipegrid.topology import (
    GroupCreationTimeoutError,
    GroupSpec,
    GroupStoreError,
    WorldSizeUnknownError,
    control_store,
    create_groups,
    destroy_groups,
)
from pipegrid.transport.backends import (
    GlooMover,
    LocalMover,
    Mover,
    NcclMover,
    StagedMover,
    lift_timeout,
    nccl_options,
    one_loop,
)
from pipegrid.transport.batch import Submitter
from pipegrid.transport.completion import Completion
from pipegrid.transport.config import P2PConfig, as_config
from pipegrid.transport.connection import Connection, End, abort_together, await_aborts, end_together
from pipegrid.transport.errors import (
    LaneSpecError,
    P2PConfigError,
    P2PLaneDeadError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
)
from pipegrid.transport.handshake import BoundedCalls, Handshake, PeerHandshake
from pipegrid.transport.lane import Lane
from pipegrid.transport.message import Signature
from pipegrid.transport.payload import flatten, signature_of
from pipegrid.transport.progress import Progress
from pipegrid.transport.spec import LaneSpec
from pipegrid.transport.streams import current_device, new_stream
from pipegrid.transport.wait_lock import BackgroundThread
from pipegrid.transport.wire import Wire, timedelta_of

_DROPPED = (
    ": nothing held the result of open_lanes() (or its communicator) any more, or the process ended; keep it as long "
    "as its lanes are used, and close() it then"
)
_EXIT_SECONDS = 10.0  # for transfers on a device, where the process ends without close()
# torch hands out 32 streams per device; groups past that share one, and wait for each other.
_MOST_STREAMS = 28


class Lanes(dict[LaneSpec, Lane]):
    """The lanes that a rank opened together, by spec. A context manager: `close` at the end."""

    def __init__(self, lanes: Mapping[LaneSpec, Lane], *, submitter: Submitter, groups: Sequence[Any]) -> None:
        super().__init__(lanes)
        self._submitter = submitter
        ends = tuple(lane.completion for lane in self.values())
        watchers = _watch(ends)
        self._parts = os.getpid(), ends, Progress(ends, submitter), watchers, groups
        self._handshakes: dict[int, PeerHandshake] = {}
        self._calls = BoundedCalls(ends[0].config.deadline if ends else 1.0)
        # Also at exit: threads that wait in the backend must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, _close, *self._parts, _EXIT_SECONDS, _DROPPED)

    def batch(self, *, together: bool = True, by_lane: bool = False) -> AbstractContextManager[None]:
        """Start the sends and receives of the block as one simultaneous batch, at its end; none of them if it raises.

        Communicators come in the order of calls; within a shared one, messages come in the order of lanes.

        Args:
            together: False starts them one after the other, at the end all the same. Ignored in strict mode and on
                shared communicators, where two ranks that both send first would wait for each other.
            by_lane: communicators come in the order of lanes, too: for an exchange in which every rank sends and
                receives. In the order of calls, both ends would send first, and wait for each other where a GPU plays
                the kernels of several communicators one by one.
        """
        return self._submitter.batch(together=together, by_lane=by_lane)

    @property
    def batches(self) -> bool:
        """Whether a batch is more than its transfers one by one, in order of calls.

        It is on shared communicators and in strict mode, where two ranks that both send first would wait for each
        other, and on device groups, where it is one launch.
        """
        return self._submitter.batches or any(lane.mover.streams for lane in self.values())

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Start transfers of device groups in the order of calls inside the block: for the execution of a plan.

        A receive whose shapes are not known yet (the first of a lane without agreed shapes, each one in header mode)
        then holds the host until its header has come. Later transfers would else be launched before it, which gets
        stuck where a GPU plays the kernels of several communicators one by one. In a plan that `verify` has proved for
        batches in order, the header comes without this rank's later actions. Over gloo nothing changes.
        """
        before = self._submitter.in_order
        self._submitter.in_order = before or any(lane.mover.streams for lane in self.values())
        try:
            yield
        finally:
            self._submitter.in_order = before

    def when_started(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the transfers of this thread so far are started: now, or after the batch that it is in.

        Not at all where the batch raises.
        """
        self._submitter.when_started(call)

    def abort(self, reason: str) -> None:
        """End all lanes at once, and tell the other sides why: for a rank that fails elsewhere."""
        abort_together([lane.completion for lane in self.values()], reason)

    def neighbours(self, ranks: Iterable[int]) -> Handshake:
        """The handshake with those of ``ranks`` at the other ends of lanes: each compares its next step with them.

        On a store of the lanes' own, which takes one connection to the default group's store.
        """
        wanted = set(ranks)
        for lane in self.values():
            if lane.peer in wanted and lane.peer not in self._handshakes and lane.group is not None:
                # Both ends know the group by one name, and no other group ever has it.
                self._handshakes[lane.peer] = PeerHandshake.between(lane.rank, lane.peer, lane.group.group_name)
        peers = [self._handshakes[rank] for rank in sorted(wanted) if rank in self._handshakes]
        return Handshake(self._store, peers, self._calls)

    @cached_property
    def _store(self) -> Any:
        return self._calls.call("while connecting to it", lambda: control_store("neighbours"))

    def close(self) -> None:
        """Wait for transfers that are ordered on a device, then end the lanes and free their groups.

        A transfer over gloo that no caller waited for fails. A second call does nothing.
        """
        self._close(seconds=math.inf)

    def _close(self, *, seconds: float) -> None:
        self._calls.end()
        if self._finalizer.detach() is not None:
            _close(*self._parts, seconds, "")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that failed tells the others at once.
        self._close(seconds=math.inf if kind is None else 0.0)


def _watch(ends: Sequence[Completion]) -> list[BackgroundThread]:
    """A thread per connection of a device group: it sees at once that its peer is gone, as no call waits there."""
    watchers = []
    for connection in {id(lane.connection): lane.connection for lane in ends if lane.mover.streams}.values():

        def watch(connection: Connection = connection) -> None:
            assert connection.wire is not None
            try:
                connection.wire.watch()
            except RuntimeError as error:
                for lane in connection.lanes:
                    lane.explain(error, next(iter(lane.queue), None))

        watchers.append(BackgroundThread(target=watch, name=f"pipegrid-watch-{connection.lanes[0].spec}", daemon=True))
        watchers[-1].start()
    return watchers


def _close(
    process: int,
    ends: Sequence[Completion],
    progress: Progress,
    watchers: Sequence[BackgroundThread],
    groups: Sequence[Any],
    seconds: float,
    why: str,
) -> None:
    """End lanes; wait at most ``seconds``, and no longer than the deadline, for transfers that a device has."""
    if os.getpid() != process:  # a forked child has neither the threads nor the connections
        return
    limit = time.monotonic() + min(seconds, max((lane.config.deadline for lane in ends), default=0.0))
    for lane in ends:
        lane.drain(limit)
    progress.stop()
    texts = [f"lane {lane.spec} was closed on rank {lane.rank}{why}" for lane in ends]
    end_together(
        [End(lane, P2PLaneDeadError(text), text) for lane, text in zip(ends, texts, strict=True)], kind="closed"
    )
    for lane in ends:
        lane.join()
    for watcher in watchers:
        watcher.join()
    await_aborts({id(lane.connection): lane.connection for lane in ends}.values())
    destroy_groups(groups)


def open_lanes(
    specs: Iterable[LaneSpec],
    *,
    config: Any = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    standing: Mapping[LaneSpec, Any] | None = None,
    declared: Mapping[LaneSpec, str] | None = None,
) -> Lanes:
    """Open those lanes of ``specs`` that this rank is an end of; each has carried a message on return.

    All ranks that are ends of a lane call this with the lane among their specs (and with all lanes of the same two
    ranks, where lanes share communicators); further lanes cost nothing. All ranks open lanes in one order.

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

    Returns:
        the lanes of this rank: a dict with `Lanes.batch`, `Lanes.abort` and `Lanes.close`.

    Raises:
        LaneSpecError: a lane given twice, or beyond the world.
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
    connections, groups = _connect(
        [spec for spec in mine if not spec.is_local], here, backend=backend, device=place, config=settings
    )
    submitter = Submitter(settings)
    lanes: dict[LaneSpec, Lane] = {}
    try:
        for spec in mine:
            connection = Connection(LocalMover(place)) if spec.is_local else connections[spec]
            lane = Lane(
                spec,
                rank=here,
                device=place,
                config=settings,
                connection=connection,
                submit=submitter,
                standing=fixed.get(spec),
            )
            if connection.wire is not None:
                said = (declared or {}).get(spec, "")
                _prove(lane, connection.wire, len(connection.lanes) - 1, fixed.get(spec), said)
            lanes[spec] = lane
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
    """The backend that moves payloads, and the device where they live, from the backends of the group.

    Raises:
        P2PConfigError: the group has no backend for the device, or the two do not go together.
    """
    offered = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device is None:
        gpu = current_device() if (backend or offered.get("cuda")) == "nccl" else None
        device = gpu or torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise P2PConfigError(
            f"the device is {device!r}, which torch does not know; give one such as 'cpu' or 'cuda:0'"
        ) from error
    if device.type == "cuda" and device.index is None:
        device = current_device() or device
    if backend is None:
        backend = offered.get(device.type)
        if backend is None:
            raise P2PConfigError(
                f"lanes for device {device} need a backend, but the default group offers {offered}; initialise it "
                f"with one for {device.type}, or name the backend"
            )
    served = ("cpu", "cuda") if backend == "gloo" else dist.Backend.backend_capability.get(backend, ())
    if device.type not in served or not dist.is_backend_available(backend):
        raise P2PConfigError(
            f"backend {backend!r} with device {device}: gloo moves CPU tensors and nccl CUDA tensors; give the "
            f"device that belongs to the backend"
        )
    return backend, device


def _connect(
    specs: Sequence[LaneSpec], rank: int, *, backend: str, device: torch.device, config: P2PConfig
) -> tuple[dict[LaneSpec, Connection], list[Any]]:
    """A connection for each lane of this rank, and all groups that were made."""
    if not specs:
        return {}, []
    bundles: dict[tuple[object, ...], list[LaneSpec]] = {}
    for spec in specs:
        key = spec.pair if config.communicators == "shared" else (spec.pair, spec)
        bundles.setdefault(key, []).append(spec)
    data = {_group_spec(bundle, "data"): bundle for bundle in bundles.values()}
    on_device = backend != "gloo" and not config.staged
    staged = not on_device and (config.staged or device.type != "cpu")
    gloo, loop = one_loop()
    if on_device and len(data) > _MOST_STREAMS:
        warnings.warn(
            f"rank {rank} opens {len(data)} communicators, each with a stream; beyond {_MOST_STREAMS} torch shares "
            f"streams, and transfers wait for each other. Use communicators='shared', or open fewer lanes (traffic=)",
            stacklevel=3,
        )
    # What one communicator moves both ways is one batch, which comes after the computing of what it sends.
    beside = (on_device or staged) and config.communicators == "separate"
    receive_stream = new_stream(device) if beside else None
    groups: list[Any] = []
    timeout = timedelta(seconds=config.open_deadline)

    def create(wanted: Mapping[GroupSpec, Sequence[LaneSpec]], name: str, options: Any) -> dict[GroupSpec, Any]:
        with _meeting(wanted, rank, config.open_deadline):
            made = create_groups(wanted, rank=rank, backend=name, timeout=timeout, pg_options=options)
        groups.extend(made.values())
        return made

    found: dict[LaneSpec, Connection] = {}
    try:
        made = create(data, backend, nccl_options(backend, config.max_ctas)) if on_device else create(data, gloo, loop)
        channels = made
        if on_device:
            twins = {_group_spec(bundle, "control"): spec for spec, bundle in data.items()}
            created = create({twin: data[spec] for twin, spec in twins.items()}, gloo, loop)
            channels = {twins[twin]: group for twin, group in created.items()}
        for group_spec, bundle in data.items():
            peer = 1 - group_spec.ranks.index(rank)
            mover: Mover
            if on_device:
                lift_timeout(made[group_spec])
                mover = NcclMover(made[group_spec], peer, device)
            else:
                mover = GlooMover(loop.take_backend(made[group_spec]), peer, len(bundle))
                if staged:
                    mover = StagedMover(mover, device)
            connection = Connection(mover, Wire(channels[group_spec], peer), made[group_spec], receive_stream)
            found.update(dict.fromkeys(bundle, connection))
    except BaseException:
        destroy_groups(groups)
        raise
    return found, groups


@contextmanager
def _meeting(groups: Mapping[GroupSpec, Sequence[LaneSpec]], rank: int, seconds: float) -> Iterator[None]:
    """Failures of group creation, as errors of lanes."""
    try:
        yield
    except GroupStoreError as error:  # which says nothing of the peer
        raise P2PPeerError(f"rank {rank} could not open lanes: {error}") from error
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


def _prove(lane: Lane, wire: Wire, index: int, standing: Signature | None, declared: str) -> None:
    """Compare the settings of both sides, then carry one message over the way that payloads go."""
    config, spec, rank, peer = lane.config, lane.spec, lane.rank, lane.peer
    told: dict[str, str] = {
        "lane": str(spec),
        "shapes": config.shape_mode,
        "communicators": config.communicators,
        "staged": str(config.staged),
        "pipeline_dtype": str(config.pipeline_dtype),
        "standing": "none" if standing is None else _shortened(str(standing)),
        "payload": _shortened(declared),
        "gradients": "all" if standing is None or all(standing.gradients) else _shortened(str(standing.gradients)),
    }
    seconds = config.open_deadline
    start = time.monotonic()
    try:
        theirs = json.loads(wire.exchange(json.dumps(told).encode(), index, timedelta(seconds=seconds)))
        wire.expect_end_notice()
        _require_same(told, theirs, spec, rank, peer)
        token = torch.zeros(1, dtype=torch.uint8, device=lane.device)
        (ticket,) = lane.mover.start([(rank == spec.source, [token], index, 0)])
        ticket.hold(timedelta_of(start + seconds - time.monotonic()))
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
