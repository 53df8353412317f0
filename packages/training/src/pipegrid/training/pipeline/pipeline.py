"""A training job as one object: stages, ties, communicator, steps, checkpoints and recordings."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.checkpoint import Checkpoints, LoadedCheckpoint, TrainingState
from pipegrid.checkpoint.state.names import bare_name
from pipegrid.core.edge import Edge
from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import Count, Name, checked_arguments
from pipegrid.gradients.groups import require_dims
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.monitor import DisagreementError
from pipegrid.schedules import Monitor, PipelineConfig, Plan, Routes, clip_grad_norm_
from pipegrid.schedules.megatron import describe_steps
from pipegrid.stages import Names, Stage
from pipegrid.stages.assignment import names_of_ties
from pipegrid.stages.generators import states_as_before
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training.generation import Sampling, generate
from pipegrid.training.generation.generate import evaluating
from pipegrid.training.pipeline import modules
from pipegrid.training.pipeline.counts import beginning, require_one_call
from pipegrid.training.pipeline.microbatches import microbatches, shares
from pipegrid.training.pipeline.modules import EndOfJob, JobSetup, ModelFactory, PipelineModule
from pipegrid.training.pipeline.rows import Rows
from pipegrid.training.pipeline.steps import Steps
from pipegrid.transport.collectives.differences import by_text
from pipegrid.transport.control.opening import resolve_device
from pipegrid.transport.streams import has_streams

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Tensors, arrays and lists with one entry for each row, and what has none; or a list of dicts, one a microbatch."""


