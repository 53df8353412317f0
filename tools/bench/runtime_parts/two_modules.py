"""Two modules on grids of their own: what the runtime and its bridge do per microbatch, beside a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.schedules import PipelineRuntime, lower, multi_module_1f1b
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import Direction, P2PConfig
from runtime_parts.job import SAME, Job, difference
from runtime_parts.overhead import FLOOR_BOUND, WIDTH, Scale
from runtime_parts.rows import RANKS, Row
from runtime_parts.runners import AHEAD, CODES, RECEIVE, SEND, B, ChainStage, F, ahead
from runtime_parts.table import SPREAD_WIDTH
from runtime_parts.timing import Outcome, by_turns, pair_report

LANES = 2  # replicas of the encoder; the language model has one
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def _communicator(device: torch.device) -> MultiModulePipelineCommunicator:
    grids = {
        "images": HyperCommGrid([LANES], ["dp"], world_size=RANKS),
        "language": HyperCommGrid([RANKS - LANES], ["pp"], rank_offset=LANES, world_size=RANKS),
    }
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=60.0, receives_ahead=AHEAD)
    return MultiModulePipelineCommunicator(
        grids,
        {"images": ["language"]},
        config,
        module_output_ndim={"images": 2, "language": 2},
        device=device,
    )


def _job(row: Row, communicator: MultiModulePipelineCommunicator, microbatches: int) -> Job:
    """One stage on each rank. A lane of the encoder has one sample of a microbatch, the language model all."""
    plan = lower(multi_module_1f1b(communicator.graph, microbatches), receives="early")
    (stage,) = communicator.stages
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, microbatches, LANES, WIDTH, generator=generator).to(communicator.device)
    lane = communicator.rank if stage == 0 else 0
    return Job(
        row,
        plan,
        stage,
        {stage: Scale(stage).to(communicator.device)},
        inputs[:, lane : lane + 1].unbind(),
        targets.unbind(),
        _loss,
        (),
        communicator.device,
    )


class Floor:
    """The same messages over the groups of the same lanes by `dist.isend` and `dist.irecv`, and the same autograd.

    As `runners.Floor`; what the encoder's lanes send is joined by `torch.cat`, and its gradient cut by `Tensor.chunk`.
    """

    def __init__(self, job: Job, communicator: MultiModulePipelineCommunicator) -> None:
        self.job = job
        program = []
        for action in job.plan.actions(job.rank):
            forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
            program.append((CODES[action.kind], action.stage, action.microbatch or 0, forward, forward, 0))
        self._program = ahead(program)
        ends: dict[tuple[bool, bool], list[tuple[Any, int]]] = {}
        for spec, lane in communicator.lanes.items():
            forward, sends = spec.label.endswith(FORWARD.value), spec.source == communicator.rank
            peer = 1 - dist.get_rank(lane.group)
            ends.setdefault((sends, forward), []).append((lane.group, peer))
        self._ends = ends
        self._rows = 1 if job.rank == 0 else LANES  # of a tensor on this rank

    def step(self) -> None:
        """See `runners.Runner`."""
        job, stage = self.job, self.job.rank
        module = job.modules[stage]
        arriving: dict[tuple[int, bool], list[tuple[Any, Tensor]]] = {}
        out: dict[tuple[int, bool], Tensor] = {}
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        sends: list[Any] = []
        for code, _, microbatch, forward, _, _ in self._program:
            if code == SEND:
                to = self._ends[True, forward]
                for (group, peer), piece in zip(to, out.pop((microbatch, forward)).chunk(len(to)), strict=True):
                    sends.append((dist.isend(piece, group=group, group_dst=peer), piece))
            elif code == RECEIVE:
                sources = self._ends[False, forward]
                rows = self._rows // len(sources)
                buffers = [torch.empty(rows, WIDTH, device=job.device) for _ in sources]
                arriving[microbatch, forward] = [
                    (dist.irecv(buffer, group=group, group_src=peer), buffer)
                    for (group, peer), buffer in zip(sources, buffers, strict=True)
                ]
            elif code == F:
                x = job.inputs[microbatch] if stage == 0 else _joined(arriving.pop((microbatch, True))).requires_grad_()
                y = module(x)
                if stage == job.last:
                    y = job.loss(y, job.targets[microbatch])
                else:
                    out[microbatch, True] = y.detach()
                kept[microbatch] = x, y
            else:
                assert code == B
                x, y = kept.pop(microbatch)
                gradient = None if stage == job.last else _joined(arriving.pop((microbatch, False)))
                torch.autograd.backward(y, gradient)
                if stage > 0:
                    assert x.grad is not None
                    out[microbatch, False] = x.grad
        for work, _ in sends:
            work.wait()


def _joined(parts: Sequence[tuple[Any, Tensor]]) -> Tensor:
    for work, _ in parts:
        work.wait()
    return parts[0][1] if len(parts) == 1 else torch.cat([buffer for _, buffer in parts])


def measure(row: Row, rank: int, device: torch.device, *, microbatches: int, rounds: int) -> Outcome | None:
    """On each rank."""
    del rank
    if row.name != "1f1b":
        return None
    communicator = _communicator(device)
    job = _job(row, communicator, microbatches)
    stages = {number: ChainStage(job, number, module) for number, module in job.modules.items()}
    ours = PipelineRuntime(job.plan, stages, communicator)
    ours.step()  # agrees on shapes
    floor = Floor(job, communicator)
    found = []
    for runner in (ours, floor):
        job.forget_gradients()
        runner.step()
        found.append(job.gradients())
    off = difference(*found)
    seconds = by_turns({"ours": ours, "floor": floor}, rounds, before=job.forget_gradients)
    communicator.destroy()
    return Outcome(seconds, {} if off <= SAME else {"floor": f"gradients differ by {off:.1e}"})


def header(*, microbatches: int, rounds: int) -> Iterator[str]:
    """What the table says."""
    yield (
        f"two modules: an encoder on dp {LANES}, a language model on pp {RANKS - LANES}, empty stages, {microbatches} "
        f"microbatches; microseconds per microbatch, medians over {rounds} rounds by turns; ratio: median and quartiles"
    )
    yield f"  {'schedule':<18}{'ours':>9}{'floor':>9}{'ours/floor':>{SPREAD_WIDTH}}"


def report(row: Row, outcomes: Sequence[Outcome | None], *, microbatches: int) -> tuple[bool, list[str]]:
    """Whether the bound holds, and the line of the row."""
    return pair_report(row.name, outcomes, ("ours", "floor"), FLOOR_BOUND, unit=1e6 / microbatches)
