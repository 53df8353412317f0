"""Modules joined by several tensors, under schedules: the gradients of the same model in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrid.bridges import Axes, EdgeOptions, MultiModulePipelineCommunicator, Packed, Whole
from pipegrid.schedules import PipelineConfig, PipelineError, get_forward_backward_func
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, replica_samples

from .kit.data import coins, normal
from .kit.grids import grids_of
from .kit.models import Wrapped, call

MICROBATCHES, BATCH, PATCHES, WIDTH = 3, 4, 2, 5
DECLARED = {
    "features": Axes("b", "s", "h"),
    "deepstack": [Axes("b", "s", "h")] * 2,
    "grid": Axes("b", "thw"),
    "temperature": Whole(),
    "level": Whole(),
    "unused": None,
}
PACKED = {"features": Axes("b", "h"), "grid": Axes("b", "thw")}


class Vision(nn.Module):
    """Three features of each patch, and a learned number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        levels = [torch.tanh(layer(x)) for layer in self.layers]
        grid = torch.arange(2 * len(x)).view(-1, 2) % 3 + 1
        # Another order than the declaration's.
        return {
            "unused": None,
            "grid": grid.to(x.device),
            "temperature": self.temperature.exp(),
            "deepstack": levels[:2],
            "level": 2,
            "features": levels[2],
        }


class First(nn.Module):
    """Reads features, the first deep feature and the mask, and passes on what the second half needs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, seen, mask):
        hidden = torch.tanh(self.layer(seen["features"])) * seen["temperature"] + seen["deepstack"][0] * seen["level"]
        return {"hidden": hidden, "deepstack": seen["deepstack"][1], "mask": mask}


class Second(nn.Module):
    """A middle stage of the model: its mask came along."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, passed):
        hidden = self.layer(passed["hidden"] + passed["deepstack"])
        return hidden * passed["mask"].unsqueeze(-1)


def made(kind, seed, device):
    torch.manual_seed(seed)
    return kind().double().to(device)


def images(index, device):
    return normal(index, BATCH, PATCHES, WIDTH, device=device)


def masks(index, device):
    return coins(90 + index, BATCH, PATCHES, device=device)


PLACES = {
    "fan in": ({"vision": (0, {"dp": 2}), "language": (2, {"pp": 2})}, 4),
    "fan out": ({"vision": (0, {"dp": 1}), "language": (1, {"dp": 2})}, 3),
    "colocated": ({"vision": (0, {"dp": 4}), "language": (0, {"dp": 2, "pp": 2})}, 4),
    "in place": ({"vision": (0, {"dp": 2}), "language": (0, {"dp": 2})}, 2),
}


def job(place, backend, schedule):
    nightly = (place, backend, schedule) not in {
        ("fan in", "gloo", "zero_bubble_h1"),
        ("colocated", "gloo", "1f1b"),
        ("fan out", "fake_nccl", "1f1b"),
        ("in place", "gloo", "1f1b"),
    }
    marks = [pytest.mark.ranks(PLACES[place][1], backend=backend), *([pytest.mark.nightly] if nightly else [])]
    return pytest.param(place, schedule, marks=marks, id=f"{place}-{backend}-{schedule}")


