"""Opening lanes: groups among members only, in one order, each lane proved by a message before it is used."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.core.fields import shown
from pipegrid.core.lanes import LaneSpec, PositionLane, communicators_of, opening_key
from pipegrid.topology import discard_groups
from pipegrid.topology.torch_compat import is_dry
from pipegrid.transport.backends import LocalMover, kind_of
from pipegrid.transport.backends.wire import ControlWire, timedelta_of
from pipegrid.transport.config import as_config
from pipegrid.transport.control.connector import Connector, not_opened, require_same, shortened
from pipegrid.transport.control.lanes import Lanes
from pipegrid.transport.errors import P2PMismatchError, P2PPeerError, P2PUsageError
from pipegrid.transport.lane.batch import Submitter
from pipegrid.transport.lane.connection import Connection
from pipegrid.transport.lane.endpoint import Endpoint
from pipegrid.transport.lane.lane import Lane
from pipegrid.transport.messages.payload import flatten, signature_of
from pipegrid.transport.streams import current_device


def open_lanes(
    specs: Iterable[LaneSpec],
    *,
    config: Any = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    rank: int | None = None,
    agreed: Mapping[LaneSpec, Any] | None = None,
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
        backend: ``"gloo"``, ``"nccl"``, or one that completes in stream order; None: that of the default group.
        device: where payloads live; None is the current GPU where the backend is NCCL or ``config`` says ``staged``,
            else the CPU.
        rank: this rank, where the caller knows it.
        agreed: per lane, a payload like all that will travel (meta tensors do): its shapes are compared now, and
            never need a header.
        declared: per lane, what its user says of the messages, in words; compared between the two sides.
        carried: per lane, the lane of the plan that it carries: where the communicators of ``config`` are a plan's.
        beside: lanes of this rank, of the same config, which these join: batches and the end are of all.

    Returns:
        the lanes of this rank, with those of ``beside``: a dict with `Lanes.batch`, `Lanes.abort` and `Lanes.close`.

    Raises:
        P2PUsageError: a lane given twice, or beyond the world; settings, backend and device that do not go together.
        P2PMismatchError: the two sides of a lane were given different settings or shapes.
        P2PTimeoutError: the other side of a lane did not come.
    """
    settings = as_config(config)
    here = dist.get_rank() if rank is None else rank
    ordered = _ordered(specs, agreed or {})
    backend, place = resolve_device(backend, device, staged=settings.staged)
    mine = [spec for spec in ordered if here in spec.pair]
    fixed = {spec: signature_of(*flatten(payload)) for spec, payload in (agreed or {}).items()}
    every = communicators_of([spec for spec in ordered if not spec.is_local], settings.communicators, carried or {})
    own = [bundle for bundle in every if any(here in spec.pair for spec in bundle)]
    submitter = Submitter(settings.strict) if beside is None else beside.submitter
    submitter.shares |= any(len(bundle) > 1 for bundle in own)
    lanes: dict[LaneSpec, Lane] = {}
    connector = Connector(here, backend=backend, device=place, config=settings)
    try:
        connections = connector.connect(own) if kind_of(backend).peers else connector.stand_alone(own)
        for spec in sorted(mine, key=lambda spec: opening_key(spec.pair)):
            connection, index = connections.get(spec) or (Connection(LocalMover(place)), 0)
            end = Endpoint(spec, here, place, settings, connection, index, agreed=fixed.get(spec))
            lanes[spec] = Lane(end, submitter)
            if end.wire is not None:
                _prove(end, end.wire, (declared or {}).get(spec, ""))
    except BaseException:
        discard_groups(connector.groups)
        raise
    every_lane = Lanes(submitter, connector.turn) if beside is None else beside
    every_lane.join({spec: lanes[spec] for spec in mine}, connector.groups)
    return every_lane


def _ordered(specs: Iterable[LaneSpec], agreed: Mapping[LaneSpec, Any]) -> list[LaneSpec]:
    ordered, world = sorted(specs), dist.get_world_size()
    faults = [
        *(f"lane {one} is given twice" for one, other in itertools.pairwise(ordered) if one == other),
        *(f"lane {one} has a rank beyond the world of {world}" for one in ordered if one.pair[1] >= world),
        *(f"agreed has lane {one}, which is not to be opened" for one in agreed.keys() - set(ordered)),
    ]
    if faults:
        raise P2PUsageError(faults[0])
    return ordered


def resolve_device(
    backend: str | None,
    device: torch.device | str | int | None,
    group: dist.ProcessGroup | None = None,
    *,
    staged: bool = False,
) -> tuple[str, torch.device]:
    """The backend that moves payloads and the device where they live; ``staged``: through host memory of a GPU."""
    offered = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if device is None:
        kind = kind_of(backend or offered.get("cuda", "none"))
        gpu = current_device() if (kind.in_streams or staged) and "cuda" in kind.devices else None
        device = gpu or torch.device("cpu")
    try:
        device = torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise P2PUsageError(f"device is {shown(device)}; it must be a torch.device or its name, or None") from error
    if device.type == "cuda" and device.index is None:
        device = current_device() or device
    backend = backend or offered.get(device.type, "none")
    kind = kind_of(backend)
    if device.type not in kind.devices or not dist.is_backend_available(backend):
        raise P2PUsageError(f"backend {backend!r} does not move tensors of {device}; the group offers {offered}")
    if kind.peers and is_dry():
        raise P2PUsageError(
            f"backend {backend!r} would wait for other ranks, but the default group's is 'fake', a dry run: they do "
            "not exist. Leave the backend to the default group"
        )
    bound = None if dist.group.WORLD is None else dist.group.WORLD.bound_device_id
    if kind.in_streams and bound is not None and bound.type == device.type and device.index not in (None, bound.index):
        raise P2PUsageError(
            f"backend {backend!r} would move tensors of {device}, but the default process group is bound to {bound}, "
            f"where its groups connect; call torch.cuda.set_device before init_process_group, with the device of its "
            f"device_id or, where none is given, of LOCAL_RANK"
        )
    return backend, device


def _prove(end: Endpoint, wire: ControlWire, declared: str) -> None:
    """Compare the settings of both sides, then carry one message over the way that payloads go."""
    config, spec, rank, peer, agreed = end.config, end.spec, end.rank, end.peer, end.agreed
    told: dict[str, str] = {
        "lane": str(spec),
        "shapes": config.shape_mode,
        "staged": str(config.staged),
        "receives beside headers": str(end.beside_headers),
        "pipeline_dtype": str(config.pipeline_dtype),
        "agreed": "none" if agreed is None else shortened(str(agreed)),
        "payload": shortened(declared),
        "gradients": "all" if agreed is None or all(agreed.gradients) else shortened(str(agreed.gradients)),
    }
    seconds = config.open_deadline
    start = time.monotonic()
    try:
        theirs = json.loads(wire.exchange(json.dumps(told).encode(), end.index, timedelta(seconds=seconds)))
        wire.expect_end_notice()
        require_same(told, theirs, f"ranks {rank} and {peer} open lane {spec}")
        token = torch.zeros(1, dtype=torch.uint8, device=end.device)
        ticket = end.connection.mover.start_one(rank == spec.source, [token], end.index, 0)
        ticket.hold(timedelta_of(start + seconds - time.monotonic()))
    except P2PMismatchError:
        raise
    except RuntimeError as error:
        if time.monotonic() - start >= seconds:
            raise not_opened(spec, rank, peer, seconds) from error
        raise P2PPeerError(f"rank {peer} was lost while rank {rank} opened lane {spec} with it: {error}") from error
