"""The first step of a `Pipeline` against one process: mistakes that are planted, one at a time, are each an error."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig
from pipegrid.stages.comparison.compare import compared_gradients
from pipegrid.stages.stage import Stage
from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, Pipeline
from pipegrid.training.pipeline import first_step
from pipegrid.training.pipeline import pipeline as pipeline_file
from pipegrid.training.pipeline.first_update import FirstUpdate
from pipegrid.training.pipeline.losses import GivenLoss
from pipegrid.training.pipeline.one_process import OneProcess
from pipegrid.training.pipeline.rows import Rows

WORDS = 11


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(8)
        self.norm.running_var.uniform_(0.5, 2.0)
        self.norm.eval()

    def forward(self, hidden):
        return hidden + self.drop(self.norm(self.linear(hidden).flatten(0, 1)).view_as(hidden).tanh())


class Model(nn.Module):
    calls = 0

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids, factors):
        type(self).calls += 1
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) * factors[:, None, None]


def batch(replica):
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(0, WORDS, (4, 5), generator=generator)
    labels = ids.masked_fill(torch.rand(4, 5, generator=generator) < 0.4 * torch.tensor([[0], [1], [1], [2]]), -100)
    return {"ids": ids, "labels": labels, "factors": torch.rand(4, generator=generator, dtype=torch.float64) + 0.5}


def mean(output, inputs):
    return F.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten())


def step(config=None, prepare=None, **options):
    grid = HyperCommGrid([2, 2], ["dp", "pp"])

    def forward(stage, inputs):
        return stage(ids=inputs["ids"], factors=inputs["factors"])

    with Pipeline(
        Model, "Ett|ttL", grid, config=config, num_microbatches=2, loss=mean, forward=forward, **options
    ) as job:
        if prepare is not None:
            prepare(job)
        return job.step(batch(job.replica)).item()


def modes_are_lost(monkeypatch):
    original = Stage.__init__

    def made(self, *args, **options):
        original(self, *args, **options)
        self.train()

    monkeypatch.setattr(Stage, "__init__", made)


def a_mean_is_over_rows(monkeypatch):
    monkeypatch.setattr(GivenLoss, "_found", lambda *_: 0)
    monkeypatch.setattr(GivenLoss, "_is_of_halves", lambda *_: True)


def swapped(original):
    def split(self, given, count):
        parts = original(self, given, count)
        return [{**part, "factors": other["factors"]} for part, other in zip(parts, parts[::-1], strict=True)]

    return split


def gradients_are_not_divided(monkeypatch):
    original = GivenLoss.__call__

    def weighed(self, *given):
        loss, weight, told = original(self, *given)
        return 2 * loss, weight, told

    monkeypatch.setattr(GivenLoss, "__call__", weighed)


def a_tied_weight_has_the_name_of_its_stage(monkeypatch):
    monkeypatch.setattr(pipeline_file, "names_of_ties", lambda *_: {})


def what_is_unused_has_zeros(monkeypatch):
    """Which an optimizer with weight decay makes smaller, while it leaves alone what has no gradient."""
    original = first_step.FirstStep._differences

    def differences(self, right):
        right.gradients["layers.0.linear.bias"] = None
        for name, one in self.job.named():
            one.grad = torch.zeros_like(one) if name == "layers.0.linear.bias" else one.grad
        return original(self, right)

    monkeypatch.setattr(first_step.FirstStep, "_differences", differences)


MISTAKES = (
    modes_are_lost,
    a_mean_is_over_rows,
    gradients_are_not_divided,
    a_tied_weight_has_the_name_of_its_stage,
    what_is_unused_has_zeros,
)


@pytest.mark.few(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_planted_mistake_is_an_error_on_every_rank(ranks, mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(CutError, match="the first step is not that of one process: loss .*\n  (gradient|buffer|head)"):
        step()
    step(PipelineConfig(variable_seq_lengths=True, check=False))


@pytest.mark.ranks(4)
def test_rows_that_go_to_another_microbatch_are_a_warning_of_the_first_rank(ranks, monkeypatch):
    """A model whose rows depend on each other looks the same, so this is none of an error."""
    monkeypatch.setattr(Rows, "split", swapped(Rows.split))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    texts = [str(each.message) for each in found if "an entry of the batch is cut wrongly" in str(each.message)]
    assert len(texts) == (ranks.rank == 0)


def froze(job):
    for stage in job.stages["model"]:
        stage.get_submodule(stage.layers[0]).requires_grad_(False).eval()


def summed(output, inputs):
    losses = F.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    return losses, (inputs["labels"] != -100).sum()


@pytest.mark.few(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prepare": froze},
        {"schedule": "zero_bubble_h1"},
        {"config": PipelineConfig(variable_seq_lengths=True, grad_scale_func=lambda loss: loss * 64)},
    ],
    ids=["plain", "frozen by the script", "zero bubble", "loss scale"],
)
def test_a_right_step_is_compared_and_no_error(ranks, options, monkeypatch):
    compared = []
    original = first_step.FirstStep._differences
    monkeypatch.setattr(Model, "calls", 0)
    monkeypatch.setattr(
        first_step.FirstStep, "_differences", lambda self, *given: compared.append(given[0]) or original(self, *given)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**options)
    assert len(compared) == 1
    assert Model.calls == 2, "the forwards of one process leave no trace on the first rank"
    assert all(gradient is not None for gradient in compared[0].gradients.values())


@pytest.mark.ranks(4)
def test_what_one_process_cannot_run_is_said_once(ranks, monkeypatch, capfd):
    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(OneProcess, "_wholes", fails)
    step()
    assert sum("process: MemoryError: no room" in line for line in lines_of(capfd)) == (ranks.rank == 0)


def lines_of(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if "not compared with one process" in line]


class Coupled(torch.optim.Optimizer):
    """Steps by the norm of all its gradients, as optimizers do that estimate their own learning rate."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        held = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in held]).norm()
        for each in held:
            each.add_(each.grad, alpha=-0.1 / norm.item())


