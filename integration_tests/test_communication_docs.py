"""The code on the pages about lanes, bridges and tests on ranks runs as it is written.

What the pages leave to the reader, such as ``step``, is given here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.bridges.errors import ShapeError
from pipegrid.monitor import JobFailedError
from pipegrid.plans import Direction, fewest_communicators, zero_bubble_v
from pipegrid.schedules import (
    Monitor,
    PipelineConfig,
    PipelineRuntime,
    lower,
    verify,
)
from pipegrid.topology import HyperCommGrid, control_store
from pipegrid.training import Pipeline
from pipegrid.transport import LaneSpec, P2PCommunicator, P2PConfig, open_lanes

from .kit.grids import grids_of
from .kit.programs import blocks
from .kit.stages import Scale, Stage

CONCEPTS = Path(__file__).parents[1] / "docs" / "concepts"
TEXTS = {name: (CONCEPTS / f"{name}.md").read_text(encoding="utf-8") for name in ("transport", "bridges", "testing")}
CODE = {name: blocks(text) for name, text in TEXTS.items()}
CONFIG = P2PConfig(pipeline_dtype=torch.float32, deadline=30.0, open_deadline=30.0)


def run(page, number, **names):
    """The names that a block of a page defines, with those that it is given."""
    exec(compile(CODE[page][number], f"{page}.md", "exec"), names)
    return names


def test_every_block_is_run_here():
    assert {name: len(code) for name, code in CODE.items()} == {"transport": 2, "bridges": 3, "testing": 4}
    assert set(FROM_PAGE) < set(globals())


def stage_of(graph, number):
    """A parameter times what arrives, in float32; the last stage has the loss."""
    return Stage(graph, number, Scale(2.0), data=lambda microbatch: torch.ones(2, 3), loss=lambda y: y.mean())


# Lanes


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_lanes_carry_both_ways(ranks):
    with run("transport", 0)["lanes"] as lanes:
        there, back = (lanes[spec] for spec in (LaneSpec(0, 1, "activations"), LaneSpec(1, 0, "gradients")))
        out, into = (there, back) if ranks.rank == 0 else (back, there)
        handle = out.isend(torch.full((2,), float(ranks.rank), device=ranks.device))
        assert into.irecv().result().tolist() == [1.0 - ranks.rank] * 2
        handle.wait()


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_a_step_runs_on_the_fewest_communicators(ranks):
    found = run(
        "transport",
        1,
        **{each.__name__: each for each in (lower, zero_bubble_v, fewest_communicators, P2PConfig, P2PCommunicator)},
        pp_group=dist.group.WORLD,
        torch=torch,
    )
    plan, pipe = found["plan"], found["pipe"]
    assert str(found["communicators"]).startswith("1 per rank, the fewest")
    stages = {
        number: Stage(
            plan.graph,
            number,
            Scale(1.0, dtype=torch.bfloat16, device=ranks.device),
            data=lambda microbatch: torch.ones(2, 3, dtype=torch.bfloat16, device=ranks.device),
            loss=lambda y: y.mean(),
        )
        for number in plan.stages_at[ranks.rank]
    }
    PipelineRuntime(plan, stages, pipe).step()
    pipe.close()
    assert [stage.model.weight.grad.item() for stage in stages.values()] == [plan.num_microbatches] * 2


# Bridges


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_a_tree_travels_as_it_is_declared(ranks):
    edge = run("bridges", 0)["edge"]
    assert isinstance(edge, EdgeOptions)
    grids = grids_of({"vision": (0, {"dp": 1}), "language": (1, {"dp": 1})})
    communicator = MultiModulePipelineCommunicator(
        grids, {"vision": ["language"]}, CONFIG, edges={("vision", "language"): edge}
    )
    (along,) = communicator.graph.stage_edges
    sent = {
        "features": torch.ones(1, 2, 3),
        "deepstack": [torch.full((1, 2, 3), float(number)) for number in range(3)],
        "grid": torch.tensor([[1, 4, 4]]),
        "scale": 0.5,
    }
    way = {"edge": along, "direction": Direction.FORWARD}
    if ranks.rank == 0:
        (said,) = re.findall(r'"bridge vision>language: (payload .*?) \{', " ".join(TEXTS["bridges"].split()))
        with pytest.raises(ShapeError, match=re.escape(said)):
            communicator.isend({"features": sent["features"]}, **way)
        communicator.isend(sent, **way).wait()
    else:
        arrived = communicator.irecv(**way).result()
        assert [*arrived] == [*sent]
        assert [one.mean().item() for one in arrived["deepstack"]] == [0.0, 1.0, 2.0]
        assert (arrived["grid"].tolist(), arrived["scale"]) == ([[1, 4, 4]], 0.5)
    ranks.barrier()
    communicator.destroy()


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_modules_on_the_same_ranks_have_collectives_that_are_proved(ranks):
    grids = grids_of({"encoder": (0, {"dp": 4}), "language": (0, {"dp": 2, "pp": 2})})
    communicator = MultiModulePipelineCommunicator(grids, {"encoder": ["language"]}, CONFIG)
    plan = run("bridges", 1, communicator=communicator)["plan"]
    ranks.barrier()
    communicator.destroy()
    proof = verify(plan)
    assert proof.num_actions > 0
    assert communicator.collective_edges
    for position in range(plan.num_positions):
        assert any(action.kind == "COLLECTIVE" for action in plan.actions(position))


@pytest.mark.thorough
@pytest.mark.ranks(3)
def test_a_ring_of_different_tensor_parallel_sizes_runs(ranks):
    found = run("bridges", 2, config=CONFIG, stage_of=stage_of)
    for stage in found["stages"].values():
        assert stage.model.weight.grad.item() != 0
    assert sorted(found["stages"]) == ([0, 2] if ranks.rank == 0 else [1])
    ranks.barrier()
    found["comm"].destroy()


# Tests on ranks: the page's own, with their marks


def exchange(lanes):
    """A message there."""
    (lane,) = lanes.values()
    (lane.isend(torch.ones(3)) if dist.get_rank() == lane.spec.source else lane.irecv()).wait()


def send_to_rank_0(*, before, timeout):
    """A message of rank 1, which rank 0 awaits for ``timeout`` seconds."""
    spec = LaneSpec(1, 0)
    with open_lanes([spec], config=P2PConfig(deadline=timeout, open_deadline=30.0)) as lanes:
        if dist.get_rank() == 1:
            before("SEND 0")
            lanes[spec].isend(torch.ones(3)).wait()
        else:
            lanes[spec].irecv().wait()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square()


class Steps:
    """Steps of a watched pipeline; made at the first one."""

    pipeline = None

    def __call__(self):
        if self.pipeline is None:
            self.pipeline = Pipeline(
                Model,
                "t|t",
                HyperCommGrid([2, 2], ["dp", "pp"]),
                config=PipelineConfig(deadline=5.0),
                num_microbatches=2,
                loss=lambda squares, _: squares.mean(),
                monitor=Monitor(control_store("page"), rank=dist.get_rank(), ranks=range(4), deadline=5.0),
            )
        self.pipeline.step({"x": torch.ones(4, 8)})


def from_page(number, **names):
    found = run("testing", number, pytest=pytest, torch=torch, dist=dist, **names)
    return {name: value for name, value in found.items() if name.startswith("test_")}


FROM_PAGE = {
    **from_page(0),
    **from_page(1, open_lanes=open_lanes, specs=[LaneSpec(0, 1)], step=exchange),
    **from_page(2, step=send_to_rank_0),
    **from_page(3, JobFailedError=JobFailedError, step=Steps()),
}
globals().update({name: pytest.mark.thorough(one) for name, one in FROM_PAGE.items()})
