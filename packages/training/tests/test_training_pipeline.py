"""One object for a job: gradients, losses, tokens and checkpoints of one process, whatever its modules and schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.nn import functional as F

from pipegrid.bridges import Axes, EdgeOptions, Whole
from pipegrid.schedules import Monitor, PipelineConfig, PipelineError, agree_on_routes, recording_from_json
from pipegrid.schedules.errors import StageOutputError, StepArgumentError
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline, PipelineModule
from pipegrid.training.pipeline.losses import OwnLoss
from pipegrid.training.pipeline.microbatches import Share, microbatch

from .kit.gradients import require_gradients
from .kit.jobs import made
from .kit.models import MAKERS, WORDS, batch_of, llama, next_words
from .kit.vlm import Tower, after_image, read_images, seen_and_text

ROWS = 6


def texts(lane, *, rows=ROWS):
    return batch_of("llama", seed=lane, rows=rows)


def joined(*batches):
    """All lanes as one batch."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


SCHEDULES = [
    ("1f1b", "Ett|ttL", {"microbatch_size": 2}),
    ("interleaved_1f1b", "Et|t|t|tL", {"num_microbatches": 4}),
    ("zero_bubble_h1", "Et|tttL", {}),
    ("zero_bubble_v", "Et|t|t|tL", {"num_microbatches": 4}),
    ("dualpipe_v", "Et|t|t|tL", {"num_microbatches": 4}),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("schedule", "layout", "cut"), SCHEDULES)
def test_a_step_is_that_of_one_process(ranks, schedule, layout, cut):
    """On two replicas; a cut into 4 microbatches of 6 rows is uneven."""
    make = MAKERS["gpt2"]  # tied, and in float64 throughout
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(made(make), layout, grid, schedule=schedule, loss=next_words, **cut) as pipeline:
        whole = made(make)()
        loss, count = next_words(whole(**joined(texts(0), texts(1))), joined(texts(0), texts(1)))
        (loss / count).backward()
        assert (pipeline.replica, pipeline.replicas) == (ranks.rank % 2, 2)
        assert (pipeline.lane, pipeline.lanes) == (pipeline.replica, pipeline.replicas)  # former names
        evaluated = pipeline.evaluate(texts(pipeline.replica))
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        found = pipeline.step(texts(pipeline.replica))
        for each in (evaluated, found):
            torch.testing.assert_close(each, (loss / count).detach(), rtol=1e-12, atol=0.0)
        require_gradients(pipeline.named_parameters(), whole)
        norm = torch.stack([parameter.grad.norm() for parameter in whole.parameters()]).norm()
        torch.testing.assert_close(pipeline.clip(norm.item() / 2), norm, rtol=1e-10, atol=0.0)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), norm.item() / 2)
        require_gradients(pipeline.named_parameters(), whole)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_own_loss_of_a_model_is_a_mean_over_the_tokens_of_the_step(ranks, name):
    """Llama's loss is over following tokens, T5's over all; microbatches and lanes have unequal numbers of them."""
    make = MAKERS[name]
    layout = "Ett|ttL" if name == "llama" else "Eeeee|ttttL"
    batches = [texts(lane) for lane in range(2)]
    batches[1]["labels"][2:4] = -100  # a microbatch without a label
    with Pipeline(made(make), layout, HyperCommGrid([2, 2], ["dp", "pp"]), microbatch_size=2) as pipeline:
        whole = made(make)()
        loss = whole(**joined(*batches)).loss
        loss.backward()
        found = pipeline.step(batches[pipeline.replica])
        torch.testing.assert_close(found.float(), loss.detach().float(), rtol=1e-5, atol=0.0)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for key, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.ranks(4)
def test_a_run_goes_on_in_another_layout_and_schedule(ranks):
    """Two steps on dp 2 x pp 2, saved; a third on pp 4 under ZB-H1: parameters of one process that takes three."""
    make = MAKERS["gpt2"]
    folder = ranks.shared_path / "run"
    whole = made(make)()
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for _ in range(3):
        loss, count = next_words(whole(**joined(texts(0), texts(1))), joined(texts(0), texts(1)))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        reference.step()
        reference.zero_grad()

    with Pipeline(made(make), "Ett|ttL", HyperCommGrid([2, 2], ["dp", "pp"]), loss=next_words) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        assert pipeline.load(folder, optimizer) is None
        for _ in range(2):
            pipeline.step(texts(pipeline.replica))
            pipeline.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        pipeline.save(folder, optimizer, step=2, data={"epoch": 1})
    layout, grid = "Et|t|t|tL", HyperCommGrid([1, 4], ["dp", "pp"])
    with Pipeline(lambda: make().double(), layout, grid, schedule="zero_bubble_h1", loss=next_words) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        found = pipeline.load(folder, optimizer)
        assert (found.step, found.data) == (2, {"epoch": 1})
        pipeline.step(joined(texts(0), texts(1)))
        pipeline.clip(1.0)
        optimizer.step()
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for key, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, expected[key], rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_tokens_are_those_of_one_process(ranks, schedule):
    layout = "Ett|ttL" if schedule == "1f1b" else "Et|t|t|tL"
    prompts = texts(0)["input_ids"][:, :4]
    with Pipeline(made(llama()), layout, HyperCommGrid([2, 2], ["dp", "pp"]), schedule=schedule) as pipeline:
        own = prompts[pipeline.replica * 3 : pipeline.replica * 3 + 3]
        found = pipeline.generate({"input_ids": own}, 5, num_microbatches=2, eos_token_id=2)
        expected = made(llama())().generate(input_ids=own, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, expected[:, 4:])


