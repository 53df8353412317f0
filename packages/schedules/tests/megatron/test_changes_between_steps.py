"""Random changes of models and configs between steps, on replicas of a pipeline: gradients are those of one process."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autograd_kit.gradients import difference, gradients_of
from pipegrid.gradients import zero_main_grads
from pipegrid.gradients.main_grad import accumulated, keeps_main_grad
from pipegrid.schedules import PipelineConfig, accumulate_in_main_grad, forward_backward_with_schedule, stage_places
from pipegrid.schedules.megatron.call import LastStep
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator

from ..kit.models import WIDTH, Part, call, in_one_process, microbatch, step_on

STEPS = 8
TOLERANCE = 1e-5  # a layer in single precision sums in another order


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class InSingle(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = copy.deepcopy(inner).float()

    def forward(self, x):
        return self.inner(x.float()).double()


def _new_layer(draw):
    torch.manual_seed(draw.randrange(1000))
    return nn.Linear(WIDTH, WIDTH).double()


def _replace(part, at, draw):
    part.layers[at] = _new_layer(draw)


def _append(part, at, draw):
    part.layers.append(_new_layer(draw))


def _remove(part, at, draw):
    if len(part.layers) > 1:
        del part.layers[at]


def _freeze(part, at, draw):
    part.layers[at].requires_grad_(False)


def _train_all(part, at, draw):
    part.requires_grad_(True)


def _wrap(part, at, draw):
    part.layers[at] = draw.choice([nn.Sequential, Checkpointed, InSingle])(part.layers[at])


def _hook(part, at, draw):
    factor = draw.choice([0.5, 2.0])
    part.layers[at].register_forward_hook(lambda module, inputs, output: output * factor)


def _hook_a_gradient(part, at, draw):
    for parameter in part.layers[at].parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 2)


def _assign(part, at, draw):
    state = {name: tensor * 0.9 for name, tensor in part.state_dict().items()}
    part.load_state_dict(state, assign=True)


def _write_data(part, at, draw):
    for parameter in part.parameters():
        parameter.data = parameter.data * 0.9


def _tie(part, at, draw):
    part.layers.append(part.layers[at])


def _step_with_an_optimizer(part, at, draw):
    kept = [parameter for parameter in part.parameters() if keeps_main_grad(parameter)]
    for parameter in kept:
        parameter.grad = accumulated(parameter)
    torch.optim.SGD(part.parameters(), lr=0.1).step()
    for parameter in kept:
        parameter.grad = None


CHANGES = [
    _replace,
    _append,
    _remove,
    _freeze,
    _train_all,
    _wrap,
    _hook,
    _hook_a_gradient,
    _assign,
    _write_data,
    _tie,
    _step_with_an_optimizer,
]


def changed(part, seed):
    """The changes of ``seed``, one to three: the same of equal parts."""
    draw = random.Random(seed)
    for change in draw.choices(CHANGES, k=draw.randint(1, 3)):
        change(part, draw.randrange(len(part.layers)), draw)
    if not any(parameter.requires_grad for parameter in part.parameters()):
        part.requires_grad_(True)


def options(draw):
    return {
        "overlap_grad_reduce": draw.random() < 0.7,
        "grad_bucket_bytes": draw.choice([1, 200, 2**20]),
        "deallocate_pipeline_outputs": draw.random() < 0.3,
        "check_replicas": draw.choice([True, False]),
    }


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
def test_gradients_follow_any_changes(ranks, seed):
    draw = random.Random(seed)
    schedule = draw.choice(["one_f_one_b", "zero_bubble_v", "interleaved_1f1b"])
    placement = None if schedule == "one_f_one_b" else stage_places(schedule, 2)
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, _ = grid.create_pgs(["pp", "dp"])
    here = grid.coords(ranks.rank)
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=60)
    communicator = P2PCommunicator(pp, config, placement=placement)
    owners = placement or (0, 1)
    own = [stage for stage, owner in enumerate(owners) if owner == here["pp"]]
    parts = [Part(stage, config, layers=2) for stage in range(len(owners))]
    models = [copy.deepcopy(parts[stage]) for stage in own]
    for step in range(STEPS):
        number = draw.choice([2, 4, 6])
        config = PipelineConfig(pipeline_dtype=torch.float64, deadline=60, **options(draw))
        for stage, part in enumerate(parts):
            changed(part, f"{seed} {step} {stage}")
        for stage, model in zip(own, models, strict=True):
            changed(model, f"{seed} {step} {stage}")
            model.config = config
        for part in (*parts, *models):
            part.zero_grad()
        arguments = {
            "model": models if len(models) > 1 else models[0],
            "count": number,
            "forward_step_func": step_on(here["dp"]),
            "p2p_communicator": communicator,
            "pg_collection": ProcessGroupCollection.from_grid(grid),
            "schedule": schedule,
        }
        if draw.random() < 0.3:
            call(forward_backward_with_schedule, forward_only=True, **arguments)
        call(forward_backward_with_schedule, **arguments)
        data = [microbatch(index, lane) for lane in range(2) for index in range(number)]
        in_one_process(parts, data, len(data))
        assert difference(gradients_of(models), gradients_of([parts[stage] for stage in own])) < TOLERANCE
    communicator.close()


def _keep_main_grad(part):
    """Sum the gradients of the first layer elsewhere from now on."""
    accumulate_in_main_grad(part.layers[0], dtype=torch.float64)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 8))])
def test_so_where_the_caller_keeps_its_last_step(ranks, seed):
    """Every second step comes behind a change; the others find none, and reduce as the step before."""
    draw = random.Random(seed)
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, _ = grid.create_pgs(["pp", "dp"])
    here, groups, last = grid.coords(ranks.rank), ProcessGroupCollection.from_grid(grid), LastStep()
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=60, **options(draw))
    communicator = P2PCommunicator(pp, config)
    parts = [Part(stage, config, layers=2) for stage in range(2)]
    model = copy.deepcopy(parts[here["pp"]])
    used = []
    for step in range(2 * STEPS):
        for stage, part in enumerate(parts if step % 2 == 0 else ()):
            changed(part, f"{seed} {step} {stage}")
            if stage == here["pp"]:
                changed(model, f"{seed} {step} {stage}")
        if step == STEPS:
            _keep_main_grad(model)
        for part in (*parts, model):
            part.zero_grad()
        zero_main_grads(model)
        arguments = {"forward_step_func": step_on(here["dp"]), "p2p_communicator": communicator, "schedule": "1f1b"}
        call(forward_backward_with_schedule, model=model, pg_collection=groups, last=last, **arguments)
        used.append(last.gradients)
        in_one_process(parts, [microbatch(index, lane) for lane in range(2) for index in range(4)], 8)
        found = [accumulated(one) for one in model.parameters()]
        expected = [one.grad for one in parts[here["pp"]].parameters()]
        assert difference(found, expected) < TOLERANCE
    assert all(used[step] is used[step - 1] for step in range(1, 2 * STEPS, 2))
    assert len({id(each) for each in used}) > 2
    communicator.close()
