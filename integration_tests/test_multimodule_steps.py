"""Graphs of modules on grids of their own, trained by the step function: after three steps, one process's weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attrs import field, frozen
from torch import nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.schedules import step_plan, verify
from pipegrid.topology import ProcessGroupCollection

from .kit.data import coins, normal
from .kit.grids import grids_of
from .kit.models import Model, call, config_for, counted_loss

STEPS, MICROBATCHES, BATCH, LENGTH, WIDTH = 3, 5, 4, 2, 5


@frozen
class Job:
    """``places`` has the offset and the dims of each module's grid, ``flow`` the modules that each module feeds.

    ``frozen`` modules have no backward; ``images`` says how many rows each replica of a source has, by microbatch.
    """

    ranks: int
    places: dict
    flow: dict
    frozen: tuple[str, ...] = ()
    images: tuple[tuple[int, ...], ...] = field(default=())


JOBS = {
    "two encoders of unequal depth": Job(
        7,
        {"image": (0, {"pp": 2}), "audio": (2, {}), "llm": (3, {"tp": 2, "pp": 2})},
        {"image": ["llm"], "audio": ["llm"]},
    ),
    "one module with two destinations": Job(
        5, {"enc": (0, {}), "one": (1, {"dp": 2}), "two": (3, {"dp": 2})}, {"enc": ["one", "two"]}
    ),
    "a skip edge": Job(
        4,
        {"enc": (0, {}), "llm": (1, {"pp": 2}), "gen": (3, {})},
        {"enc": ["llm", "gen"], "llm": ["gen"]},
    ),
    "a diamond": Job(
        6,
        {"enc": (0, {"dp": 2}), "one": (2, {"pp": 2}), "two": (4, {}), "llm": (5, {})},
        {"enc": ["one", "two"], "one": ["llm"], "two": ["llm"]},
    ),
    "encoder, language, generator": Job(
        5,
        {"enc": (0, {"dp": 2}), "llm": (2, {"pp": 2}), "gen": (4, {})},
        {"enc": ["llm"], "llm": ["gen"]},
    ),
    "encoder dp 4, language dp 2": Job(6, {"enc": (0, {"dp": 4}), "llm": (4, {"dp": 2})}, {"enc": ["llm"]}),
    "encoder dp 2, language dp 4": Job(6, {"enc": (0, {"dp": 2}), "llm": (2, {"dp": 4})}, {"enc": ["llm"]}),
    "a colocated encoder": Job(2, {"enc": (0, {"dp": 2}), "llm": (0, {"pp": 2})}, {"enc": ["llm"]}),
    "a colocated encoder with copies": Job(
        4, {"enc": (0, {"tp": 2, "dp": 2}), "llm": (0, {"dp": 2, "pp": 2})}, {"enc": ["llm"]}
    ),
    "colocated and separate modules": Job(
        5,
        {"image": (0, {"tp": 2}), "audio": (2, {}), "llm": (0, {"pp": 2}), "gen": (3, {"dp": 2})},
        {"image": ["llm", "gen"], "audio": ["llm"], "llm": ["gen"]},
    ),
    "a frozen encoder": Job(4, {"enc": (0, {"pp": 2}), "llm": (2, {"pp": 2})}, {"enc": ["llm"]}, frozen=("enc",)),
    "a frozen colocated encoder": Job(
        2, {"enc": (0, {"dp": 2}), "llm": (0, {"pp": 2})}, {"enc": ["llm"]}, frozen=("enc",)
    ),
    "microbatches without images": Job(
        4,
        {"image": (0, {"dp": 2}), "llm": (2, {"pp": 2})},
        {"image": ["llm"]},
        images=((2, 1), (0, 0), (0, 3), (1, 0), (0, 0)),
    ),
}


class Stage(Model):
    """A layer over the sum of what arrives; where there are images, the language model has data of its own."""

    def __init__(self, number, device, config=None):
        super().__init__(config)
        self.number = number
        self.weight = nn.Parameter(normal(number, WIDTH, WIDTH, device=device))

    def forward(self, arrived):
        # As many images as there happen to be join every sample.
        rows = len(arrived[0])
        x = sum(part if len(part) == rows else part.sum(0, keepdim=True) for part in arrived)
        return torch.tanh(x @ self.weight)


def data(step, microbatch, name, device, rows=BATCH):
    return normal(1000 * step + 10 * microbatch + len(name), rows, LENGTH, WIDTH, device=device)


def tokens(step, microbatch, device):
    """Which tokens count: more in some microbatches and lanes than in others."""
    return coins(5000 + 100 * step + microbatch, BATCH, LENGTH, device=device)


def descend(parameters):
    """An optimizer that shows a wrong factor of a gradient, as Adam would not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_one_process(job, graph, device, *, per_token):
    """The weights of all stages after the steps."""
    stages = [Stage(number, device) for number in range(graph.num_stages)]
    for number, stage in enumerate(stages):
        stage.requires_grad_(graph.module_of(number)[0] not in job.frozen)
    optimizer = descend([stage.weight for stage in stages if stage.weight.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        losses, total = [], MICROBATCHES
        if per_token:
            total = len(graph.sinks) * sum(tokens(step, m, device).sum() for m in range(MICROBATCHES))
        for m in range(MICROBATCHES):
            made = {}
            for number, stage in enumerate(stages):
                arrived = [made[edge.source] for edge in graph.stage_edges if edge.destination == number]
                made[number] = stage([*own_data(job, graph, number, step, m, device), *arrived])
            ends = [made[graph.stage(name, -1)] for name in graph.sinks]
            losses += [counted_loss(end, tokens(step, m, device), per_token=per_token)[0] for end in ends]
        (sum(losses) / total).backward()
        optimizer.step()
    return [stage.weight.detach() for stage in stages]


def own_data(job, graph, number, step, m, device):
    """What a stage reads by itself, for the whole batch."""
    name, index = graph.module_of(number)
    if index:
        return []
    if name in graph.sources:
        return [data(step, m, name, device, rows=sum(job.images[m]) if job.images else BATCH)]
    return [data(step, m, "text", device)] if job.images else []


TOKENS = ("encoder dp 4, language dp 2", "encoder dp 2, language dp 4", "a colocated encoder", "a frozen encoder")
CASES = [
    *((name, False, True) for name in JOBS),
    *((name, True, True) for name in TOKENS),
    *((name, per_token, False) for name in JOBS for per_token in (False, True)),  # at night
]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("job", "per_token", "strict"),
    [
        pytest.param(
            JOBS[name],
            per_token,
            strict,
            id=f"{name}, {'tokens' if per_token else 'mean'}, {'strict' if strict else 'buffered'}",
            marks=[pytest.mark.ranks(JOBS[name].ranks), *([] if strict else [pytest.mark.nightly])],
        )
        for name, per_token, strict in CASES
    ],
)
def test_weights_after_three_steps_are_those_of_one_process(ranks, job, per_token, strict):
    """With losses that are means, or weighted by tokens; without ``strict`` sends are buffered and outputs freed."""
    device = ranks.device
    grids = grids_of(job.places, ("tp", "dp", "pp"))
    for grid in grids.values():
        for dim in ("tp", "dp"):
            grid.create_pg(dim)
    config = config_for(
        ranks,
        strict=strict,
        calculate_per_token_loss=per_token,
        variable_seq_lengths=bool(job.images),
        deallocate_pipeline_outputs=not strict,
        deadline=30.0,
        open_deadline=30.0,
    )
    edges = {(s, d): EdgeOptions(backward=False) for s in job.frozen for d in job.flow[s]}
    comm = MultiModulePipelineCommunicator(grids, {name: job.flow.get(name, []) for name in grids}, config, edges=edges)
    plan = step_plan(
        comm.graph,
        MICROBATCHES,
        placement=comm.positions.placement,
        collectives=comm.collective_edges,
        frozen=comm.frozen_modules,
    )
    verify(plan, lanes="shared")
    models = {comm.graph.module_of(number)[0]: Stage(number, device, config) for number in comm.stages}
    optimizers = [descend(model.parameters()) for model in models.values()]

    def forward_step(step, microbatches, model):
        m = next(microbatches)
        name, _ = comm.graph.module_of(model.number)
        lane, even = grids[name].coords(ranks.rank)["dp"], BATCH // grids[name].dim_size("dp")
        own = [
            whole.split(even if len(whole) == BATCH else job.images[m])[lane]
            for whole in own_data(job, comm.graph, model.number, step, m, device)
        ]
        arrived = [*own, *model.received.values()]
        if len(arrived) == 1 and len(arrived[0]) == 0:
            return {name: arrived[0]}, None  # nothing to do for this microbatch
        output = model(arrived)
        if any(edge.source == model.number for edge in comm.graph.stage_edges):
            return {name: output}, None
        counted = tokens(step, m, device).split(even)[lane]
        return output, partial(counted_loss, counted=counted, per_token=per_token)

    for step in range(STEPS):
        call(
            model=models if len(models) > 1 else next(iter(models.values())),
            count=MICROBATCHES,
            data_iterator={name: iter(range(MICROBATCHES)) for name in models},
            forward_step_func=partial(forward_step, step),
            p2p_communicator=comm,
            pg_collection={name: ProcessGroupCollection.from_grid(grids[name]) for name in models},
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = in_one_process(job, comm.graph, device, per_token=per_token)
    for name, model in models.items():
        assert torch.allclose(model.weight.detach(), expected[model.number], rtol=1e-10, atol=1e-13)
        moved = not torch.equal(model.weight.detach(), Stage(model.number, device).weight.detach())
        assert moved == (name not in job.frozen)
    comm.destroy()