class Pipeline:
    """A job of one model, or of several modules, over the ranks of their grids.

    Every rank makes one and calls its methods when the others do. It is a thin layer: `stages`, `communicator`,
    `groups` and `config` are those that the step functions, `Checkpoints` and `generate` take.

    Dropout and whatever else a forward draws: each forward is seeded by a generator of this rank's module, itself
    seeded by ``torch.initial_seed()``, the module, its replica and its stage, here and now. So replicas and stages draw
    otherwise, tensor-parallel ranks alike, and the generators of the script are as if forwards drew nothing. A
    checkpoint has them; ``pipeline.generators["model"].manual_seed(1)`` seeds anew. For the masks of one process,
    apply `DropoutMasks` to `stages`.

    The first `step` of a job of at most 20 million parameters is compared with one process: the first rank runs the
    whole of all modules on the batch of all replicas, with the script's own loss, and a loss, gradient or buffer of a
    stage that is not that of one process is a `CutError` on every rank. So is, in the next `step`, what the script's
    optimizers have made of the parameters first. It takes as long as that process does. ``PipelineConfig(check=True)``
    compares a job of any size that a rank can hold, and False none; a line on stderr says what is not compared.

    Args:
        model: a function that makes the model, such as ``lambda: LlamaForCausalLM(config)``; or modules by name.
        layout: of its layers, such as ``"Et*8|t*8L"``, with one stage on each pp rank, or as many as the schedule has.
        grid: of its ranks; groups that its sizes need and it does not have are created.
        topology: the modules that each module feeds.
        schedule: the name of one that trains, such as ``"zero_bubble_v"``.
        config: of the step; None allows microbatches of any shapes. With ``variable_seq_lengths`` and no ``shapes``,
            messages announce their shapes in the first step of a batch of some shapes only (``"learned"``); a model
            whose shapes depend on more than those of its batch needs ``"header"``. Gradients are divided last, whatever
            it says.
        microbatch_size: rows of a microbatch, of this rank's batch.
        num_microbatches: how many a batch is cut into, in place of ``microbatch_size``. With neither, each row is one.
        rows: by name, the axis of an entry's rows where it is not the first, ``{"positions": 1}``. A list is an axis
            before those of its entries; ``"images.sizes"`` is an entry of a dict inside.
        whole: the names of entries that each microbatch has all of, such as weights of classes.
        loss: ``f(output, microbatch)``, a mean or ``(sum, count)``, from what the last stage returns and its part of
            the batch. A mean is over rows, or over labels that are not -100, all or without the first of each row:
            which, is found in the first microbatches where it matters (``f`` is called a few more times there, without
            gradients, on parts of a microbatch), and a mean over anything else is an error, as is one that the model
            makes of an entry other than ``labels`` whose rows ignore unequally many (negative whole numbers);
            ``(mean, 1)`` is a mean over microbatches. Either may be in `WithLoss`, beside a loss that is a mean over
            the microbatches. None: the model's own ``output.loss``, a mean over the tokens of the whole step.
        names: as in `pipeline_stage`.
        forward: ``f(stage, microbatch)``, as in `PipelineModule`.
        parallelize: ``f(stage)`` for each stage of this rank, before its parameters are read: FSDP2, tensor
            parallelism, `compile_layers`. It edits the stage in place.
        edges: options of the edges between modules, by (source, destination).
        device: of the stages; None: that of the default process group's backend.
        monitor: relays failures and deadlines between ranks; None: under torchrun only.
        spare: the ranks of the world without a module. They take part in nothing: there a pipeline has no stages and no
            parameters, a batch is not read, a loss or a norm is NaN, and `close` waits until all
            others have closed, for the deadline of ``config`` from the first one on.
        host: the name of what this rank shares with those that are near it, such as a node or an NVLink domain: a value
            that skips stages goes to each once, and is forwarded there. None: the machine's name.

    Raises:
        StepArgumentError: ranks without a grid, a layout that does not divide over the pp ranks, or arguments that
            exclude each other.
        CutError: as `pipeline_stage`; in the first step also where it is not that of one process.
    """

    @checked_arguments(StepArgumentError, kinds=True)
    def __init__(
        self,
        model: nn.Module | ModelFactory | Mapping[str, PipelineModule],
        layout: str | PipelineParallelLayerLayout | None = None,
        grid: HyperCommGrid | None = None,
        *,
        topology: Mapping[str, Sequence[str]] | None = None,
        schedule: str = "1f1b",
        config: PipelineConfig | None = None,
        microbatch_size: Count | None = None,
        num_microbatches: Count | None = None,
        rows: Mapping[str, int] | None = None,
        whole: Sequence[str] | str = (),
        loss: Callable[[Any, Any], Any] | None = None,
        names: Names | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        parallelize: Callable[[Any], Any] | None = None,
        edges: Mapping[tuple[str, str], EdgeOptions] | None = None,
        device: torch.device | str | int | None = None,
        monitor: Annotated[Monitor | bool | None, "checked by `monitor_of`"] = None,
        spare: Iterable[int] = (),
        host: Name | None = None,
    ) -> None:
        described = modules.modules_of(model, layout, grid, names, forward)
        if microbatch_size is not None and num_microbatches is not None:
            raise StepArgumentError("microbatch_size and num_microbatches cut a batch in two ways; give one of them")
        cutting = Rows({} if rows is None else rows, whole)
        self._cut: dict[str, Any] = {"count": num_microbatches, "size": microbatch_size, "rows": cutting}
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._recording: Path | None = None
        self._closed = False

        places = {name: module.places(schedule) for name, module in described.items()}
        config = PipelineConfig(variable_seq_lengths=True) if config is None else config
        ranks = modules.ranks_of(described, spare)
        self._end = EndOfJob(ranks, config.deadline) if len(ranks) < dist.get_world_size() else None
        if self._end is not None and config.job_group is None:
            config = attrs.evolve(config, job_group=self._end.group)
        for name, module in described.items():
            require_dims(name, module.grid)
        modules.create_groups(described)
        self.grids = {name: module.grid for name, module in described.items()}
        own = {name: one for name, one in described.items() if one.grid.is_current_rank_in_grid()}
        self.groups = {name: ProcessGroupCollection.from_grid(one.grid) for name, one in own.items()}
        self.replica, self.replicas, own_shares = shares(self.grids)
        self.is_spare = not own
        _, self.device = resolve_device(next(iter(described.values())).grid.backend, device)
        self._without_elements = nn.Parameter(torch.empty(0, 0, device=self.device))
        self.config: PipelineConfig
        self.stages: dict[str, list[Any]] = {}
        for name, module in own.items():
            made = module.stages(name if len(described) > 1 else None, places[name], self.device)
            for stage in made:
                edited = None if parallelize is None else parallelize(stage)
                if edited is not None and edited is not stage:
                    kind = type(edited).__name__
                    raise StepArgumentError(f"parallelize returned {kind}; it edits the stage in place")
            self.stages[name] = made
        self.generators = modules.generators_of(self.grids)
        if self.is_spare:
            self.config = config
            return
        if config.variable_seq_lengths and config.shapes is None:
            config = attrs.evolve(config, shapes="learned")
        fed = {name: list((topology or {}).get(name, ())) for name in described}
        frozen = [(name, other) for name, module in described.items() if module.frozen for other in fed[name]]
        options = {**{edge: EdgeOptions(backward=False) for edge in frozen}, **(edges or {})}  # no gradients to these
        how: dict[str, Any] = {"edges": options, "stage_placement": places, "device": self.device}
        connect = partial(MultiModulePipelineCommunicator, self.grids, fed, config, **how)
        self.communicator = connect()
        graph = self.communicator.job.graph
        assert graph is not None  # a communicator of modules
        self._tied = tied = modules.tied_parameters(described, self.stages, places, graph)
        self.config = attrs.evolve(
            config,
            calculate_per_token_loss=True,
            weighted_microbatches=True,
            tied_parameters=(*config.tied_parameters, *tied),
            monitor=config.monitor or modules.monitor_of(monitor, self.device, ranks),
        )
        setup = JobSetup(
            described,
            graph,
            options,
            self.stages,
            self.groups,
            self.config,
            schedule,
            loss,
            cutting,
            self.device,
            self.replica,
            self.replicas,
            own_shares,
            self.generators,
            # A method of this would keep lanes until a garbage collection.
            partial(_named, self.stages, behind=len(described) > 1),
        )
        near = host or socket.gethostname()
        is_cut = any(module.num_stages > 1 for module in described.values())
        reconnect = partial(_reconnected, connect, weakref.ref(self)) if is_cut else None
        self._steps = Steps(setup, self.communicator, places, near, reconnect)

    def step(self, batch: Batch, *, routes: Routes | None = None) -> Tensor:
        """Forwards and backwards of a batch: gradients are added, averaged over the tokens of all replicas.

        A loss that a layer attaches to its output by an autograd function, and the loss of a `WithLoss`, are averaged
        over the microbatches of all replicas, as by one process that adds the gradients of the same microbatches. That
        needs the count of the step before its first backward: where ``loss`` returns a count that neither rows nor
        labels give, it is an error in the first step.

        Args:
            batch: the whole batch of this rank's replica (``replica`` of ``replicas``), on any device. Ranks of one
                give the same.
            routes: of this step (`agree_on_routes`), for microbatches that skip a module, such as those without an
                image, and unequal numbers of them. Those that move to other replicas are an error: their rows are here
                alone.

        Returns:
            The mean loss over what all replicas count, without attached ones, a float64 scalar, on every rank; NaN on a
            spare one.
        """
        if self.is_spare:
            return self._nothing()
        if not torch.is_grad_enabled():
            raise StepArgumentError("step() under no_grad() adds gradients all the same; evaluate() has the loss alone")
        parts = microbatches(batch, **self._cut)
        if routes is not None and self._recording is not None:
            raise StepArgumentError("record() is of a step in which replicas act alike; this one has routes")
        path, self._recording = self._recording, None
        if path is not None:
            return self._steps.recorded(parts, path, batch=batch)
        return self._steps.run(parts, routes, batch=batch)

    def evaluate(self, batch: Batch, *, routes: Routes | None = None) -> Tensor:
        """The mean loss of a batch, as of `step`, without gradients and in evaluation mode; on every rank."""
        if self.is_spare:
            return self._nothing()
        with evaluating(self.stages), states_as_before(self.generators.values()):
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
        if self.is_spare:
            return None
        parts = microbatches(batch, count=num_microbatches, size=None, rows=self._cut["rows"])
        with states_as_before(self.generators.values()):
            found = generate(
                **self._steps.arguments(parts),
                max_new_tokens=max_new_tokens,
                schedule=self._steps.job.schedule,
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
        """The parameters to train of this rank's stages, each once.

        Where all is frozen, one parameter without elements that is in no stage: an optimizer takes no empty list.
        """
        return [parameter for _, parameter in self.named_parameters()] or [self._without_elements]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to train by name, none where all is frozen; a tied one has one name, that of one process.

        Options by name: ``AdamW([{"params": [p], "lr": ...} for name, p in ...] or [{"params": []}])``.
        """
        return _named(self.stages)

    def clip(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole job to one norm; returns the norm before, on every rank."""
        if self.is_spare:
            return self._nothing()
        numbers = beginning("clip")[2:]  # with those of a norm as many as other calls begin with
        marks = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        lanes = self.communicator.lanes
        neighbours = lanes.neighbours(lane.peer for lane in lanes.values())
        for one in neighbours:  # one that steps waits for messages, and comes to no all-reduce
            one.say("clip()")
        norm = clip_grad_norm_(
            self.stages,
            self.groups,
            max_norm,
            norm_type=norm_type,
            job_group=self.config.job_group,
            deadline=self.config.deadline,
            monitor=self.config.monitor,
            beside=marks,
        )
        if not has_streams(self.device):  # where there are, the host waits for its neighbours alone
            require_one_call("clip", marks.tolist())
        seconds = self.config.deadline or self.communicator.deadline
        if others := {one.peer: what for one in neighbours if (what := one.hear(seconds)) is not None}:
            raise DisagreementError(f"this rank is in clip(), and {'; '.join(by_text(others))}")
        for one in neighbours:
            one.end()
        return norm

    def state(self, optimizer: Any = (), data: Any = None) -> TrainingState:
        """The state of this rank for a checkpoint: stages, ``optimizer`` (or a list of them) and the data position."""
        stages = {
            name: held if isinstance(held[0], Stage) else dict(enumerate(held)) for name, held in self.stages.items()
        }
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        return TrainingState(
            stages=stages, optimizers=optimizers, data=data, grids=self.grids, generators=self.generators
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
        if self.is_spare:
            return
        self.checkpoints(directory).save(self.state(optimizer, data), step=step, blocking=blocking)

    def load(
        self, directory: str | os.PathLike[str], optimizer: Any = (), *, step: int | None = None, data: Any = None
    ) -> LoadedCheckpoint | None:
        """Fill stages and optimizer from the newest good checkpoint, of any layout and grids.

        Returns:
            What was loaded; None without a checkpoint, and on a spare rank.
        """
        if self.is_spare:
            return None
        return self.checkpoints(directory).load(self.state(optimizer, data), step=step)

    def checkpoints(self, directory: str | os.PathLike[str]) -> Checkpoints:
        """The checkpoints in ``directory``, which is this run's until `close`."""
        self._require_stages("checkpoints")
        path = Path(directory).absolute()
        if path not in self._checkpoints:
            monitor = self.config.monitor
            deadline = self.config.deadline if monitor is None else monitor.deadline or self.config.deadline
            group = self.config.job_group
            self._checkpoints[path] = Checkpoints(path, group=group, deadline=deadline, monitor=monitor)
        return self._checkpoints[path]

    def record(self, path: str | os.PathLike[str]) -> None:
        """Record the next `step`, and write it for the planner (``python -m pipegrid.planner what-if``) and timelines.

        The step runs with a recorder's hooks, which cost some microseconds an action; call it after the first steps.
        """
        self._recording = Path(path)

    def plan(self, num_microbatches: int) -> Plan:
        """The proved plan of a step."""
        self._require_stages("plan")
        return self._steps.plan(num_microbatches)

    def describe(self) -> str:
        """The plans that steps have run, as `PipelineRuntime.describe`, and what stages hand on past others."""
        self._require_stages("describe")
        stages = [held[0] for held in self.stages.values() if held and isinstance(held[0], Stage)]
        found = [describe_steps(self.stages), *(stage.describe_skips() for stage in stages)]
        return "\n\n".join(text for text in found if text)

    def close(self) -> None:
        """Wait for checkpoints, close all lanes, end the monitor and the groups that this created. Idempotent.

        On a spare rank wait until all others have.

        Raises:
            JobFailedError: on a spare rank, where some others have not closed it a deadline after the first one.
        """
        if self._closed:
            return
        self._closed = True
        if self.is_spare:
            if self._end is not None:
                self._end.wait()
            return
        self._steps.close()
        try:
            for checkpoints in self._checkpoints.values():
                checkpoints.close()
        finally:
            self._checkpoints.clear()
            self.communicator.destroy()
            if self.config.monitor is not None:
                self.config.monitor.close()
            modules.leave_groups(self.grids.values(), self._tied)
            if self._end is not None:
                self._end.say()

    def _require_stages(self, name: str) -> None:
        if self.is_spare:
            raise StepArgumentError(f"{name}() on a spare rank, which takes part in nothing; look at is_spare")

    def _nothing(self) -> Tensor:
        return torch.full((), torch.nan, dtype=torch.float64, device=self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reconnected(
    connect: Callable[..., MultiModulePipelineCommunicator],
    pipeline: weakref.ref[Pipeline],
    skips: Mapping[str, Sequence[Edge]],
) -> MultiModulePipelineCommunicator:
    """The communicator of a pipeline anew, with edges past stages; no message has been sent on the one before."""
    job = pipeline()
    assert job is not None  # inside of its first call
    job.communicator.destroy()
    job.communicator = connect(skips=skips)
    return job.communicator


def _named(held: Mapping[str, Sequence[Any]], *, behind: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """`Pipeline.named_parameters` of the stages ``held`` by module; each ``behind`` the name of its module."""
    seen: set[nn.Parameter] = set()
    for module, stage in ((module, stage) for module, stages in held.items() for stage in stages):
        tied = names_of_ties(stage.ties, stage.number) if isinstance(stage, Stage) else {}
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield f"{module}." * behind + tied.get(bare_name(name), name), parameter