JOBS = [
    job(place, backend, schedule)
    for place in PLACES
    for backend in ("gloo", "fake_nccl")
    for schedule in ("1f1b", "zero_bubble_h1")
]


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize(("place", "schedule"), JOBS)
def test_the_gradients_are_those_of_one_process(ranks, place, schedule, per_token):
    grids = grids_of(PLACES[place][0], ("dp", "pp"))
    here = [name for name, grid in grids.items() if ranks.rank in grid.ranks]
    for name, grid in grids.items():
        if name in here:
            grid.create_pg("dp")
            grid.create_pg("pp")
    config = PipelineConfig(
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=per_token,
        strict=ranks.strict_sends,
        deadline=30,
        variable_seq_lengths=True,
    )
    communicator = MultiModulePipelineCommunicator(
        grids, {"vision": ["language"]}, config, edges={("vision", "language"): EdgeOptions(payload=DECLARED)}
    )
    depth = grids["language"].dim_size("pp")
    parts = {"vision": [Vision], "language": [First, Second]}
    seeds = {Vision: 0, First: 1, Second: 2}

    def held(name):
        if name == "vision":
            return [made(Vision, 0, ranks.device)]
        at = grids[name].coords(ranks.rank)["pp"]
        kinds = parts[name][at : at + 1] if depth == 2 else parts[name]
        return [made(kind, seeds[kind], ranks.device) for kind in kinds]

    models = {name: Wrapped(nn.ModuleList(held(name)), config) for name in here}
    share = {name: replica_samples(BATCH, grids[name]) for name in here}

    def step(indices, model):
        index = next(indices)
        name = next(name for name, one in models.items() if one is model)
        mine = slice(share[name].start, share[name].stop)
        if name == "vision":
            return {name: model.module[0](images(index, ranks.device)[mine])}, None
        value = model.received.get("vision", model.received.get("language"))
        mask = masks(index, ranks.device)[mine]
        for part in model.module:
            value = part(value, mask) if isinstance(part, First) else part(value)
        if isinstance(value, dict):
            return {name: value}, None

        def loss(output):
            if per_token:
                return output.square().sum(), mask.sum(), None
            return output.square().mean(), None

        return value, loss

    call(
        get_forward_backward_func(schedule=schedule),
        model=models,
        count=MICROBATCHES,
        data_iterator={name: iter(range(MICROBATCHES)) for name in here},
        forward_step_func=step,
        p2p_communicator=communicator,
        pg_collection={name: ProcessGroupCollection.from_grid(grids[name]) for name in here},
    )
    whole = [made(kind, seed, ranks.device) for kind, seed in seeds.items()]
    tokens = sum(masks(index, ranks.device).sum() for index in range(MICROBATCHES))
    for index in range(MICROBATCHES):
        passed = whole[1](whole[0](images(index, ranks.device)), masks(index, ranks.device))
        output = whole[2](passed)
        loss = output.square().sum() / tokens if per_token else output.square().mean() / MICROBATCHES
        loss.backward()
    expected = {type(one): one for one in whole}
    for model in models.values():
        for part in model.module:
            for ours, theirs in zip(part.parameters(), expected[type(part)].parameters(), strict=True):
                assert (ours.grad - theirs.grad).norm() < 1e-10 * max(theirs.grad.norm(), 1e-3)
    communicator.destroy()


def ragged(index):
    """Rows of features of each sample, a sample without any among them."""
    return [(index + sample) % 3 for sample in range(BATCH)]


@pytest.mark.ranks(3)
def test_samples_of_unequal_length_are_packed_and_cut_whole(ranks):
    """An encoder of one lane over a language model of two: each lane gets the rows of its own samples."""
    grids = grids_of(PLACES["fan out"][0], ("dp", "pp"))
    name = "vision" if ranks.rank == 0 else "language"
    grids[name].create_pg("dp")
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30, variable_seq_lengths=True)
    communicator = MultiModulePipelineCommunicator(
        grids, {"vision": ["language"]}, config, edges={("vision", "language"): EdgeOptions(payload=PACKED)}
    )
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    model = Wrapped(layers[name == "language"], config)
    lane = replica_samples(BATCH, grids[name])

    def rows(index):
        return normal(index, sum(ragged(index)), WIDTH)

    def loss_of(output, samples):
        """The sum over samples of the mean over their rows, for as many samples as a lane has."""
        parts = [part.square().mean() for part in output.split(samples) if len(part)]
        return (torch.stack(parts).sum() if parts else output.sum()) / len(samples)

    def step(indices, model):
        index = next(indices)
        samples = ragged(index)
        if name == "vision":
            features = torch.tanh(model.module(rows(index)))
            grid = torch.tensor([[count] for count in samples])
            return {name: {"features": Packed(features, samples), "grid": Packed(grid, [1] * BATCH)}}, None
        seen = model.received["vision"]
        mine = samples[lane.start : lane.stop]
        assert seen["grid"].flatten().tolist() == mine
        return model.module(seen["features"]), lambda output: (loss_of(output, mine), None)

    call(
        model=model,
        count=MICROBATCHES,
        forward_step_func=step,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.from_grid(grids[name]),
    )
    got = [parameter.grad for parameter in model.module.parameters()]
    model.module.zero_grad()
    for index in range(MICROBATCHES):
        output = layers[1](torch.tanh(layers[0](rows(index))))
        (loss_of(output, ragged(index)) / MICROBATCHES).backward()
    for ours, theirs in zip(got, model.module.parameters(), strict=True):
        assert (ours - theirs.grad).norm() < 1e-10 * theirs.grad.norm()
    communicator.destroy()


