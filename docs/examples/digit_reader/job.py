"""What one rank of the job holds: its module's stage, its groups, its way to the other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from digit_reader.decoding import exact
from digit_reader.encoder import ImageEncoder
from digit_reader.language import LanguageStage
from digit_reader.options import Options
from digit_reader.samples import Samples
from digit_reader.sizes import Sizes
from digit_reader.vocabulary import PAD
from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.bridges.graph import ModuleGraph
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import PipelineConfig, Recorder
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, RankRole, lane_samples

AXES = {"b": 0, "s": 1, "h": 2}
"""What crosses between modules is [batch, sequence, hidden]."""


class RankStage(nn.Module):
    """This rank's part of the model, as a pipeline schedule wants it."""

    def __init__(self, part: nn.Module, config: PipelineConfig) -> None:
        super().__init__()
        self.part = part
        self.config = config
        self.received: Mapping[str, Tensor] = {}

    def set_input_tensor(self, received: Mapping[str, Tensor]) -> None:
        """Take what arrived, by the module it comes from; called before each forward."""
        self.received = received

    def forward(self, *inputs: Tensor | None) -> Any:
        """Run the part."""
        return self.part(*inputs)


@frozen
class Job:
    """Everything that this rank needs to train. ``samples`` is its lane's share of every microbatch."""

    options: Options
    grids: Mapping[str, HyperCommGrid]
    graph: ModuleGraph
    module: str
    role: RankRole
    groups: ProcessGroupCollection
    communicator: MultiModulePipelineCommunicator
    stage: RankStage
    samples: Samples
    recorder: Recorder
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return dtype_of(self.options)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the loss."""
        return self.role.reads_labels

    def forward_step(self, samples: Samples, batches: Iterator[range], stage: RankStage) -> tuple[Any, Any]:
        """One microbatch through this rank's part: what it hands on, and its loss function."""
        microbatch = next(batches)
        share = lane_samples(len(microbatch), self.grids[self.module])
        mine = microbatch[share.start : share.stop]
        if self.module == "images":
            strips = samples.strips(mine).to(self.device, self.dtype)
            return {"images": stage(strips)}, None
        (x,) = stage.received.values()
        text = samples.inputs(mine).to(self.device) if self.role.is_first_stage("language") else None
        x = stage(x, text)
        if not self.is_last:
            return {"language": x}, None
        targets = samples.targets(mine).to(self.device)
        return x, lambda logits: token_loss(logits, targets)


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


def layer_names(layout: PipelineParallelLayerLayout, pp_rank: int) -> list[str]:
    """The layers of a stage by their names in the whole model: ``decoder_3``."""
    names = []
    counts: dict[str, int] = {}
    for kind in layout.layout[pp_rank][0]:
        ids = layout.get_layer_id_list(kind, vp_stage=0, pp_rank=pp_rank)
        names.append(f"{kind}_{ids[counts.get(kind, 0)]}")
        counts[kind] = counts.get(kind, 0) + 1
    return names


def build_job(options: Options, samples: Samples, device: torch.device) -> Job:
    """Make this rank's part of the job; all ranks call it together."""
    grids = options.place()
    graph = options.modules()
    role = RankRole.from_grid_map(dict(grids), ["images"])
    (module,) = role.modules
    recorder = Recorder()
    config = PipelineConfig(
        pipeline_dtype=dtype_of(options),
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        hooks=(recorder,),
        deadline=60.0,
    )
    communicator = MultiModulePipelineCommunicator(
        dict(grids), {"images": ["language"], "language": []}, config, dim_mapping=AXES
    )
    for grid in grids.values():
        grid.create_pgs(["tp", "dp"])
    groups = ProcessGroupCollection.from_grid(grids[module])
    if module == "images":
        part: nn.Module = ImageEncoder(Sizes(), seed=options.seed)
    else:
        pp_rank = grids[module].coords(dist.get_rank())["pp"]
        part = LanguageStage(layer_names(options.stages(), pp_rank), Sizes(), seed=options.seed)
    stage = RankStage(part.to(device, dtype_of(options)), config)
    return Job(options, grids, graph, module, role, groups, communicator, stage, samples, recorder, device)
