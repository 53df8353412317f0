"""A graph of modules on grids of their own, trained by the runtime, against the same graph in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import ActionKind, Costs, PipelineRuntime, greedy, lower, multi_module_1f1b, verify
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PConfig

from .kit.data import normal
from .kit.grids import grids_of
from .kit.stages import Scale, Stage, in_one_process

MICROBATCHES, STEPS = 6, 3

# name -> (ranks, offset and dims of each module's grid, which module feeds which[, places of virtual stages])
JOBS = {
    "encoder dp 2, language dp 1": (4, {"enc": (0, {"dp": 2}), "llm": (2, {"pp": 2})}, {"enc": ["llm"]}),
    "encoder dp 1, language dp 2": (3, {"enc": (0, {"dp": 1}), "llm": (1, {"dp": 2})}, {"enc": ["llm"]}),
    "encoder dp 4, language dp 2": (6, {"enc": (0, {"dp": 4}), "llm": (4, {"dp": 2})}, {"enc": ["llm"]}),
    "two encoders of unequal depth": (
        7,
        {"image": (0, {"pp": 2}), "audio": (2, {"dp": 1}), "llm": (3, {"tp": 2, "pp": 2})},
        {"image": ["llm"], "audio": ["llm"]},
    ),
    "one module with two destinations": (
        5,
        {"enc": (0, {"dp": 2}), "one": (2, {"dp": 1}), "two": (3, {"dp": 2})},
        {"enc": ["one", "two"]},
    ),
    "a diamond with a skip edge": (
        6,
        {"enc": (0, {"dp": 2}), "mid": (2, {"pp": 2}), "llm": (4, {"dp": 2})},
        {"enc": ["mid", "llm"], "mid": ["llm"]},
    ),
    "encoder, language, generator": (
        5,
        {"enc": (0, {"dp": 2}), "llm": (2, {"pp": 2}), "gen": (4, {"dp": 1})},
        {"enc": ["llm"], "llm": ["gen"]},
    ),
    "an encoder colocated with a pipelined language model": (
        2,
        {"enc": (0, {"dp": 2}), "llm": (0, {"pp": 2})},
        {"enc": ["llm"]},
    ),
    "a colocated encoder whose copies lie on both positions": (
        4,
        {"enc": (0, {"tp": 2, "dp": 2}), "llm": (0, {"dp": 2, "pp": 2})},
        {"enc": ["llm"]},
    ),
    "a colocated encoder that feeds a generator elsewhere, too": (
        5,
        {"enc": (0, {"tp": 2}), "aud": (2, {"dp": 1}), "llm": (0, {"pp": 2}), "gen": (3, {"dp": 2})},
        {"enc": ["llm", "gen"], "aud": ["llm"], "llm": ["gen"]},
    ),
    "two layouts of one position": (
        2,
        {"enc": (0, {"dp": 2}), "llm": (0, {"tp": 2})},
        {"enc": ["llm"]},
    ),
    "an encoder on some of the language model's ranks": (
        4,
        {"enc": (0, {"dp": 2}), "llm": (1, {"dp": 3})},
        {"enc": ["llm"]},
    ),
    "virtual stages inside the language model": (
        6,
        {"image": (0, {"dp": 2}), "audio": (2, {"dp": 1}), "llm": (3, {"pp": 2}), "gen": (5, {"dp": 1})},
        {"image": ["llm"], "audio": ["llm"], "llm": ["gen"]},
        {"llm": (0, 1, 0, 1)},
    ),
    "virtual stages placed as a V": (
        4,
        {"enc": (0, {"dp": 2}), "llm": (2, {"pp": 2})},
        {"enc": ["llm"]},
        {"llm": (0, 1, 1, 0)},
    ),
    "virtual stages under a colocated encoder": (
        4,
        {"enc": (0, {"dp": 4}), "llm": (0, {"dp": 2, "pp": 2})},
        {"enc": ["llm"]},
        {"llm": (0, 1, 0, 1)},
    ),
}


def stage_of(graph, number, batch, device):
    """The sum of its inputs times one parameter; ``batch(microbatch, module)``: the data of a source."""
    name, _ = graph.module_of(number)
    return Stage(
        graph,
        number,
        Scale(1.0 + 0.1 * number, dtype=torch.float64, device=device),
        data=partial(batch, name=name),
        loss=lambda y: y.square().sum() / MICROBATCHES,
    )


def descend(stage, gradient):
    weight = stage.model.weight
    with torch.no_grad():
        weight -= 1e-4 * gradient
    weight.grad = None


def whole_batch(microbatch, name, device):
    return normal(100 * microbatch + sum(map(ord, name)), 4, 2, 3, device=device)


def of_one_process(graph, device):
    """The weights of all stages after the steps."""
    batch = partial(whole_batch, device=device)
    stages = [stage_of(graph, number, batch, device) for number in range(graph.num_stages)]
    for _ in range(STEPS):
        in_one_process(stages, MICROBATCHES)
        for stage in stages:
            descend(stage, stage.model.weight.grad)
    return [stage.model.weight.item() for stage in stages]


# Where stages share ranks, a wait in the wrong place shows in strict mode; without it these run nightly.
SHARED = [
    name for name, job in JOBS.items() if len(job) > 3 or len({offset for offset, _ in job[1].values()}) < len(job[1])
]


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("job", "strict"),
    [
        pytest.param(
            name,
            strict,
            marks=[pytest.mark.ranks(job[0])] + [pytest.mark.nightly] * (name in SHARED and not strict),
        )
        for name, job in JOBS.items()
        for strict in (False, True)
    ],
)
def test_weights_after_three_steps_are_those_of_one_process(ranks, job, strict):
    _, places, flow, *chunks = JOBS[job]
    grids = grids_of(places)
    staged = ranks.backend == "staged"
    config = P2PConfig(deadline=30.0, open_deadline=30.0, strict=strict, staged=staged)
    comm = MultiModulePipelineCommunicator(
        grids,
        {name: flow.get(name, []) for name in grids},
        config,
        stage_placement=chunks[0] if chunks else None,
    )
    plan = lower(
        multi_module_1f1b(comm.graph, MICROBATCHES, placement=comm.positions.placement),
        collectives={edge: f"bridge-{edge.source}-{edge.destination}" for edge in comm.collective_edges},
    )
    verify(plan)
    verify(plan, lanes="shared")

    def lane_of(name):
        return grids[name].coords(comm.rank).get("dp", 0)

    def share(microbatch, name):
        return whole_batch(microbatch, name, ranks.device).chunk(places[name][1].get("dp", 1), 0)[lane_of(name)]

    stages = {number: stage_of(comm.graph, number, share, ranks.device) for number in comm.stages}
    runtime = PipelineRuntime(plan, stages, comm)
    runtime.eval()
    for _ in range(STEPS):
        runtime.step()
        every = [None] * dist.get_world_size()
        mine = {
            (number, lane_of(comm.graph.module_of(number)[0])): stage.model.weight.grad.item()
            for number, stage in stages.items()
        }
        dist.all_gather_object(every, mine)
        # One gradient per replica (tp copies hold the same one); their sum is the stage's.
        by_lane = {key: gradient for held in every for key, gradient in held.items()}
        for number, stage in stages.items():
            descend(stage, sum(gradient for (s, _), gradient in by_lane.items() if s == number))
    expected = of_one_process(comm.graph, ranks.device)
    for number, stage in stages.items():
        assert stage.model.weight.item() == pytest.approx(expected[number], rel=1e-12)
    comm.destroy()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("places", [(0, 1, 0, 1), (0, 1, 1, 0)], ids=["round and round", "down and back up"])
def test_chunks_inside_of_a_module_with_backwards_in_halves(ranks, places, strict):
    grids = {"enc": HyperCommGrid([1], ["dp"]), "llm": HyperCommGrid([2], ["pp"], rank_offset=1)}
    staged = ranks.backend == "staged"
    config = P2PConfig(deadline=30.0, open_deadline=30.0, strict=strict, staged=staged)
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": []}, config, stage_placement={"llm": places})
    plan = lower(
        greedy(
            Costs(F=1, I=1.2, W=0.7, latency=0.1),
            num_positions=3,
            num_microbatches=MICROBATCHES,
            graph=comm.graph,
            placement=[0, *(1 + place for place in places)],
        )
    )
    assert any(action.kind is ActionKind.W for action in plan.actions(comm.rank))
    batch = partial(whole_batch, device=ranks.device)
    stages = {number: stage_of(comm.graph, number, batch, ranks.device) for number in comm.stages}
    runtime = PipelineRuntime(plan, stages, comm)
    for _ in range(STEPS):
        runtime.step()
        for stage in stages.values():
            descend(stage, stage.model.weight.grad)
    expected = of_one_process(comm.graph, ranks.device)
    for number, stage in stages.items():
        assert stage.model.weight.item() == pytest.approx(expected[number], rel=1e-12)
    comm.destroy()