@pytest.mark.ranks(4)
def test_rows_marked_by_megatrons_models_are_cut_between_samples_under_a_step_function(ranks):
    """Two stages of an encoder, whose first marks its output as well, over two replicas of a language model."""
    grids = grids_of({"vision": (0, {"pp": 2}), "language": (2, {"dp": 2})}, ())
    name = "vision" if ranks.rank < 2 else "language"
    grids[name].create_pgs(grids[name].dim_names)
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30, variable_seq_lengths=True)
    communicator = MultiModulePipelineCommunicator(
        grids, {"vision": ["language"]}, config, module_output_ndim={"vision": 2}
    )
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    model = Wrapped(layers[min(ranks.rank, 2)], config)
    lane = replica_samples(BATCH, grids["language"]) if name == "language" else range(BATCH)

    def loss_of(output, samples):
        parts = [part.square().mean() for part in output.split(samples) if len(part)]
        return (torch.stack(parts).sum() if parts else output.sum()) / len(samples)

    def step(indices, model):
        index = next(indices)
        samples = ragged(index)
        if name == "vision":
            given = normal(index, sum(samples), WIDTH) if ranks.rank == 0 else model.received["vision"]
            output = torch.tanh(model.module(given))
            output._mimo_bridge_split_sizes = samples
            return {name: output}, None
        mine = samples[lane.start : lane.stop]
        return model.module(model.received["vision"]), lambda output: (loss_of(output, mine), None)

    call(
        model=model,
        count=MICROBATCHES,
        forward_step_func=step,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.from_grid(grids[name]),
    )
    got = [parameter.grad for parameter in model.module.parameters()]
    model.module.zero_grad()
    for index in range(MICROBATCHES):
        hidden = normal(index, sum(ragged(index)), WIDTH)
        for layer in layers[:2]:
            hidden = torch.tanh(layer(hidden))
        (loss_of(layers[2](hidden), ragged(index)) / MICROBATCHES).backward()
    for ours, theirs in zip(got, model.module.parameters(), strict=True):
        assert (ours - theirs.grad).norm() < 1e-10 * theirs.grad.norm()
    communicator.destroy()


@pytest.mark.ranks(2)
def test_a_structure_that_changes_between_microbatches_is_one_line_at_its_sender(ranks):
    grids = {name: HyperCommGrid([1], ["dp"], rank_offset=rank) for rank, name in enumerate(("vision", "language"))}
    name = list(grids)[ranks.rank]
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=10)
    communicator = MultiModulePipelineCommunicator(
        grids, {"vision": ["language"]}, config, edges={("vision", "language"): EdgeOptions(payload=PACKED)}
    )
    model = Wrapped(nn.Linear(WIDTH, WIDTH).double(), config)

    def step(indices, model):
        index = next(indices)
        if name == "vision":
            features = model.module(torch.ones(2, WIDTH, dtype=torch.float64))
            grid = torch.ones(2, 3, dtype=torch.long)
            return {name: {"features": features, "grid": grid} if index == 0 else {"features": features}}, None
        return model.module(model.received["vision"]["features"]), lambda output: (output.square().mean(), None)

    with pytest.raises(PipelineError) as failure:
        call(model=model, count=2, forward_step_func=step, p2p_communicator=communicator)
    if name == "vision":
        line = str(failure.value).splitlines()[0]
        assert "ShapeError" in line
        assert "payload is a dict with the keys ['features']; the edge declares" in line
    communicator.abort("the test is over")
    ranks.barrier()  # of the store: the failed step has aborted every group of a device
