"""The recording of one step of all ranks, as a file for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipegrid.schedules import Plan, Recorder, Recording, recording_to_json


def recorder_for(device: torch.device) -> Recorder:
    """A recorder; on CUDA, of the memory of activations as well."""
    memory = (lambda: int(torch.cuda.memory_allocated(device))) if device.type == "cuda" else None
    return Recorder(memory=memory)


def write_recording(path: Path, recorder: Recorder, plan: Plan, communicator: Any) -> None:
    """Gather the tracks of all ranks; the first rank writes them."""
    rank = dist.get_rank()
    position = next(number for number, ranks in enumerate(communicator.positions.ranks) if rank in ranks)
    tracks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tracks, recorder.track(plan, rank=rank, position=position))
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recording_to_json(Recording(plan, tracks)), encoding="utf-8")
    dist.barrier()
