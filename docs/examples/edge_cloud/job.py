"""One rank of the job: its place in the U, its layers, and one step through a plan over the link."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from digit_reader.samples import Samples
from digit_reader.strips import Split, load_scans
from edge_cloud.link import Link, SlowLink
from edge_cloud.reader import LAYOUT, TP_SIZES, ReaderStage, stage_module
from pipegrid.bridges import ModuleGraph, VTPCommunicator, VTPTopology
from pipegrid.schedules import Costs, PipelineRuntime, Plan, Recorder, lower, multi_module_1f1b, u_shape, verify
from pipegrid.topology import GroupSpec, create_groups
from pipegrid.transport import P2PConfig, PipelineCommunicator


@frozen(kw_only=True)
class Job:
    """What a rank keeps from step to step.

    Attributes:
        communicator: to the other side, without the link.
        over_link: the same behind the link.
        modules: this rank's layers by plan stage.
        samples: strips and words; None in the cloud, which has neither.
    """

    communicator: VTPCommunicator
    over_link: SlowLink
    modules: Mapping[int, nn.ModuleDict]
    samples: Samples | None

    @property
    def is_edge(self) -> bool:
        """Whether this rank is at the edge."""
        return self.communicator.stage == 0

    def stages(self, microbatches: Sequence[range]) -> dict[int, ReaderStage]:
        """This rank's stages for one step."""
        edges = {edge.source: edge for edge in self.communicator.graph.stage_edges}
        return {
            stage: ReaderStage(stage, module, self.samples, microbatches, edges.get(stage))
            for stage, module in self.modules.items()
        }

    def step(
        self, plan: Plan, microbatches: Sequence[range], *, recorder: Recorder | None = None
    ) -> tuple[float, float]:
        """Run a plan once, from a barrier to a barrier.

        Returns:
            The step's loss (0 in the cloud), and seconds.
        """
        stages = self.stages(microbatches)
        # Of the protocol, a runtime uses isend, irecv, batch and abort.
        communicator = cast("PipelineCommunicator", self.over_link)
        runtime = PipelineRuntime(plan, stages, communicator, hooks=() if recorder is None else (recorder,))
        dist.barrier()
        since = time.perf_counter()
        if recorder is not None:
            recorder.start()
        runtime.step()
        dist.barrier()
        losses = [float(loss) for stage in stages.values() for loss in stage.losses]
        return sum(losses), time.perf_counter() - since

    def close(self) -> None:
        """End the link and the lanes."""
        self.over_link.close()
        self.communicator.close()


def open_job(*, seed: int = 0, dtype: torch.dtype = torch.float32, link: Link | None = None) -> Job:
    """Make this rank's part of the job; all three ranks call it together."""
    topology = VTPTopology(TP_SIZES, ring=True, layout=LAYOUT)
    communicator = VTPCommunicator(topology, P2PConfig(pipeline_dtype=dtype, deadline=60.0, open_deadline=60.0))
    cloud = GroupSpec(topology.stage_ranks[1], "cloud/tp")
    group = create_groups([cloud]).get(cloud)
    return Job(
        communicator=communicator,
        over_link=SlowLink(communicator, link),
        modules={stage: stage_module(stage, seed=seed, dtype=dtype, group=group) for stage in communicator.stages},
        samples=Samples(Split.TRAIN, seed, load_scans(Split.TRAIN)) if communicator.stage == 0 else None,
    )


def plans(microbatches: int, costs: Costs) -> dict[str, Plan]:
    """The U with as much under way as hides the link, and plain 1F1B over the same stages."""
    topology = VTPTopology(TP_SIZES, ring=True)
    chain = ModuleGraph({"model": topology.num_plan_stages})
    made = {
        "1f1b": multi_module_1f1b(chain, microbatches, placement=topology.placement),
        "u_shape": u_shape(topology.num_stages, microbatches, costs=costs),
    }
    lowered = {name: lower(plan) for name, plan in made.items()}
    for plan in lowered.values():
        verify(plan)
    return lowered
