"""Kinds of backends: a record for each name that torch gives a backend.

Whatever differs between backends is read here; `HOST_BACKENDS` of ``waits.aborts`` names those on a CPU besides.

Facts of torch 2.11 to 2.15. In 2.15 the name ``nccl`` builds `ProcessGroupNCCL2`, unless ``TORCH_DIST_USE_NCCL2=0`` was
in the environment at import: so it is resolved by the class that torch made, never by version.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.core.order import ORDER_MODELS, OrderModel
from pipegrid.topology.torch_compat import backend_of

NCCL = "nccl"


@frozen(kw_only=True)
class BackendKind:
    """The differences between backends."""

    name: str
    devices: tuple[str, ...]  # the types of device that it serves
    options: bool = False  # whether it takes NCCL's options
    order: OrderModel  # which messages come in order
    # A wait of a work orders the current stream; orders it and raises an error known by then; or holds the host.
    waits: Literal["orders", "orders_and_raises", "holds"]
    keeps_sends: bool = False  # an idle group holds sent tensors until their work was waited for
    connects: Literal["lazy", "eager"]  # at the first operation, or when the group is made
    # Seconds from an error to the end of the process by torch's watchdog; None where it has none.
    ends_process: float | None = None
    peers: bool = True  # whether there are other ranks: torch's ``fake`` has none, and its operations do nothing

    @property
    def in_streams(self) -> bool:
        """Whether messages complete in stream order, so that a wait need not hold the host."""
        return self.waits != "holds"


_NCCL2 = BackendKind(
    name="nccl2",
    devices=("cuda",),
    options=True,
    order=ORDER_MODELS["nccl2"],
    waits="orders_and_raises",
    keeps_sends=True,
    connects="eager",
    ends_process=16.0,
)
_LAZY = attrs.evolve(_NCCL2, name="nccl-lazy", order=ORDER_MODELS["nccl-lazy"])
_LEGACY = attrs.evolve(
    _NCCL2,
    name="nccl-legacy",
    order=ORDER_MODELS["nccl-legacy"],
    waits="orders",
    keeps_sends=False,
    connects="lazy",
    ends_process=60.0,
)
_GLOO = BackendKind(name="gloo", devices=("cpu", "cuda"), order=ORDER_MODELS["gloo"], waits="holds", connects="eager")
_FAKE = attrs.evolve(_GLOO, name="fake", connects="lazy", peers=False)
_KINDS = {kind.name: kind for kind in (_LEGACY, _NCCL2, _LAZY, _GLOO, _FAKE)}


def kind_of(backend: str, group: Any = None) -> BackendKind:
    """The kind of the backend of that name; for ``nccl`` that of ``group``, or the strictest of what torch may make.

    One that is not known here and serves an accelerator is as nccl2, but a wait need not raise.
    """
    if backend == NCCL:
        legacy = getattr(dist, "ProcessGroupNCCL", None)
        made = None if group is None else backend_of(group, torch.device("cuda"))
        return attrs.evolve(_LEGACY if legacy is not None and isinstance(made, legacy) else _NCCL2, name=backend)
    if backend in _KINDS:
        return _KINDS[backend]
    devices = tuple(dist.Backend.backend_capability.get(backend, ()))
    like = _NCCL2 if any(device != "cpu" for device in devices) else _LEGACY
    return attrs.evolve(like, name=backend, devices=devices, options=False, waits="orders")


def nccl_options(backend: str, max_ctas: int | None) -> Any:
    """Options of a lane's group: a stream of high priority, and few thread blocks; None where it takes none."""
    if not kind_of(backend).options:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options
