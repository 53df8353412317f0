"""Movers: how payloads travel, one small class per kind of backend (`kinds`).

| backend for the lane's device | mover | completion |
| --- | --- | --- |
| gloo, on a CPU | `GlooMover` | a host wait by one thread |
| gloo, on a GPU; or `P2PConfig.staged` | `StagedMover` | the same, then a copy in the receiver's stream |
| any other (nccl) | `NcclMover` | in stream order; polled |
| torch's ``fake``: no other rank exists | `DryMover` | at once |
| none: both ends are one rank | `LocalMover` | a copy in the sender's stream |
"""

from __future__ import annotations

from pipegrid.transport.backends.base import Mover, Operation, Ticket
from pipegrid.transport.backends.dry import DryMover
from pipegrid.transport.backends.gloo import GlooMover, Loop, never_preempt, one_loop
from pipegrid.transport.backends.kinds import kind_of, nccl_options
from pipegrid.transport.backends.local import LocalMover
from pipegrid.transport.backends.nccl import NcclMover, NcclTicket, connect_members, lift_timeout, warn_of_watchdog
from pipegrid.transport.backends.staged import StagedMover

__all__ = [
    "DryMover",
    "GlooMover",
    "LocalMover",
    "Loop",
    "Mover",
    "NcclMover",
    "NcclTicket",
    "Operation",
    "StagedMover",
    "Ticket",
    "connect_members",
    "kind_of",
    "lift_timeout",
    "nccl_options",
    "never_preempt",
    "one_loop",
    "warn_of_watchdog",
]