@pytest.mark.ranks(4)
def test_a_step_is_recorded_for_the_planner(ranks):
    path = ranks.shared_path / "runs" / "run.json"
    grid = HyperCommGrid([1, 4], ["dp", "pp"])
    with Pipeline(made(MAKERS["gpt2"]), "Et|t|t|tL", grid, loss=next_words) as pipeline:
        first = pipeline.step(texts(0))
        pipeline.record(path)
        assert not path.exists()
        assert pipeline.step(texts(0)) == first
        recorded = recording_from_json(path.read_text())
        assert recorded.plan == pipeline.plan(ROWS)
        counts = [len(track.actions) for track in recorded.tracks]
        assert counts == [sum(1 for _ in recorded.plan.actions(place)) for place in range(4)]
        ranks.barrier()  # all have read it
        if ranks.rank == 0:
            path.unlink()
        ranks.barrier()
        pipeline.step(texts(0))
        assert not path.exists()


@pytest.mark.ranks(2)
def test_a_monitor_tells_every_rank_the_first_failure(ranks):
    def broken(output, batch):
        raise RuntimeError("no loss today")

    grid = HyperCommGrid([2], ["pp"])
    config = PipelineConfig(variable_seq_lengths=True, deadline=30.0)
    pipeline = Pipeline(made(MAKERS["gpt2"]), "Ett|ttL", grid, config=config, loss=broken, monitor=True)
    assert isinstance(pipeline.config.monitor, Monitor)
    with pytest.raises(PipelineError, match="rank 1, stage 1, microbatch 0: RuntimeError: no loss today"):
        pipeline.step(texts(0))
    ranks.barrier()
    pipeline.close()


def job(**options):
    """A job of two stages, with what a test changes."""
    given = {"layout": "Ett|ttL", "grid": HyperCommGrid([2], ["pp"]), "loss": next_words} | options
    return Pipeline(made(MAKERS["gpt2"]), **given)


@pytest.mark.ranks(2)
def test_what_cannot_be_a_job_is_a_typed_error_on_every_rank(ranks):
    for options, text in [
        ({"layout": None}, "layout is None and grid .*; a model has both"),
        ({"grid": HyperCommGrid([1], ["pp"])}, r"a world of 2 ranks: no grid has the ranks \[1\]"),
        ({"layout": "Et|tt|tL"}, r"layout 'Et\|tt\|tL' has 3 stages, and the grid 2 pp ranks; give a multiple"),
        ({"num_microbatches": 2, "microbatch_size": 1}, "cut a batch in two ways; give one of them"),
        ({"monitor": "yes"}, "monitor is 'yes'; give True, False or a Monitor"),
    ]:
        with pytest.raises(StepArgumentError, match=text):
            job(**options)
    with pytest.raises(StepArgumentError, match="module 'text' is .*; give a PipelineModule"):
        Pipeline({"text": torch.nn.Linear(2, 2)})


@pytest.mark.ranks(2)
def test_what_cannot_be_a_batch_is_a_typed_error_before_anything_is_sent(ranks):
    ids = texts(0)["input_ids"]
    with job(microbatch_size=4) as pipeline:
        for batch, text in [
            ({"input_ids": ids}, "the batch has 6 rows, no multiple of microbatch_size=4; drop the rest"),
            ({"input_ids": ids, "labels": ids[:5]}, "first axes of the batch are {'input_ids': 6, 'labels': 5}"),
            ({"input_ids": ids[:0]}, "first axes of the batch are {'input_ids': 0}"),
            (ids, "batch is .*; give a dict of tensors, or a list of one for each microbatch"),
        ]:
            with pytest.raises(StepArgumentError, match=text):
                pipeline.step(batch)
        assert pipeline.step([texts(0, rows=2), texts(1, rows=4)]).isfinite()  # cut already
    with job(num_microbatches=7) as pipeline, pytest.raises(StepArgumentError, match="6 rows for num_microbatches=7"):
        pipeline.step(texts(0))


