"""Errors of the packages, really raised: the messages of docs/troubleshooting.md that one process alone can give."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from pipegrid.bridges import EdgeOptions
from pipegrid.checkpoint import export_safetensors
from pipegrid.core.graph import ModuleGraph
from pipegrid.layout import LayerMemory, PipelineParallelLayerLayout, balance
from pipegrid.monitor import Epochs
from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network, plan
from pipegrid.plans.generators import one_f_one_b
from pipegrid.schedules import Costs, from_text, simulate, timeline, verify
from pipegrid.testing import Fault
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Names, Pipeline, Sampling, pipeline_stage
from pipegrid.transport import P2PConfig

_CROSSED = """
0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def _job(flops: float) -> Job:
    layers: Any = [Layers("decoder", count=4, flops=flops, activations=1e9, parameters=1e9)]
    modules: Any = [ModuleCosts("language", layers, message=1e6)]
    return Job(modules, 8, Device(flops=1e14), Network(inside=1e11, between=1e10))


def _grid() -> HyperCommGrid:
    return HyperCommGrid([2], ["pp"], world_size=2)


_TIMES: dict[str, Any] = {"embedding": 1.0, "decoder": [1.0] * 4, "loss": 1.0}


def _lost() -> None:
    """A member is lost: the epoch ends once this rank's heartbeat has seen it."""
    epochs = Epochs(dist.HashStore(), rank=0, ranks=[0, 1])  # type: ignore[attr-defined]  # public, untyped
    try:
        epochs.lost(1, "nothing was heard of it for 5 s")
        for _ in range(1000):
            epochs.check("step 7")
            time.sleep(0.01)
    finally:
        epochs.close()


_NO_SOURCE: Any = "1f1b"

EXAMPLES: dict[str, Callable[[], Any]] = {
    "BridgeError": lambda: EdgeOptions(payload={}),
    "CorruptCheckpointError": lambda: export_safetensors("no_such_folder/run", "out"),
    "CostsError": lambda: simulate(one_f_one_b(2, 4), Costs(F=(1.0, 1.0, 1.0))),
    "CutError": lambda: pipeline_stage(_Blocks(), "tt|ttt", 0, names=Names("blocks")),
    "FaultError": lambda: Fault("kill", rank=0),
    "GenerationError": lambda: Sampling(temperature=-1.0),
    "GridError": lambda: HyperCommGrid([2, 2], ["dp"]),
    "GridKeyError": lambda: HyperCommGrid([2], ["dp"], world_size=2).get_pg(["dp"]),
    "JobError": lambda: _job(flops=-1.0),
    "LayoutError": lambda: PipelineParallelLayerLayout("Ett|tt|L", 2),
    "LayoutInfeasibleError": lambda: balance(_TIMES, 2, memory=dict.fromkeys(_TIMES, LayerMemory(fixed=9)), limit=10),
    "LayoutSyntaxError": lambda: PipelineParallelLayerLayout("Ett|txL", 2),
    "ModuleGraphError": lambda: ModuleGraph({"language": 2}, {"vision": ["language"]}),
    "NoFitError": lambda: plan(_job(flops=1e12), gpus=1, memory="1GB"),
    "P2PUsageError": lambda: P2PConfig(deadline=-1.0),
    "PlanError": lambda: verify(from_text(_CROSSED)),
    "PlanSyntaxError": lambda: from_text("0: 0F0 0X0"),
    "RankLostError": _lost,
    "StepArgumentError": lambda: Pipeline(_Blocks, "tt|tt", _grid(), microbatch_size=1, num_microbatches=2),
    "TimelineError": lambda: timeline(_NO_SOURCE),
    "WorldError": lambda: HyperCommGrid([2], ["dp"]).is_current_rank_in_grid(),
}


def messages() -> dict[str, str]:
    """The message of each example, by the name of its class; raises where another error comes, or none."""
    found = {}
    for name, example in EXAMPLES.items():
        try:
            example()
        except Exception as error:
            if type(error).__name__ != name:
                raise
            found[name] = str(error)
        else:
            text = f"the example of {name} raises nothing"
            raise ValueError(text)
    return found
