"""What one rank of the job holds: its stages, its groups, its way to the other modules, and who watches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped
from torch.nn import functional as F

from digit_reader.decoding import exact
from digit_reader.launch import CONTROL
from digit_reader.modules import IMAGES, LANGUAGE, SIGNAL
from digit_reader.options import Options
from digit_reader.parts import joined, part_of
from digit_reader.samples import Samples
from digit_reader.vocabulary import PAD
from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.monitor import Control, ControlStore
from pipegrid.schedules import Monitor, PipelineConfig, Plan, Recorder, step_plan
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store, replica_samples

AXES = {"b": 0, "s": 1, "h": 2}
"""What crosses between modules is [batch, sequence, hidden]."""

LOOK_EVERY = 0.1
"""Seconds between two looks of the monitor, and so the age of what a dead rank last said."""


class RankStage(nn.Module):
    """One stage of this rank, as a pipeline schedule wants it."""

    def __init__(self, number: int, part: nn.Module, config: PipelineConfig) -> None:
        super().__init__()
        self.number = number
        self.part = part
        self.config = config
        self.received: Mapping[str, Tensor] = {}

    def set_input_tensor(self, received: Mapping[str, Tensor]) -> None:
        """Take what arrived, by the module it comes from; called before each forward."""
        self.received = received

    def forward(self, *inputs: Tensor | None) -> Any:
        """Run the part."""
        return self.part(*inputs)


@frozen(kw_only=True)
class Job:
    """Everything that this rank needs to train.

    Attributes:
        plan: what all ranks do in a step.
        stages: this rank's stages, by their numbers in the graph of modules.
        modules: their parts by module, for what is done to parameters.
        groups: this rank's process groups in each of its modules.
        samples: those of the training.
        monitor: watches this rank's steps.
        control: what the monitors of all ranks say.
    """

    options: Options
    grids: Mapping[str, HyperCommGrid]
    communicator: MultiModulePipelineCommunicator
    plan: Plan
    stages: Mapping[int, RankStage]
    modules: Mapping[str, nn.ModuleList]
    groups: Mapping[str, ProcessGroupCollection]
    samples: Samples
    recorder: Recorder
    monitor: Monitor
    control: Control
    config: PipelineConfig
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return dtype_of(self.options)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the loss."""
        return self.communicator.graph.num_stages - 1 in self.stages

    @property
    def teller(self) -> int:
        """The rank that talks: the last one."""
        return dist.get_world_size() - 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that this rank trains."""
        for part in self.modules.values():
            yield from part.parameters()

    def train(self, *, training: bool) -> None:
        """Switch all parts to training, or to evaluation."""
        for part in self.modules.values():
            part.train(training)

    def forward(self, samples: Samples, microbatch: range, stage: RankStage, received: Mapping[str, Tensor]) -> Tensor:
        """One microbatch through a stage: this rank's share of it, whatever the schedule.

        ``received`` is what arrived, by the module it comes from.
        """
        module, index = self.communicator.graph.module_of(stage.number)
        mine = self._share(module, microbatch)
        if index > 0:
            x: Tensor = stage(received[module])
        elif module == IMAGES:
            x = stage(samples.strips(mine).to(self.device, self.dtype))
        elif module == SIGNAL:
            x = stage(samples.signals(mine).to(self.device, self.dtype))
        else:
            x = stage(joined(received, self.options.encoders), samples.inputs(mine).to(self.device))
        return x

    def loss(self, samples: Samples, microbatch: range, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`token_loss` of this rank's share of a microbatch."""
        return token_loss(logits, samples.targets(self._share(LANGUAGE, microbatch)).to(self.device))

    def _share(self, module: str, microbatch: range) -> range:
        share = replica_samples(len(microbatch), self.grids[module])
        return microbatch[share.start : share.stop]


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of cross entropies over the words that are there, and how many those are.

    Returns:
        ``(loss, num_tokens, info)``; ``info`` has both, the samples, how many of them were read exactly (see
        `exact`), and the logits.
    """
    loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD, reduction="sum")
    tokens = (targets != PAD).sum()
    read = logits.argmax(dim=-1)
    info = {
        "loss": loss.detach(),
        "tokens": tokens,
        "samples": torch.tensor(len(targets)),
        "exact": exact(read, targets).sum(),
        "logits": logits.detach(),
    }
    return loss, tokens, info


def dtype_of(options: Options) -> torch.dtype:
    """The dtype that the options name."""
    return {"float32": torch.float32, "float64": torch.float64}[options.dtype]


def build_job(options: Options, samples: Samples, device: torch.device, *, strict: bool = False) -> Job:
    """Make this rank's part of the job; all ranks call it together.

    With ``strict`` a send waits for its receive, as NCCL's may: for tests.
    """
    grids = options.place()
    rank, ranks, store = dist.get_rank(), range(dist.get_world_size()), _control_store(options)
    recorder = Recorder()
    monitor = Monitor(store, rank=rank, ranks=ranks, deadline=options.deadline, interval=LOOK_EVERY, device=device)
    config = PipelineConfig(
        pipeline_dtype=dtype_of(options),
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        hooks=(recorder,),
        deadline=options.deadline,
        monitor=monitor,
        strict=strict,
        staged=options.backend == "staged",
    )
    flow = {name: [destination for source, destination in options.graph if source == name] for name in grids}
    communicator = MultiModulePipelineCommunicator(
        dict(grids), flow, config, dim_mapping=AXES, stage_placement=options.stage_placement()
    )
    plan = step_plan(
        communicator.graph,
        options.microbatches,
        placement=communicator.positions.placement,
        collectives=communicator.collective_edges,
        schedule=options.schedule,
    )
    for grid in grids.values():
        grid.create_pgs(["tp", "dp"])
    stages: dict[int, RankStage] = {}
    modules: dict[str, nn.ModuleList] = {}
    for number in communicator.stages:
        module, index = communicator.graph.module_of(number)
        part = part_of(options, module, index).to(device, dtype_of(options))
        stages[number] = RankStage(number, part, config)
        modules.setdefault(module, nn.ModuleList()).append(part)
    return Job(
        options=options,
        grids=grids,
        communicator=communicator,
        plan=plan,
        stages=stages,
        modules=modules,
        groups={name: ProcessGroupCollection.from_grid(grids[name]) for name in modules},
        samples=samples,
        recorder=recorder,
        monitor=monitor,
        control=Control(store, rank, tuple(ranks)),
        config=config,
        device=device,
    )


def _control_store(options: Options) -> ControlStore:
    """The store for the ranks' positions: the launcher's, which outlives them, else torchrun's."""
    if options.control is None:
        return control_store(CONTROL)
    host, _, port = options.control.rpartition(":")
    timeout = timedelta(seconds=options.deadline)
    return PrefixStore(CONTROL, TCPStore(host, int(port), is_master=False, timeout=timeout))
