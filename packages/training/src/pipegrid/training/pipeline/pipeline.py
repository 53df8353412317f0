"""A training job as one object: stages, ties, communicator, steps, checkpoints and recordings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import Monitor, PipelineConfig, Plan, Routes, clip_grad_norm_
from pipegrid.schedules.errors import StepArgumentError
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training.checkpoint import Checkpoints, LoadedCheckpoint, TrainingState
from pipegrid.training.generation import Sampling, generate
from pipegrid.training.generation.generate import evaluating
from pipegrid.training.pipeline.losses import OwnLoss, given_loss
from pipegrid.training.pipeline.microbatches import microbatches, shares
from pipegrid.training.pipeline.modules import (
    ModelFactory,
    PipelineModule,
    create_groups,
    frozen_edges,
    leave_groups,
    modules_of,
    monitor_of,
    tied_parameters,
)
from pipegrid.training.pipeline.steps import Steps
from pipegrid.training.stages import Names, Stage
from pipegrid.transport.control.opening import resolve_device

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Tensors with the same rows along their first axes; or a list of such dicts, one for each microbatch."""


class Pipeline:
    """A job of one model, or of several modules, over the ranks of their grids.

    Every rank makes one and calls its methods when the others do. It is a thin layer: `stages`, `communicator`,
    `groups` and `config` are those that the step functions, `Checkpoints` and `generate` take.

    Args:
        model: a function that makes the model, such as ``lambda: LlamaForCausalLM(config)``; or modules by name.
        layout: of its layers, such as ``"Et*8|t*8L"``, with one stage on each pp rank, or as many as the schedule has.
        grid: of its ranks; groups that its sizes need and it does not have are created.
        topology: the modules that each module feeds.
        schedule: the name of one that trains, such as ``"zero_bubble_v"``.
        config: of the step; None allows microbatches of any shapes. Losses are counted by token, whatever it says.
        microbatch_size: rows of a microbatch, of this rank's batch.
        num_microbatches: how many a batch is cut into, in place of ``microbatch_size``. With neither, each row is one.
        loss: ``f(output, microbatch)``, a mean over rows or ``(sum, count)``, from what the last stage returns and its
            part of the batch; None: the model's own ``output.loss``, a mean over the tokens of the whole step.
        names: as in `pipeline_stage`.
        forward: ``f(stage, microbatch)``, as in `PipelineModule`.
        parallelize: ``f(stage)`` for each stage of this rank, before its parameters are read: FSDP2, tensor
            parallelism, `compile_layers`. It edits the stage in place.
        edges: options of the edges between modules, by (source, destination).
        device: of the stages; None: that of the default process group's backend.
        monitor: relays failures and deadlines between ranks; None: under torchrun only.

    Raises:
        StepArgumentError: ranks without a grid, a layout that does not divide over the pp ranks, or arguments that
            exclude each other.
        CutError: as `pipeline_stage`.
    """

    def __init__(
        self,
        model: nn.Module | ModelFactory | Mapping[str, PipelineModule],
        layout: str | PipelineParallelLayerLayout | None = None,
        grid: HyperCommGrid | None = None,
        *,
        topology: Mapping[str, Sequence[str]] | None = None,
        schedule: str = "1f1b",
        config: PipelineConfig | None = None,
        microbatch_size: int | None = None,
        num_microbatches: int | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        names: Names | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        parallelize: Callable[[Any], Any] | None = None,
        edges: Mapping[tuple[str, str], EdgeOptions] | None = None,
        device: torch.device | str | None = None,
        monitor: Monitor | bool | None = None,
    ) -> None:
        described = modules_of(model, layout, grid, names, forward)
        if microbatch_size is not None and num_microbatches is not None:
            raise StepArgumentError("microbatch_size and num_microbatches cut a batch in two ways; give one of them")
        self._cut: dict[str, Any] = {"count": num_microbatches, "size": microbatch_size}
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._recording: Path | None = None
        self._closed = False

        places = {name: module.places(schedule) for name, module in described.items()}
        create_groups(described)
        self.grids = {name: module.grid for name, module in described.items()}
        own = {name: one for name, one in described.items() if one.grid.is_current_rank_in_grid()}
        self.groups = {name: ProcessGroupCollection.from_grid(one.grid) for name, one in own.items()}
        self.replica, self.replicas, own_shares = shares(self.grids)

        _, self.device = resolve_device(next(iter(own.values())).grid.backend, device)
        self.stages = {
            name: [
                _edited(stage, parallelize)
                for stage in module.stages(name if len(described) > 1 else None, places[name], self.device)
            ]
            for name, module in own.items()
        }
        config = PipelineConfig(variable_seq_lengths=True) if config is None else config
        topology = {} if topology is None else topology
        self.communicator = MultiModulePipelineCommunicator(
            self.grids,
            {name: list(topology.get(name, ())) for name in described},
            config,
            edges=frozen_edges(described, topology, edges or {}),
            stage_placement=places,
            device=self.device,
        )
        self._tied = tied = tied_parameters(described, self.stages, places, self.communicator.job.graph)
        self.config: PipelineConfig = attrs.evolve(
            config,
            calculate_per_token_loss=True,
            tied_parameters=(*config.tied_parameters, *tied),
            monitor=config.monitor or monitor_of(monitor, self.device),
        )
        self._steps = Steps(
            own,
            self.stages,
            self.groups,
            own_shares,
            self.communicator,
            self.config,
            schedule,
            OwnLoss() if loss is None else given_loss(loss),
            self.device,
            self.replica,
        )

    @property
    def lane(self) -> int:
        """The name of `replica` until this version."""
        return self.replica

    @property
    def lanes(self) -> int:
        """The name of `replicas` until this version."""
        return self.replicas

    def step(self, batch: Batch, *, routes: Routes | None = None) -> Tensor:
        """Forwards and backwards of a batch: gradients are added, averaged over the tokens of all replicas.

        Args:
            batch: the whole batch of this rank's replica (``replica`` of ``replicas``), on any device. Ranks of one
                give the same.
            routes: of this step (`agree_on_routes`), for microbatches that skip a module, such as those without an
                image, and unequal numbers of them. Those that move to other replicas are an error: their rows are here
                alone.

        Returns:
            The mean loss over what all replicas count, a float64 scalar, on every rank.
        """
        parts = microbatches(batch, **self._cut)
        if routes is not None and self._recording is not None:
            raise StepArgumentError("record() is of a step in which replicas act alike; this one has routes")
        path, self._recording = self._recording, None
        return self._steps.run(parts, routes) if path is None else self._steps.recorded(parts, path)

    def evaluate(self, batch: Batch, *, routes: Routes | None = None) -> Tensor:
        """The mean loss of a batch, as of `step`, without gradients and in evaluation mode; on every rank."""
        with evaluating(self.stages):
            return self._steps.run(microbatches(batch, **self._cut), routes, forward_only=True)

    def generate(
        self,
        batch: Batch,
        max_new_tokens: int,
        *,
        num_microbatches: int = 1,
        sampling: Sampling | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int = 0,
    ) -> Tensor | None:
        """New tokens after the prompts of a batch, as `pipegrid.training.generate`.

        Returns:
            Tokens ``[rows, new]`` on the ranks of the module with the loss, padded to the longest; None elsewhere.
        """
        parts = microbatches(batch, count=num_microbatches, size=None)
        found = generate(
            **self._steps.arguments(parts),
            max_new_tokens=max_new_tokens,
            schedule=self._steps.schedule,
            sampling=sampling,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
        )
        if not found:
            return None
        longest = max(tokens.shape[1] for tokens in found)
        pad = partial(nn.functional.pad, value=pad_token_id)
        return torch.cat([pad(tokens, (0, longest - tokens.shape[1])) for tokens in found])

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to train of this rank's stages, each once; none on ranks of frozen modules alone."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters`, with their names in their module."""
        stages = [stage for held in self.stages.values() for stage in held]
        seen: set[nn.Parameter] = set()
        for name, parameter in (named for stage in stages for named in stage.named_parameters()):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def clip(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole job to one norm; returns the norm before, on every rank."""
        return clip_grad_norm_(
            self.stages,
            self.groups,
            max_norm,
            norm_type=norm_type,
            job_group=self.config.job_group,
            deadline=self.config.deadline,
            monitor=self.config.monitor,
        )

    def state(self, optimizer: Any = (), data: Any = None) -> TrainingState:
        """What a checkpoint holds of this rank: stages, ``optimizer`` (or a list of them) and the data position."""
        return TrainingState(
            stages={
                name: stages if isinstance(stages[0], Stage) else dict(enumerate(stages))
                for name, stages in self.stages.items()
            },
            optimizers=list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer],
            data=data,
            grids=self.grids,
        )

    def save(
        self,
        directory: str | os.PathLike[str],
        optimizer: Any = (),
        *,
        step: int,
        data: Any = None,
        blocking: bool = True,
    ) -> None:
        """Save a checkpoint of ``step`` completed steps, as `Checkpoints.save`; the last three stay.

        Args:
            directory: of the run, shared by all ranks.
            optimizer: one, or a list.
            step: completed steps.
            data: the data position, or other plain data; the same on every rank.
            blocking: False writes in the background.
        """
        self.checkpoints(directory).save(self.state(optimizer, data), step=step, blocking=blocking)

    def load(
        self, directory: str | os.PathLike[str], optimizer: Any = (), *, step: int | None = None, data: Any = None
    ) -> LoadedCheckpoint | None:
        """Fill stages and optimizer from the newest good checkpoint, of any layout and grids; None without one."""
        return self.checkpoints(directory).load(self.state(optimizer, data), step=step)

    def checkpoints(self, directory: str | os.PathLike[str]) -> Checkpoints:
        """The checkpoints in ``directory``, which is this run's until `close`."""
        path = Path(directory).absolute()
        if path not in self._checkpoints:
            monitor = self.config.monitor
            deadline = self.config.deadline if monitor is None else monitor.deadline or self.config.deadline
            self._checkpoints[path] = Checkpoints(path, deadline=deadline, monitor=monitor)
        return self._checkpoints[path]

    def record(self, path: str | os.PathLike[str]) -> None:
        """Record the next `step`, and write it for the planner (``python -m pipegrid.planner what-if``) and timelines.

        The step runs with a recorder's hooks, which cost some microseconds an action; call it after the first steps.
        """
        self._recording = Path(path)

    def plan(self, num_microbatches: int) -> Plan:
        """The proved plan of a step."""
        return self._steps.plan(num_microbatches)

    def close(self) -> None:
        """Wait for checkpoints, close all lanes, end the monitor and the groups that this created. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for checkpoints in self._checkpoints.values():
                checkpoints.close()
        finally:
            self._checkpoints.clear()
            self.communicator.destroy()
            if self.config.monitor is not None:
                self.config.monitor.close()
            leave_groups(self.grids.values(), self._tied)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _edited(stage: Any, parallelize: Callable[[Any], Any] | None) -> Any:
    edited = None if parallelize is None else parallelize(stage)
    if edited is not None and edited is not stage:
        raise StepArgumentError(f"parallelize returned {type(edited).__name__}; it edits the stage in place")
    return stage
