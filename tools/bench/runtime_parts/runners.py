"""Three ways to run a step of a job: our runtime, torch's, and a loop written by hand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor, nn

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.schedules.runtime import Forwarded, Hook, PipelineRuntime
from pipegrid.transport.communicator import P2PCommunicator
from pipegrid.transport.config import P2PConfig
from runtime_parts.job import Job

# A schedule of torch's that hangs on gloo is given up after this long; none of its steps takes a tenth of it.
TORCH_SECONDS = 40.0
# Receives that are posted beyond those that the plan asks for: by our lanes, and by the hand-written loop.
AHEAD = 2


class Runner(Protocol):
    """One way to run a step."""

    def step(self) -> None:
        """Every forward and backward of this rank; gradients accumulate in the parameters."""
        ...


@define
class ChainStage:
    """A stage of a chain, for our runtime."""

    job: Job
    stage: int
    module: nn.Module
    into: Edge | None = field(init=False)  # None: the first stage
    out: Edge | None = field(init=False)  # None: the last

    def __attrs_post_init__(self) -> None:
        self.into = Edge(self.stage - 1, self.stage) if self.stage > 0 else None
        self.out = Edge(self.stage, self.stage + 1) if self.stage < self.job.last else None

    def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
        """See `pipegrid.schedules.RuntimeStage`."""
        y = self.module(self.job.inputs[microbatch] if self.into is None else inputs[self.into])
        if self.out is None:
            return Forwarded({}, self.job.loss(y, self.job.targets[microbatch]))
        return Forwarded({self.out: y})


class Ours:
    """`PipelineRuntime` over a `P2PCommunicator`, shapes fixed beforehand."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.communicator = P2PCommunicator(
            dist.group.WORLD,
            P2PConfig(pipeline_dtype=torch.float32, deadline=60.0, receives_ahead=AHEAD),
            placement=job.placement,
            tensor_shape=job.shape,
            device=job.device,
        )
        self._runtime = self._made(())
        self.step = self._runtime.step

    def _made(self, hooks: Sequence[Hook]) -> PipelineRuntime:
        job = self.job
        stages = {stage: ChainStage(job, stage, module) for stage, module in job.modules.items()}
        return PipelineRuntime(job.plan, stages, self.communicator, hooks=hooks)

    def watched(self, hook: Hook) -> Runner:
        """The same with a hook around each action."""
        return self._made((hook,))

    def received(self, steps: int) -> tuple[int, int]:
        """Bytes that ``steps`` with ``reuse_buffers`` allocate for received messages, and what the plan says."""
        job = self.job
        stages = {stage: ChainStage(job, stage, module) for stage, module in job.modules.items()}
        runtime = PipelineRuntime(job.plan, stages, self.communicator, reuse_buffers=True)
        nbytes = torch.Size(job.shape).numel() * torch.float32.itemsize
        before = self._allocations()
        for _ in range(steps):
            runtime.step()
        return (self._allocations() - before) * nbytes, runtime.buffers.num_slots * nbytes

    def _allocations(self) -> int:
        here = dist.get_rank()
        ends = [lane for spec, lane in self.communicator.lanes.items() if spec.destination == here]
        return sum(lane.stats.allocations for lane in ends)

    def close(self) -> None:
        """Free the lanes."""
        self.communicator.close()


class Torch:
    """The peer's schedule over its own stages, on a group of its own."""

    def __init__(self, job: Job) -> None:
        from torch.distributed.pipelining import PipelineStage

        group = dist.new_group(timeout=timedelta(seconds=TORCH_SECONDS))
        stages = [
            PipelineStage(job.modules[stage], stage, job.plan.num_stages, job.device, group=group)
            for stage in sorted(job.modules)
        ]
        schedules = importlib.import_module("torch.distributed.pipelining.schedules")
        schedule = getattr(schedules, job.row.peer)
        single = issubclass(schedule, schedules.PipelineScheduleSingle)
        self._schedule = schedule(
            stages[0] if single else stages, job.plan.num_microbatches, loss_fn=job.loss, scale_grads=False
        )
        self._inputs = (torch.cat(list(job.inputs)),) if 0 in job.modules else ()
        self._target = torch.cat(list(job.targets)) if job.last in job.modules else None

    def step(self) -> None:
        """See `Runner`."""
        self._schedule.step(*self._inputs, target=self._target, return_outputs=False)


# What the hand-written loop does, as numbers: comparing them is the cheapest dispatch that Python has.
F, B, I, W, SEND, RECEIVE = range(6)
CODES = {
    ActionKind.F: F,
    ActionKind.B: B,
    ActionKind.I: I,
    ActionKind.W: W,
    ActionKind.SEND_F: SEND,
    ActionKind.SEND_B: SEND,
    ActionKind.RECV_F: RECEIVE,
    ActionKind.RECV_B: RECEIVE,
}