def test_a_first_microbatch_that_fits_both_rules_does_not_decide_for_the_next():
    own, generator = OwnLoss(), torch.Generator().manual_seed(0)
    labels = torch.randint(0, WORDS, (2, 5), generator=generator)
    of_answers = labels.index_fill(1, torch.tensor([0]), -100)  # both rules count 8
    for given, logits, count in (
        (of_answers, torch.zeros(2, 5, WORDS), 8),  # every token alike: both means are log(WORDS)
        (labels, torch.randn(2, 5, WORDS, generator=generator), 10),
        (labels, torch.zeros(2, 5, WORDS), 10),  # known by now
    ):
        loss = F.cross_entropy(logits.flatten(0, 1), given.flatten(), ignore_index=-100)
        part = microbatch({"labels": given}, Share(), torch.device("cpu"))
        assert own(SimpleNamespace(loss=loss, logits=logits), part)[1] == count


def test_a_loss_whose_divisor_is_not_known_is_a_typed_error():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 1] = -100
    part = microbatch({"labels": labels}, Share(), torch.device("cpu"))
    all_labels = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    following = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for mean, count in ((all_labels, 9), (following, 7)):
        total, counted, _ = OwnLoss()(SimpleNamespace(loss=mean, logits=logits), part)
        assert (counted, total) == (count, mean * count)
    with pytest.raises(StageOutputError, match="what it is a mean over is not known. Give Pipeline"):
        OwnLoss()(SimpleNamespace(loss=following + 0.1, logits=logits), part)
    short, nothing = logits[:, :1], torch.tensor(torch.nan)  # texts of one token: no following one
    one = microbatch({"labels": labels[:, :1]}, Share(), torch.device("cpu"))
    total, counted, _ = OwnLoss()(SimpleNamespace(loss=F.cross_entropy(short[:, 0], labels[:, 0]), logits=short), one)
    assert counted == 2
    assert total > 0
    assert OwnLoss()(SimpleNamespace(loss=nothing, logits=short), one)[:2] == (0, 0)
    unlabeled = microbatch({"input_ids": labels}, Share(), torch.device("cpu"))
    with pytest.raises(StageOutputError, match="its own loss needs `labels` in the batch"):
        OwnLoss()(SimpleNamespace(loss=None, logits=logits), unlabeled)


@pytest.mark.ranks(2)
def test_what_an_edge_cannot_carry_is_named_by_its_leaf(ranks):
    def forward(module, batch):
        hidden = module(batch["x"])
        return {"h": hidden, "kind": "causal"}

    modules = {
        "a": PipelineModule(lambda: nn.Linear(4, 4), None, HyperCommGrid([1], ["pp"]), forward=forward),
        "b": PipelineModule(lambda: nn.Linear(4, 4), None, HyperCommGrid([1], ["pp"], rank_offset=1)),
    }
    edges = {("a", "b"): EdgeOptions(payload={"h": Axes("b", "h"), "kind": Whole()})}
    config = PipelineConfig(variable_seq_lengths=True, deadline=30.0)
    pipeline = Pipeline(
        modules, topology={"a": ["b"]}, edges=edges, num_microbatches=1, loss=after_image, config=config
    )
    with pytest.raises(
        PipelineError, match=r"ShapeError: bridge a>b: payload\['kind'\] is 'causal'; the edge declares"
    ):
        pipeline.step({"x": torch.ones(2, 4)})
    ranks.barrier()
    pipeline.close()


@pytest.mark.ranks(2)
def test_what_the_model_has_frozen_stays_frozen(ranks):
    """Adapters train beside frozen weights: `requires_grad` is the model's, by name."""

    def make():
        model = made(llama())()
        model.model.layers[0].requires_grad_(False)
        return model

    expected = {name: parameter.requires_grad for name, parameter in make().named_parameters()}
    with Pipeline(make, "Ett|ttL", HyperCommGrid([1, 2], ["dp", "pp"]), num_microbatches=2) as pipeline:
        (stage,) = pipeline.stages["model"]
        found = {name: parameter.requires_grad for name, parameter in stage.named_parameters()}
        assert found == {name: expected[name] for name in found}
        pipeline.step(texts(0))
        frozen = [parameter for parameter in stage.parameters() if not parameter.requires_grad]
        assert bool(frozen) == (ranks.rank == 0)
        assert all(parameter.grad is None for parameter in frozen)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("schedule", "frozen"), [("1f1b", False), ("zero_bubble_v", True)])
