"""One step of the job: by the step function where that has the schedule, else by a plan for the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from digit_reader.job import Job, RankStage
from digit_reader.samples import Samples
from digit_reader.schedule import ANY_GRAPH
from pipegrid.schedules import (
    Forwarded,
    PipelineRuntime,
    forward_backward_pipelining_without_interleaving,
    reduce_gradients,
)
from pipegrid.transport.edge import Edge

Info = dict[str, Tensor]


def run_step(job: Job, samples: Samples, number: int, *, forward_only: bool = False) -> list[Info]:
    """One step through the pipeline; on a rank with the loss, what each microbatch's loss function told."""
    step = _by_step_function if has_step_function(job) else _by_plan
    return step(job, samples, number, forward_only=forward_only)


def has_step_function(job: Job) -> bool:
    """Whether the schedule is 1F1B with one stage of a module on a rank."""
    return job.options.schedule == ANY_GRAPH and job.options.vpp == 1


def _by_step_function(job: Job, samples: Samples, number: int, *, forward_only: bool) -> list[Info]:
    graph, options = job.communicator.graph, job.options

    def forward_step(batches: Iterator[range], stage: RankStage) -> tuple[Any, Any]:
        microbatch = next(batches)
        output = job.forward(samples, microbatch, stage, stage.received)
        if stage.number == graph.num_stages - 1:
            return output, lambda logits: job.loss(samples, microbatch, logits)
        return {graph.module_of(stage.number)[0]: output}, None

    # By module: a rank may run several.
    models = {graph.module_of(stage)[0]: model for stage, model in job.stages.items()}
    batches = {
        name: samples.microbatches(number, batch=options.batch, microbatches=options.microbatches) for name in models
    }
    return forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=models,
        num_microbatches=options.microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=job.communicator,
        pg_collection=job.groups,
    )


@define
class PlannedStage:
    """A stage as the runtime wants it. ``infos`` and ``tokens`` are what the losses told, on a stage that has them."""

    job: Job
    stage: RankStage
    samples: Samples
    microbatches: list[range]
    forward_only: bool
    infos: list[Info] = field(factory=list)
    tokens: Tensor = field(factory=lambda: torch.zeros((), dtype=torch.int64))

    @property
    def model(self) -> torch.nn.Module:
        """The part of the model, for the names in errors."""
        return self.stage.part

    def forward(self, microbatch: int, inputs: Mapping[Edge, Tensor]) -> Forwarded:
        """See `pipegrid.schedules.Stage`."""
        graph, job, indices = self.job.communicator.graph, self.job, self.microbatches[microbatch]
        received = {graph.module_of(edge.source)[0]: tensor for edge, tensor in inputs.items()}
        output = job.forward(self.samples, indices, self.stage, received)
        outgoing = [edge for edge in graph.stage_edges if edge.source == self.stage.number]
        if outgoing:
            return Forwarded(dict.fromkeys(outgoing, output))
        loss, tokens, info = job.loss(self.samples, indices, output)
        self.infos.append(info)
        self.tokens = self.tokens.to(tokens.device) + tokens
        return Forwarded({}, None if self.forward_only else loss)


def _by_plan(job: Job, samples: Samples, number: int, *, forward_only: bool) -> list[Info]:
    options = job.options
    microbatches = list(samples.microbatches(number, batch=options.batch, microbatches=options.microbatches))
    stages = {n: PlannedStage(job, stage, samples, microbatches, forward_only) for n, stage in job.stages.items()}
    runtime = PipelineRuntime(
        job.plan,
        stages,
        job.communicator,
        hooks=job.config.hooks,
        deallocate_outputs=job.config.deallocate_pipeline_outputs,
        deadline=job.config.deadline,
        monitor=job.monitor,
    )
    if forward_only:
        runtime.eval()
    else:
        runtime.step()
        # The losses are sums over words, so the gradients of all modules are divided by how many there were.
        tokens = sum((stage.tokens for stage in stages.values()), torch.zeros((), dtype=torch.int64))
        reduce_gradients(job.modules, job.groups, num_tokens=tokens, deadline=job.config.deadline)
    return [info for stage in stages.values() for info in stage.infos]
