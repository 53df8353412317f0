"""NCCL's rules on a CPU: entries in stream order, completion only by polling, aborts that wait for each other."""

from __future__ import annotations

from pipegrid.fake_nccl.device import FakeDevice
from pipegrid.fake_nccl.entries import FakeGraph, LaunchRecord, Mark, Moment, TransferRecord
from pipegrid.fake_nccl.groups.group import FakeGroup
from pipegrid.fake_nccl.groups.nccl2 import Nccl2Group
from pipegrid.fake_nccl.groups.pairs import LazyGroup, LegacyGroup
from pipegrid.fake_nccl.watchdog import LegacyRules, Nccl2Rules
from pipegrid.fake_nccl.groups.backend import register
from pipegrid.fake_nccl.groups.work import FakeWork
from pipegrid.fake_nccl.virtual_streams.host_syncs import HostSync
from pipegrid.fake_nccl.virtual_streams.late import LateRun
from pipegrid.fake_nccl.virtual_streams.streams import Streams
from pipegrid.fake_nccl.virtual_streams.virtual import VirtualEvent, VirtualStream

__all__ = [
    "FakeDevice",
    "FakeGraph",
    "FakeGroup",
    "FakeWork",
    "HostSync",
    "LateRun",
    "LaunchRecord",
    "LazyGroup",
    "LegacyGroup",
    "LegacyRules",
    "Mark",
    "Moment",
    "Nccl2Group",
    "Nccl2Rules",
    "Streams",
    "TransferRecord",
    "VirtualEvent",
    "VirtualStream",
    "register",
]
