"""What training scripts do around models and between steps, beside one process: updates, gradients or none, buffers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipegrid.schedules import PipelineConfig
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Names, Pipeline

WIDTH, WORDS, MICROBATCHES, UPDATES = 4, 11, 2, 3


class Model(nn.Module):
    """Layers between an embedding and a head, as most scripts write it."""

    def __init__(self, layer=lambda: nn.Linear(WIDTH, WIDTH), layers=4, *, tied=False):
        torch.manual_seed(2)
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids, **flags):
        return self.head(self.through(self.embed(ids), **flags))

    def through(self, hidden, **flags):
        for layer in self.layers:
            hidden = layer(hidden, **flags)
        return hidden


class Counting(Model):
    """Its own code counts forwards in a buffer, as for a warmup."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def through(self, hidden):
        self.seen += 1
        return super().through(hidden * (1 + 0.1 * self.seen))


class Listed(nn.Module):
    """A layer that takes and returns a list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream):
        return [self.linear(stream[0]).tanh(), stream[1] + stream[0].square()]


class Lists(Model):
    """What goes from layer to layer is a list."""

    def __init__(self):
        super().__init__(Listed)

    def through(self, hidden):
        last, summed = super().through([hidden, hidden])
        return last + summed


class Fourier(nn.Module):
    """A layer with complex parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, hidden):
        return hidden + torch.fft.irfft(torch.fft.rfft(hidden) * self.weight, WIDTH)


class Switched(nn.Module):
    """A layer with a part that all layers share, which runs where a flag says so."""

    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, hidden, switch=False):
        return hidden + (self.shared if switch else self.linear)(hidden).tanh()


def switched():
    torch.manual_seed(3)
    shared = nn.Linear(WIDTH, WIDTH)
    return Model(lambda: Switched(shared))


def freeze_embedding(step, modules, batch):
    for module in modules if step == 1 else ():
        for name, parameter in module.named_parameters():
            if name in ("embed.weight", "head.weight"):
                parameter.requires_grad_(False)


def switch_on_at_first(step, modules, batch):
    batch["switch"] = step == 0


CASES = {
    "a tied embedding is frozen later": (lambda: Model(tied=True), "1f1b", "Et|tttL", freeze_embedding),
    "a shared layer is in some steps only": (switched, "1f1b", "Ett|ttL", switch_on_at_first),
    "the model's own code counts forwards": (Counting, "looped_bfs", "Et|t|t|tL", None),
    "layers return lists": (Lists, "1f1b", "Et|tttL", None),
    "layers return lists, in halves": (Lists, "zero_bubble_v", "Et|t|t|tL", None),
    "complex parameters": (lambda: Model(Fourier), "1f1b", "Et|tttL", None),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_three_updates_are_those_of_one_process(ranks, case):
    make, schedule, layout, change = CASES[case]
    expected, grid = make(), HyperCommGrid([2], ["pp"])
    config = PipelineConfig(variable_seq_lengths=True, check=False)  # what it would find is to be right
    names, loss = Names("layers"), lambda output, batch: output.square().mean()
    with Pipeline(
        make, layout, grid, schedule=schedule, num_microbatches=MICROBATCHES, loss=loss, names=names, config=config
    ) as pipeline:
        stages = pipeline.stages["model"]
        both = [torch.optim.AdamW(each, lr=0.1) for each in (expected.parameters(), pipeline.parameters())]
        for step in range(UPDATES):
            batch = {"ids": torch.arange(8 * 3).add(step).remainder(WORDS).view(8, 3)}
            if change is not None:
                change(step, [expected, *stages], batch)
            losses = torch.stack(
                [loss(expected(**{**batch, "ids": part}), batch) for part in batch["ids"].chunk(MICROBATCHES)]
            )
            losses.mean().backward()
            torch.testing.assert_close(pipeline.step(batch), losses.mean().detach())
            _require_equal(stages, expected, lambda one: one.grad)
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            torch.testing.assert_close(pipeline.clip(0.1), norm, check_dtype=False)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            _require_equal(stages, expected, lambda one: one.detach())


def _require_equal(stages, expected, what):
    right = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    for stage in stages:
        held = {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers())}
        for name in held.keys() & right.keys():
            own, whole = what(held[name]), what(right[name])
            assert (own is None) == (whole is None), f"{name}: {own}, and {whole} in one process"
            if own is not None:
                torch.testing.assert_close(own, whole, msg=lambda text, name=name: f"{name}: {text}")


class OwnLoss(Counting):
    """It returns its loss beside its logits, as models of Hugging Face do."""

    def forward(self, ids, labels):
        logits = super().forward(ids)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Recomputed(nn.Module):
    """A layer that keeps a mean of what it sees, and sees it again as it is recomputed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden):
        return checkpoint(self.computed, hidden, use_reentrant=False)

    def computed(self, hidden):
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        return self.linear(hidden)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [OwnLoss, lambda: Model(Recomputed)], ids=["own loss", "recomputed"])
def test_buffers_that_forwards_write_are_no_difference_of_the_first_step(ranks, make, capfd):
    ids = torch.arange(8 * 3).remainder(WORDS).view(8, 3)
    own = make is OwnLoss
    loss = None if own else lambda output, batch: output.square().mean()
    batch = {"ids": ids} | ({"labels": ids} if own else {})
    grid, names = HyperCommGrid([2], ["pp"]), Names("layers")
    with Pipeline(make, "Et|tttL", grid, num_microbatches=MICROBATCHES, loss=loss, names=names) as pipeline:
        pipeline.step(batch)
    assert "not compared" not in capfd.readouterr().err


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("schedule", "layout"), [("1f1b", "Et|tttL"), ("looped_bfs", "Et|t|t|tL")])
def test_a_buffer_of_the_model_itself_is_saved_and_loaded_on_every_stage(ranks, schedule, layout):
    ids = torch.arange(8 * 3).remainder(WORDS).view(8, 3)
    loss, names = lambda output, batch: output.square().mean(), Names("layers")
    grid = HyperCommGrid([2], ["pp"])
    with Pipeline(
        Counting, layout, grid, schedule=schedule, num_microbatches=MICROBATCHES, loss=loss, names=names
    ) as pipeline:
        pipeline.step({"ids": ids})
        pipeline.save(ranks.shared_path, step=1)
        pipeline.step({"ids": ids})
        assert [stage.whole.seen.item() for stage in pipeline.stages["model"]] == [4] * (layout.count("|") // 2 + 1)
        pipeline.load(ranks.shared_path)
        assert {stage.whole.seen.item() for stage in pipeline.stages["model"]} == {2}
