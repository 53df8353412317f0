"""Dumps of a fake GPU in the format of torch's flight recorder: a pickle for each rank, which its tools read."""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import define, field
from torch import Tensor

from pipegrid.fake_nccl.entries import LaunchRecord, Moment

VERSION = "2.10"
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with what the files' names begin with, the rank behind it; torch reads them as well."""
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_allgather_base": "_all_gather_base",
}
_STATES = {"launched": "scheduled", "started": "started", "ended": "completed"}


_Sizes: TypeAlias = tuple[tuple[list[int], str], ...]
"""The size and the dtype of each tensor."""


@define(eq=False)
class FakeFlightRecorder:
    """The data of a device's dumps beside its launch records.

    Attributes:
        groups: the global ranks of each group, and this rank's place among them.
        prefix: of the files; None where a failure writes none.
    """

    groups: dict[str, tuple[tuple[int, ...], int]] = field(factory=dict)
    prefix: str | None = field(
        factory=lambda: next((os.environ[name] for name in PREFIXES if name in os.environ), None)
    )
    # By launch, what its record lacks: inputs and outputs, time and timeout.
    _told: dict[int, tuple[_Sizes, _Sizes, int, float]] = field(factory=dict, init=False)

    def tell(self, number: int, reads: Sequence[Tensor], writes: Sequence[Tensor], timeout: float) -> None:
        """Keep the sizes of a launch."""
        self._told[number] = _sizes(reads), _sizes(writes), time.time_ns(), timeout

    def forget(self) -> None:
        """Drop what was kept."""
        self._told.clear()

    def dump(self, moments: Sequence[Moment]) -> dict[str, Any]:
        """The dump of the ``moments`` on a device's timeline, as torch's flight recorder has it."""
        states: dict[int, str] = {}
        launches: list[LaunchRecord] = []
        for moment in moments:
            if isinstance(moment.of, LaunchRecord) and moment.what in _STATES:
                states[moment.of.number] = _STATES[moment.what]
                launches += [moment.of] if moment.what == "launched" else []
        entries = [entry | {"record_id": number} for number, entry in enumerate(self._entries(launches, states))]
        groups = {
            name: {"name": name, "desc": "fake", "ranks": str(list(ranks))} for name, (ranks, _) in self.groups.items()
        }
        return {"version": VERSION, "pg_config": groups, "pg_status": {}, "entries": entries}

    def write(self, moments: Sequence[Moment], prefix: str | os.PathLike[str] | None = None) -> Path | None:
        """Write a file ``<prefix><rank>``, by default with `prefix`; where, or None without one.

        The rank is the global one, from the groups so far; 0 without one.
        """
        name = self.prefix if prefix is None else os.fspath(prefix)
        if name is None:
            return None
        rank = next((ranks[here] for ranks, here in self.groups.values()), 0)
        path = Path(f"{name}{rank}")
        path.write_bytes(pickle.dumps(self.dump(moments)))
        return path

    def _entries(self, launches: Sequence[LaunchRecord], states: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        collectives, calls, operations = Counter[str](), Counter[str](), Counter[str]()
        ids = {name: number for number, name in enumerate(self.groups)}
        for launch in launches:
            ranks, here = self.groups[launch.group]
            messages = launch.kind == "p2p"
            (calls if messages else collectives)[launch.group] += 1
            reads, writes, created, timeout = self._told.get(launch.number, ((), (), 0, 0.0))
            sides = {"send": iter(reads), "recv": iter(writes)}
            names = [
                (f"{one.kind} {here}{'->' if one.kind == 'send' else '<-'}{ranks.index(one.peer)}", one.kind)
                for one in launch.operations
            ]
            names += [("coalesced", "")] if len(names) > 1 else []
            for name, kind in names if messages else [(_NAMES.get(launch.kind, launch.kind), "")]:
                own = [each for each in (next(sides[kind], None),) if each] if kind else []
                operations[launch.group] += 1
                inputs, outputs = (own, own) if messages else (reads, writes)
                yield {
                    "pg_id": ids[launch.group],
                    "process_group": (launch.group, "fake"),
                    "collective_seq_id": collectives[launch.group],
                    "p2p_seq_id": calls[launch.group],
                    "op_id": operations[launch.group],
                    "profiling_name": f"nccl:{name}",
                    "time_created_ns": created,
                    "input_sizes": [size for size, _ in inputs],
                    "input_dtypes": [kind for _, kind in inputs],
                    "output_sizes": [size for size, _ in outputs],
                    "output_dtypes": [kind for _, kind in outputs],
                    "state": states[launch.number],
                    "time_discovered_started_ns": None,
                    "time_discovered_completed_ns": None,
                    "retired": False,
                    "timeout_ms": round(1000 * timeout),
                    "is_p2p": messages,
                    "frames": [],
                }


_DTYPES = {
    torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half",
    torch.int64: "Long", torch.int32: "Int", torch.uint8: "Byte", torch.int8: "Char", torch.bool: "Bool",
}  # fmt: skip


def _sizes(tensors: Sequence[Tensor]) -> _Sizes:
    return tuple((list(one.shape), _DTYPES.get(one.dtype, str(one.dtype))) for one in tensors)