def test_a_vision_module_on_two_lanes_feeds_a_language_model_on_two_stages(ranks, schedule, frozen):
    """Every rank gives the same batch: each vision lane encodes its half of every microbatch."""
    towers, words = HyperCommGrid([2, 1], ["dp", "pp"]), HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2)
    modules = {
        "images": PipelineModule(
            made(Tower), None, towers, forward=lambda tower, batch: tower(batch["pixel_values"]), frozen=frozen
        ),
        "language": PipelineModule(
            made(llama()), "Et|t|t|tL" if schedule == "zero_bubble_v" else "Et|t*3L", words, forward=read_images
        ),
    }
    batch = {**texts(0), **batch_of("clip", rows=ROWS)}
    topology = {"images": ["language"]}
    with Pipeline(modules, topology=topology, schedule=schedule, loss=after_image, microbatch_size=2) as pipeline:
        tower, language = made(Tower)().requires_grad_(not frozen), made(llama())()
        read = seen_and_text(language.model.embed_tokens, tower(batch["pixel_values"]), batch)
        loss, count = after_image(language(**read), batch)
        (loss / count).backward()
        assert (pipeline.replica, pipeline.replicas) == (0, 1)
        torch.testing.assert_close(pipeline.step(batch), (loss / count).detach(), rtol=1e-6, atol=0.0)
        name, whole = ("images", tower) if ranks.rank < 2 else ("language", language)
        assert list(pipeline.stages) == [name]
        assert (pipeline.parameters() == []) == (frozen and name == "images")
        expected = dict(whole.named_parameters())
        for key, parameter in pipeline.named_parameters():  # float32 inside of Llama's norms
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            other = torch.zeros_like(parameter) if expected[key].grad is None else expected[key].grad
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)
        if frozen:
            return
        with pytest.raises(StepArgumentError, match="a microbatch of 1 rows does not divide among the 2 replicas"):
            microbatch(texts(0, rows=1), Share(0, 2), torch.device("cpu"))


class Plus(nn.Linear):
    """A text, and what the encoder has made of its image, if there is one."""

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, text, seen=0.0):
        return super().forward(text + seen)


def squares(output, batch):
    return output.square().sum(), output.shape[0]


@pytest.mark.ranks(4)
def test_microbatches_without_an_image_skip_the_encoder(ranks):
    """Two replicas with three and two microbatches, of which each has one with an image."""
    grids = [HyperCommGrid([2, 1], ["dp", "pp"], rank_offset=2 * place) for place in range(2)]
    modules = {
        "images": PipelineModule(
            made(lambda: nn.Linear(4, 4)), None, grids[0], forward=lambda stage, batch: stage(batch["image"])
        ),
        "language": PipelineModule(
            made(lambda: Plus(4, 4)),
            None,
            grids[1],
            forward=lambda stage, batch: stage(batch["text"], stage.received.get("images", 0.0)),
        ),
    }
    draw = torch.Generator().manual_seed(0)
    data = [[{"text": torch.randn(2, 1, 4, generator=draw).double()} for _ in range(count)] for count in (3, 2)]
    for replica, number in ((0, 1), (1, 0)):
        data[replica][number]["image"] = torch.randn(2, 1, 4, generator=draw).double()
    encoder, language = made(lambda: nn.Linear(4, 4))(), made(lambda: Plus(4, 4))()
    texts = [part for batch in data for part in batch]
    sums = [language(part["text"], encoder(part["image"]) if "image" in part else 0.0).square().sum() for part in texts]
    whole = torch.stack(sums).sum() / (2 * len(texts))
    whole.backward()
    config = PipelineConfig(variable_seq_lengths=True, pipeline_dtype=torch.float64)
    with Pipeline(modules, topology={"images": ["language"]}, config=config, loss=squares) as pipeline:
        batch = data[pipeline.replica]
        without = [number for number, part in enumerate(batch) if "image" not in part]
        routes = agree_on_routes(len(batch), {"images": without}, replica=pipeline.replica)
        torch.testing.assert_close(pipeline.step(batch, routes=routes), whole.detach(), rtol=1e-12, atol=0.0)
        expected = dict((encoder if ranks.rank < 2 else language).named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-14)
            parameter.grad = None
        torch.testing.assert_close(pipeline.evaluate(batch, routes=routes), whole.detach(), rtol=1e-12, atol=0.0)
        with pytest.raises(StepArgumentError, match="move microbatches to other replicas"):
            pipeline.step(batch, routes=evolve(routes, moves={(0, 1): 1}))
        with pytest.raises(StepArgumentError, match="num_microbatches"):
            pipeline.step(batch[:1], routes=routes)
        pipeline.record(ranks.shared_path / "recording.json")
        with pytest.raises(StepArgumentError, match="record"):
            pipeline.step(batch, routes=routes)