Line: TypeAlias = tuple[int, int, int, bool, Any, int]
"""Code, stage, microbatch, whether forward, group, peer in it."""


def ahead(program: Sequence[Line]) -> list[Line]:
    """Each receive `AHEAD` places earlier among those of its group."""
    places: dict[int, list[int]] = {}
    before: dict[int, list[Line]] = {}
    for place, line in enumerate(program):
        if line[0] == RECEIVE:
            own = places.setdefault(id(line[4]), [])
            own.append(place)
            before.setdefault(own[max(0, len(own) - 1 - AHEAD)], []).append(line)
    return [
        line
        for place, here in enumerate(program)
        for line in (*before.get(place, ()), *(() if here[0] == RECEIVE else (here,)))
    ]


class Floor:
    """A loop written by hand.

    The plan's messages in its order by `dist.isend` and `dist.irecv`, the same forwards and as many backwards by
    `torch.autograd`, and nothing else: no errors, deadlines, hooks, structures or handles, and no checks but those of
    the public functions that such a loop calls.
    Messages go over the very groups that our lanes use, and receives are posted as far ahead. A received tensor gets a
    fresh buffer, as a pipeline needs. Sends are waited for at the end.
    """

    def __init__(self, job: Job, communicator: P2PCommunicator) -> None:
        self.job = job
        self._program: list[Line] = []
        for action in job.plan.actions(job.rank):
            group, peer, forward = None, 0, action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
            if action.edge is not None:
                group = communicator.lane(action.edge, Direction.FORWARD if forward else Direction.BACKWARD).group
                peer = 1 - dist.get_rank(group)
            microbatch = action.microbatch
            assert microbatch is not None
            self._program.append((CODES[action.kind], action.stage, microbatch, forward, group, peer))
        self._program = ahead(self._program)

    def step(self) -> None:
        """See `Runner`."""
        job, last = self.job, self.job.last
        modules, shape = job.modules, job.shape
        weights = {stage: tuple(module.parameters()) for stage, module in modules.items()}
        arriving: dict[tuple[int, int, bool], tuple[Any, Tensor]] = {}
        handed: dict[tuple[int, int, bool], Tensor] = {}  # between two stages of this rank
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        halves: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        out: dict[tuple[int, int, bool], Tensor] = {}
        sends: list[Any] = []
        for code, stage, microbatch, forward, group, peer in self._program:
            if code == SEND:
                tensor = out.pop((stage, microbatch, forward))
                sends.append((dist.isend(tensor, group=group, group_dst=peer), tensor))
            elif code == RECEIVE:
                buffer = torch.empty(shape, device=job.device)
                arriving[stage, microbatch, forward] = dist.irecv(buffer, group=group, group_src=peer), buffer
            elif code == F:
                if stage == 0:
                    x = job.inputs[microbatch]
                elif stage - 1 in modules:
                    x = handed.pop((stage, microbatch, True))
                else:
                    work, x = arriving.pop((stage, microbatch, True))
                    work.wait()
                    x.requires_grad_()
                y = modules[stage](x)
                if stage == last:
                    y = job.loss(y, job.targets[microbatch])
                elif stage + 1 in modules:
                    handed[stage + 1, microbatch, True] = y.detach().requires_grad_()
                else:
                    out[stage, microbatch, True] = y.detach()
                kept[stage, microbatch] = x, y
            elif code == W:
                y, gradient = halves.pop((stage, microbatch))
                torch.autograd.backward(y, gradient, inputs=weights[stage])
            else:
                x, y = kept.pop((stage, microbatch))
                if stage == last:
                    gradient = None
                elif stage + 1 in modules:
                    gradient = handed.pop((stage, microbatch, False))
                else:
                    work, gradient = arriving.pop((stage, microbatch, False))
                    work.wait()
                if code == B:
                    torch.autograd.backward(y, gradient)
                    back = x.grad
                else:
                    halves[stage, microbatch] = y, gradient
                    if stage == 0:
                        continue
                    (back,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
                if stage > 0:
                    assert back is not None
                    (handed if stage - 1 in modules else out)[self._back(stage, modules), microbatch, False] = back
        for work, _ in sends:
            work.wait()

    @staticmethod
    def _back(stage: int, modules: Mapping[int, nn.Module]) -> int:
        """By which stage a gradient is looked up: by its receiver where that is here, else by its sender."""
        return stage - 1 if stage - 1 in modules else stage