class Drawing(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        torch.rand(())


def by_name(kind, **options):
    """An optimizer with options by name: as a script has them, or by the names of a stage alone."""

    def made(job, rank):
        named = dict(job.named_parameters()).items()
        return kind([{"params": [one], "lr": 0.01 * (1 + len(name) % 3)} for name, one in named], **options)

    return made


def by_names_of_stages(job, rank):
    named = [pair for stage in job.stages["model"] for pair in stage.named_parameters()]
    return torch.optim.AdamW([{"params": [one], "weight_decay": 0.5 * ("head" in name)} for name, one in named])


def another_rate_on_a_replica(job, rank):
    return torch.optim.SGD(job.parameters(), lr=0.1 if job.replica else 0.2)


def of_all(kind, **options):
    return lambda job, rank: kind(job.parameters(), **options)


def clipped_by_rank(job):
    torch.nn.utils.clip_grad_norm_(job.parameters(), 1e-3)


def scheduled(job, rank):
    optimizer = by_name(torch.optim.NAdam)(job, rank)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # keeps the optimizer's own step
    return optimizer


def two_steps(make, *, between=lambda job: None, accumulated=1, **closure):
    """Two steps with an update between them."""
    torch.manual_seed(0)

    def forward(stage, inputs):
        return stage(ids=inputs["ids"], factors=inputs["factors"])

    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(Model, "Ett|ttL", grid, num_microbatches=2, loss=mean, forward=forward) as job:
        optimizer = make(job, torch.distributed.get_rank())
        for _ in range(accumulated):
            job.step(batch(job.replica))
        between(job)
        optimizer.step(**closure)
        optimizer.zero_grad()
        before = [one.detach().clone() for one in job.parameters()]
        job.step(batch(job.replica))
        assert all(map(torch.equal, before, job.parameters())), "what is compared changes no parameter"
        return job._steps._update


@pytest.mark.few(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("make", "between", "text"),
    [
        (by_names_of_stages, None, r"embed\.weight: weight_decay 0\.\d and 0\.\d on rank \d"),
        (another_rate_on_a_replica, None, r"layers\.0\.linear\.weight: lr 0\.1 and 0\.2 on rank 1"),
        (
            of_all(torch.optim.SGD, lr=0.1),
            clipped_by_rank,
            r"between .* are multiplied by \S+ on rank 0, .*Pipeline\.clip",
        ),
        (of_all(Coupled), None, r"layers\.\d\.\S*: \S+ away from the parameter of one process"),
    ],
    ids=["names of stages", "rate of a replica", "norm of a rank", "coupled parameters"],
)
def test_an_update_that_one_process_would_not_make_is_an_error_on_every_rank(ranks, make, between, text):
    with pytest.raises(CutError, match=rf"(?s)the first update is not that of one process.*\n  {text}"):
        two_steps(make, **({} if between is None else {"between": between}))


@pytest.mark.few(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (by_name(torch.optim.AdamW, weight_decay=0.3), {"between": lambda job: job.clip(0.01)}, None),
        (of_all(torch.optim.Adafactor), {"accumulated": 2}, None),
        (scheduled, {}, None),
        (of_all(Drawing, lr=0.1), {}, "Drawing draws random numbers"),
        (of_all(torch.optim.SGD, lr=0.1), {"closure": lambda: None}, "SGD.step() has arguments"),
    ],
    ids=["by name and clipped", "accumulated", "scheduled", "random", "closure"],
)
def test_a_right_update_is_compared_or_a_line_says_why_not(ranks, make, options, why, monkeypatch, capfd):
    compared = []
    original = FirstUpdate._difference
    monkeypatch.setattr(
        FirstUpdate, "_difference", lambda self, *given: compared.append(given) or original(self, *given)
    )
    assert two_steps(make, **options) is None
    assert bool(compared) == (why is None)
    lines = lines_of(capfd)
    assert len(lines) == (why is not None and ranks.rank == 0)
    assert all(why in line for line in lines)


