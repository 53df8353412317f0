"""One step of the job, by the step function of its schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from digit_reader.job import Job, RankStage
from digit_reader.samples import Samples
from pipegrid.schedules import get_forward_backward_func

Info = dict[str, Tensor]


def run_step(job: Job, samples: Samples, first: int, *, forward_only: bool = False) -> list[Info]:
    """One step through the pipeline, on the batch from sample ``first``.

    Returns:
        On a rank with the loss, the ``info`` of each microbatch's loss function.
    """
    graph, options = job.communicator.graph, job.options

    def forward_step(batches: Iterator[range], stage: RankStage) -> tuple[Any, Any]:
        microbatch = next(batches)
        output = job.forward(samples, microbatch, stage, stage.received)
        if stage.number == graph.num_stages - 1:
            return output, lambda logits: job.loss(samples, microbatch, logits)
        return {graph.module_of(stage.number)[0]: output}, None

    # By module: a rank may run several, and several stages of one.
    models: dict[str, list[RankStage]] = {}
    for number_of_stage, stage in job.stages.items():
        models.setdefault(graph.module_of(number_of_stage)[0], []).append(stage)
    batches = {
        name: [samples.microbatches(first, batch=options.batch, microbatches=options.microbatches) for _ in stages]
        for name, stages in models.items()
    }
    return get_forward_backward_func(schedule=options.schedule)(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=models,
        num_microbatches=options.microbatches,
        forward_only=forward_only,
        p2p_communicator=job.communicator,
        pg_collection=job.groups,
    )
