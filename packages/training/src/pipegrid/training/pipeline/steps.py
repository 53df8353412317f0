"""Steps of a job: its forward step, the call of the step function, the mean loss, the recording of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from pipegrid.schedules import (
    PipelineConfig,
    Plan,
    Recorder,
    Recording,
    Routes,
    get_forward_backward_func,
    position_of,
    recording_to_json,
    step_plan,
)
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.schedules.gradients import tied_stages
from pipegrid.schedules.gradients.all_reduce import all_reduce
from pipegrid.schedules.monitor.collectives import Waiting
from pipegrid.schedules.timeline import Track
from pipegrid.training.gathering import gather_plain, wait_for_all
from pipegrid.training.pipeline.losses import Counted
from pipegrid.training.pipeline.microbatches import Microbatch, Share, microbatch
from pipegrid.training.pipeline.modules import PipelineModule
from pipegrid.training.stages import Stage
from pipegrid.transport.base import Communicator
from pipegrid.transport.graph import ModuleGraph


@frozen(eq=False)
class Steps:
    """What every step of a job is called with.

    Attributes:
        modules: on this rank.
        stages: by module, those of this rank.
        groups: by module.
        shares: by module, the part of each microbatch that this rank's replica has.
        communicator: of the job.
        config: of all stages.
        schedule: its name.
        loss: of a last stage's output.
        device: of the stages.
        replica: whose batch this rank reads.
    """

    modules: Mapping[str, PipelineModule]
    stages: Mapping[str, Sequence[Any]]
    groups: Mapping[str, Any]
    shares: Mapping[str, Share]
    communicator: Communicator
    config: PipelineConfig
    schedule: str
    loss: Callable[[Any, Microbatch], Counted]
    device: torch.device
    replica: int

    def __attrs_post_init__(self) -> None:
        self._set_config(self.config)

    @property
    def _graph(self) -> ModuleGraph:
        graph = self.communicator.job.graph
        assert graph is not None  # a communicator of modules
        return graph

    def arguments(self, parts: Sequence[Mapping[str, Any]], routes: Routes | None = None) -> dict[str, Any]:
        """What a step function is called with.

        Raises:
            StepArgumentError: the routes move microbatches, or share calls.
        """
        if routes is not None and (routes.moves or routes.every or routes.dead):
            raise StepArgumentError(
                "the routes of a Pipeline's step move microbatches to other replicas, whose rows these do not have, or "
                "share calls; give such routes to a step function, with UnitBatches"
            )
        shared = {name: [microbatch(part, share, self.device) for part in parts] for name, share in self.shares.items()}
        read = {name: iter if routes is None else partial(_passing, routes, self.replica, name) for name in shared}
        return {
            "forward_step_func": self._forward_step,
            "data_iterator": {name: [read[name](shared[name]) for _ in stages] for name, stages in self.stages.items()},
            "model": self.stages,
            "num_microbatches": len(parts),
            "p2p_communicator": self.communicator,
            "pg_collection": self.groups,
            **({} if routes is None else {"routes": routes}),
        }

    def run(
        self, parts: Sequence[Mapping[str, Any]], routes: Routes | None = None, *, forward_only: bool = False
    ) -> Tensor:
        """A step of microbatches; the mean loss over what the whole job counts, on every rank."""
        step = get_forward_backward_func(schedule=self.schedule)
        losses = step(**self.arguments(parts, routes), forward_only=forward_only)
        # Tensor-parallel ranks have the same losses, of which one counts.
        tp = [groups.tp for name, groups in self.groups.items() if name in self._graph.sinks]
        if losses and not any(group is not None and group.rank() for group in tp):
            sums = torch.stack([torch.stack(each) for each in losses]).sum(dim=0)
        else:
            sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        what = f"the mean loss of {'evaluate' if forward_only else 'step'}()"
        all_reduce(sums, self.config.job_group)(Waiting(self.config.deadline, self.config.monitor, what))
        return sums[0] / sums[1].clamp(min=1)

    def recorded(self, parts: Sequence[Mapping[str, Any]], path: Path) -> Tensor:
        """`run` with a recorder, on CUDA of the memory of activations as well; the first rank writes all tracks."""
        cuda = self.device.type == "cuda"
        recorder = Recorder(memory=(lambda: int(torch.cuda.memory_allocated(self.device))) if cuda else None)
        self._set_config(attrs.evolve(self.config, hooks=(*self.config.hooks, recorder)))
        waiting = Waiting(self.config.deadline, self.config.monitor, "the recording of a step")
        try:
            wait_for_all(dist.group.WORLD, self.device, waiting=waiting)
            recorder.start()
            loss = self.run(parts)
        finally:
            self._set_config(self.config)
        plan, rank = self.plan(len(parts)), dist.get_rank()
        own = recorder.track(plan, rank=rank, position=position_of(plan, self.communicator.job.stages))
        tracks = cattrs.structure(gather_plain(own, dist.group.WORLD, self.device, waiting=waiting), list[Track])
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(recording_to_json(Recording(plan, tracks)), encoding="utf-8")
        wait_for_all(dist.group.WORLD, self.device, waiting=waiting)
        return loss

    def plan(self, num_microbatches: int) -> Plan:
        """The proved plan of a step."""
        job = self.communicator.job
        return step_plan(
            self._graph,
            num_microbatches,
            tied_stages(self.config.tied_parameters),
            placement=job.placement,
            collectives=job.collective_edges,
            frozen=job.frozen_modules,
            schedule=self.schedule,
            shard=self.config.shard,
            prefetch=self.config.prefetch,
        )

    def _forward_step(self, parts: Iterator[Microbatch], stage: Any) -> tuple[Any, Any]:
        part = next(parts)
        name = next(name for name, stages in self.stages.items() if any(stage is each for each in stages))
        forward = self.modules[name].forward
        output = stage(**part.inputs) if forward is None else forward(stage, part.inputs)
        if name in self._graph.sinks and getattr(stage, "is_last", True):
            return output, lambda output: self.loss(output, part)
        return output if isinstance(stage, Stage) else {name: output}, None

    def _set_config(self, config: PipelineConfig) -> None:
        for stage in (stage for held in self.stages.values() for stage in held):
            stage.config = config


def _passing(routes: Routes, replica: int, module: str, parts: Sequence[Microbatch]) -> Iterator[Microbatch]:
    """The microbatches of ``replica`` that pass through a module."""
    units = zip(routes.units_of(replica), parts, strict=False)  # how many, the step function compares
    return iter([part for unit, part in units if not routes.skips_module(unit, module)])