class Counting(nn.Module):
    """Layers add the number of the forward to what they return: rows depend on nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Number() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Number(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.number = 0

    def forward(self, hidden):
        self.number += 1
        return super().forward(hidden) + self.number


def mean_of_squares(output, _):
    return output.square().mean()


def small_step(batch=None, layout="Et|tL", dims=("dp", "pp"), config=None, loss=mean_of_squares, **options):
    grid = HyperCommGrid([2, 1] if "|" not in layout else [1, 2], list(dims))

    def forward(stage, inputs):
        return stage(x=inputs["x"])

    with Pipeline(
        Counting,
        layout,
        grid,
        num_microbatches=2,
        loss=loss,
        forward=forward,
        config=config,
        whole=tuple(batch or ()),
        **options,
    ) as job:
        job.step({"x": torch.linspace(-1, 1, 12).view(4, 3)} | (batch or {}))


@pytest.mark.ranks(2)
def test_a_model_that_counts_its_forwards_is_no_batch_that_is_cut_wrongly(ranks, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_step()
    assert not lines_of(capfd)


def compiled(stage):
    for name in stage.layers:
        stage.get_submodule(name).compile(backend="eager")


def with_an_adapter(stage):
    stage.adapter = nn.Linear(1, 1)


def with_hooks(stage):
    for module in stage.modules():
        module.register_forward_hook(lambda *_: None)


UNCOMPARED = {
    "tp": ({"dims": ("tp", "pp"), "layout": "EttL"}, "tensor-parallel ranks have parts that are no DTensors"),
    "cp": (
        {"dims": ("cp", "pp"), "layout": "EttL", "loss": lambda output, _: (output.square().sum(), output.numel())},
        "the model is divided by cp;",
    ),
    "large": ({}, "61 parameters are above 10, and PipelineConfig(check=True) compares any number"),
    "objects": ({"batch": {"more": object()}}, "the batch holds objects other than tensors"),
    "compiled": ({"parallelize": compiled}, "layers are compiled"),
    "adapter": ({"parallelize": with_an_adapter}, "the stages have adapter.bias, adapter.weight, which the model"),
    "hooks": ({"parallelize": with_hooks}, None),
}


@pytest.mark.ranks(2)
@pytest.mark.few(2)
@pytest.mark.parametrize("name", UNCOMPARED)
def test_what_is_not_compared_is_one_line_of_the_first_rank(ranks, name, monkeypatch, capfd):
    options, why = UNCOMPARED[name]
    monkeypatch.setattr(first_step, "LARGEST", 10 if name == "large" else first_step.LARGEST)
    for check in (None, True, False):
        with warnings.catch_warnings():  # Dynamo looks at the gradient of what arrived, which is no leaf of its graph
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            small_step(**options, config=PipelineConfig(variable_seq_lengths=True, check=check))
        lines, known = lines_of(capfd), check is False or (name == "large" and check is True)
        assert len(lines) == (ranks.rank == 0 and why is not None and not known)
        assert all(why in line for line in lines)


def test_a_model_of_frozen_parameters_alone_has_no_gradients_to_compare():
    assert list(compared_gradients({}, {}, {})) == []


def resumed(ranks, make, *, spoil=lambda optimizer, rank: None):
    """An update, a checkpoint, and in another job a step with the optimizer of it; ``spoil`` changes that."""
    torch.manual_seed(0)
    grid = HyperCommGrid([2, 2], ["dp", "pp"])

    def forward(stage, inputs):
        return stage(ids=inputs["ids"], factors=inputs["factors"])

    options = {"num_microbatches": 2, "loss": mean, "forward": forward}
    with Pipeline(Model, "Ett|ttL", grid, **options) as job:
        optimizer = make(job)
        for _ in range(2):
            job.step(batch(job.replica))
            optimizer.step()
            optimizer.zero_grad()
        job.save(ranks.shared_path / "run", optimizer, step=2)
    with Pipeline(Model, "Ettt|tL", grid, **options) as job:
        optimizer = make(job)
        assert job.load(ranks.shared_path / "run", optimizer).step == 2
        spoil(optimizer, ranks.rank)
        job.step(batch(job.replica))
        optimizer.step()
        optimizer.zero_grad()
        job.step(batch(job.replica))


def momentum_is_lost(optimizer, rank):
    if rank == 3:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()


@pytest.mark.ranks(4)
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor])
def test_the_first_update_of_a_resumed_optimizer_is_compared(ranks, kind, monkeypatch, capfd):
    compared = []
    original = FirstUpdate._difference
    monkeypatch.setattr(
        FirstUpdate, "_difference", lambda self, *given: compared.append(given[0]) or original(self, *given)
    )
    resumed(ranks, lambda job: kind(job.parameters(), lr=0.01))
    names = [name for name in compared if name.startswith(("layers.0", "layers.3"))]
    assert len(names) == 2 * len({*names})  # in both jobs
    assert not lines_of(capfd)


@pytest.mark.ranks(4)
def test_a_state_that_one_rank_has_lost_is_an_error_on_every_rank(ranks):
    text = r"(?s)the first update is not that of one process.*\n  layers\.3\.\S+: \S+ away from the parameter"
    with pytest.raises(CutError, match=text):
        resumed(ranks, lambda job: torch.optim.AdamW(job.parameters(), lr=0.01), spoil=momentum_is_lost)


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("among", [0, 3])
def test_a_step_of_one_rank_alone_names_it_on_every_rank(ranks, among):
    """The others go on to their update, and their next step meets it."""
    torch.manual_seed(0)

    def forward(stage, inputs):
        return stage(ids=inputs["ids"], factors=inputs["factors"])

    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(Model, "Ett|ttL", grid, num_microbatches=2, loss=mean, forward=forward) as job:
        optimizer = torch.optim.SGD(job.parameters(), 0.1)
        job.step(batch(job.replica))
        if ranks.rank != among:
            optimizer.step()
        text = rf"rank {among} has not updated it between two steps, and rank {among ^ 1} has: is a call of step\(\) on"
        with pytest.raises(CutError, match=text):
            job.step(batch(job.replica))
