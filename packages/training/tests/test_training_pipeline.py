"""One object for a job: gradients, losses, tokens and checkpoints of one process, whatever its modules and schedule."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.nn import functional as F

from pipegrid.bridges import Axes, EdgeOptions, Whole
from pipegrid.core.errors import StepArgumentError
from pipegrid.monitor import DisagreementError, JobFailedError
from pipegrid.schedules import Monitor, PipelineConfig, PipelineError, agree_on_routes, recording_from_json
from pipegrid.schedules.errors import StageOutputError
from pipegrid.stages.errors import CheckpointError
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.torch_compat import living_groups
from pipegrid.training import Pipeline, PipelineModule, pipeline_stage
from pipegrid.training.generation.generate import evaluating
from pipegrid.training.pipeline.counts import sums_of
from pipegrid.training.pipeline.losses import OwnLoss
from pipegrid.training.pipeline.microbatches import Share, microbatch
from stages_kit.gradients import require_gradients
from stages_kit.models import MAKERS, WORDS, batch_of, llama, next_words

from .kit.jobs import counted, made
from .kit.layered import WORDS as LAYERED_WORDS
from .kit.layered import Layered
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


@pytest.mark.few(2)
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


@pytest.mark.few(1)
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


@pytest.mark.thorough
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


@pytest.mark.few(1)
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


@pytest.mark.thorough
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


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("monitor", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_save_that_one_rank_calls_ends_with_the_names_of_the_others(ranks, monitor, first):
    config = PipelineConfig(variable_seq_lengths=True, deadline=4.0)
    pipeline = job(config=config, monitor=monitor)
    pipeline.step(texts(0))
    directory = str(ranks.shared_path / "run")
    if not first:
        pipeline.save(directory, step=1)
    ranks.barrier()
    if ranks.rank == 0:
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"save\(\).*(rank 1 has not joined it|ranks \[1\] did not come)"):
            pipeline.save(directory, step=2)
        assert time.monotonic() - began < 60  # in place of ten minutes
    ranks.barrier()


@pytest.mark.ranks(2)
def test_what_a_pipeline_has_made_ends_with_it(ranks):
    grid = HyperCommGrid([2], ["pp"])
    left = []
    for _ in range(3):
        with job(monitor=True) as pipeline:
            pipeline.step(texts(0))
        pipeline.close()
        left.append((len(living_groups()), threading.active_count()))
    assert left[0] == left[1] == left[2]
    with job(grid=grid) as first:
        second = job(grid=grid)
    assert grid.has_pg("pp")
    second.step(texts(0))  # over the groups that the first has made
    second.close()
    assert not grid.has_pg("pp")
    grid.create_pg("pp")
    job(grid=grid).close()
    assert grid.has_pg("pp")
    first.close()
    grid.destroy()
    assert len(living_groups()) == left[0][0]


def job(**options):
    """A job of two stages, with what a test changes."""
    given = {"layout": "Ett|ttL", "grid": HyperCommGrid([2], ["pp"]), "loss": next_words} | options
    return Pipeline(made(MAKERS["gpt2"]), **given)


@pytest.mark.ranks(2)
def test_a_closed_pipeline_is_freed_by_its_last_reference(ranks):
    """With its lanes, their threads and descriptors; what watches the script's optimizers for the first update too."""
    gc.collect()
    gc.disable()
    try:
        pipeline = job()
        pipeline.step(texts(0))
        torch.optim.SGD(pipeline.parameters(), lr=0.1).step()
        freed = [weakref.ref(each) for each in (pipeline, pipeline.stages["model"][0])]
        pipeline.close()
        del pipeline
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_what_cannot_be_a_job_is_a_typed_error_on_every_rank(ranks):
    for options, text in [
        ({"layout": None}, "layout is None and grid .*; a model has both"),
        (
            {"grid": HyperCommGrid([1], ["pp"])},
            r"a world of 2 ranks: no grid has the ranks \[1\], and spare is \[\]; .*: spare=\[1\]",
        ),
        ({"spare": [1]}, r"no grid has the ranks \[\], and spare is \[1\]"),
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


@pytest.mark.few(2)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("call", "among", "check"),
    [
        *[(*given, False) for given in (("evaluate", (1, 3)), ("clip", (0,)), ("clip", (3,)), ("clip", (1, 3)))],
        ("evaluate", (0,), True),  # beside the comparison of the first update, which one rank then does not join
    ],
)
def test_a_call_of_some_ranks_alone_is_an_error_on_all_and_meets_no_other_call(ranks, call, among, check):
    """A clip beside a step returned the norm of what the others counted."""
    meet_in_other_calls(ranks, HyperCommGrid([2, 2], ["dp", "pp"]), call, among, check=check)


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("among", [(0,), (1,)])
def test_so_where_one_rank_has_all_losses(ranks, among):
    meet_in_other_calls(ranks, HyperCommGrid([2], ["pp"]), "clip", among, check=False)


def meet_in_other_calls(ranks, grid, call, among, *, check):
    config = PipelineConfig(variable_seq_lengths=True, deadline=20.0, check=check)
    with Pipeline(made(llama()), "Ett|ttL", grid, config=config, num_microbatches=2) as pipeline:
        pipeline.step(texts(pipeline.replica, rows=2))
        with pytest.raises((DisagreementError, PipelineError)) as raised:
            if ranks.rank in among:
                getattr(pipeline, call)(1.0 if call == "clip" else texts(pipeline.replica, rows=2))
            else:
                pipeline.step(texts(pipeline.replica, rows=2))
    text = rf"in (step\(\), .* in {call}\(\)|{call}\(\), .* in step\(\))"
    if not (check and ranks.rank in among):  # that one is at its forwards, whose lanes the others close
        assert re.search(text, str(raised.value))


def alone(own, loss, logits, **inputs):
    """The loss of a step of one microbatch, and the first of what it may be a mean over."""
    part = microbatch(inputs, Share(), torch.device("cpu"))
    counts = counted(sums_of([part]))
    found, weight, _ = own(SimpleNamespace(loss=loss, logits=logits), part, counts)
    assert weight == 1
    return found, own.left[0]


def test_a_first_microbatch_that_fits_both_rules_does_not_decide_for_the_next():
    own, generator = OwnLoss(), torch.Generator().manual_seed(0)
    labels = torch.randint(0, WORDS, (2, 5), generator=generator)
    of_answers = labels.index_fill(1, torch.tensor([0]), -100)  # both rules count 8
    for given, logits, both in (
        (of_answers, torch.zeros(2, 5, WORDS), True),  # every token alike: both means are log(WORDS)
        (labels, torch.randn(2, 5, WORDS, generator=generator), False),
        (labels, torch.zeros(2, 5, WORDS), False),  # known by now
    ):
        loss = F.cross_entropy(logits.flatten(0, 1), given.flatten(), ignore_index=-100)
        assert alone(own, loss, logits, labels=given)[1] == "all labels"
        assert ("following tokens" in own.left) == both


def test_a_loss_whose_divisor_is_not_known_is_a_typed_error():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 1] = -100
    all_labels = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    following = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for mean, name in ((all_labels, "all labels"), (following, "following tokens")):
        assert alone(OwnLoss(), mean, logits, labels=labels) == (mean, name)
    with pytest.raises(StageOutputError, match="what it is a mean over is not known. Give Pipeline"):
        alone(OwnLoss(), following + 0.1, logits, labels=labels)
    short, nothing = logits[:, :1], torch.tensor(torch.nan)  # texts of one token: no following one
    one = {"logits": short, "labels": labels[:, :1]}
    found, name = alone(OwnLoss(), F.cross_entropy(short[:, 0], labels[:, 0]), **one)
    assert name == "all labels"
    assert found > 0
    assert alone(OwnLoss(), nothing, **one)[0] == 0
    with pytest.raises(StageOutputError, match="its own loss needs `labels` in the batch"):
        alone(OwnLoss(), None, logits, input_ids=labels)


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


@pytest.mark.few(1)
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
        everything_is_frozen = frozen and name == "images"
        assert (list(pipeline.named_parameters()) == []) == everything_is_frozen
        assert (sum(parameter.numel() for parameter in pipeline.parameters()) == 0) == everything_is_frozen
        expected = dict(whole.named_parameters())
        for key, parameter in pipeline.named_parameters():  # float32 inside of Llama's norms
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            other = torch.zeros_like(parameter) if expected[key].grad is None else expected[key].grad
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)
        if frozen:
            return
        with pytest.raises(StepArgumentError, match="a microbatch of 1 rows does not divide among the 2 replicas"):
            microbatch(texts(0, rows=1), Share(0, 2), torch.device("cpu"))


@pytest.mark.few(1)
@pytest.mark.ranks(5)
@pytest.mark.parametrize("spare", [0, 4])
def test_modules_on_every_other_rank_beside_a_spare_one_are_those_of_one_process(ranks, spare):
    """One of each module per node; the spare rank may be the one with the store, and ends after all others."""
    folder = ranks.shared_path / "run"
    first, second, third, fourth = (rank for rank in range(5) if rank != spare)
    towers = HyperCommGrid([2, 1], ["dp", "pp"], ranks=[first, third])
    words = HyperCommGrid([1, 2], ["dp", "pp"], ranks=[second, fourth])
    modules = {
        "images": PipelineModule(made(Tower), None, towers, forward=lambda tower, batch: tower(batch["pixel_values"])),
        "language": PipelineModule(made(llama()), "Et|t*3L", words, forward=read_images),
    }
    batch = {**texts(0), **batch_of("clip", rows=ROWS)}
    options = {"topology": {"images": ["language"]}, "loss": after_image, "microbatch_size": 2, "spare": [spare]}
    with Pipeline(modules, **options) as pipeline:
        assert pipeline.is_spare is (ranks.rank == spare)
        tower, language = made(Tower)(), made(llama())()
        read = seen_and_text(language.model.embed_tokens, tower(batch["pixel_values"]), batch)
        loss, count = after_image(language(**read), batch)
        (loss / count).backward()
        norms = [
            parameter.grad.norm()
            for whole in (tower, language)
            for parameter in whole.parameters()
            if parameter.grad is not None
        ]
        for found in (pipeline.evaluate(batch), pipeline.step(batch)):
            expected = torch.full_like(found, torch.nan) if pipeline.is_spare else (loss / count).detach()
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)
        held = {"images": tower, "language": language}
        for name, stages in pipeline.stages.items():
            expected = dict(held[name].named_parameters())
            for key, parameter in (named for stage in stages for named in stage.named_parameters()):
                torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-4, atol=1e-7)
        norm = pipeline.clip(1e9)
        pipeline.save(folder, step=1)
        loaded = pipeline.load(folder)
        if pipeline.is_spare:
            assert norm.isnan()
            assert (pipeline.stages, sum(one.numel() for one in pipeline.parameters()), loaded) == ({}, 0, None)
            assert pipeline.generate(batch, 1) is None
            for call in (lambda: pipeline.plan(3), lambda: pipeline.checkpoints(folder)):
                with pytest.raises(StepArgumentError, match="on a spare rank, which takes part in nothing"):
                    call()
        else:
            torch.testing.assert_close(norm.item(), torch.stack(norms).norm().item(), rtol=1e-5, atol=0.0)
            assert loaded.step == 1
        pipeline.record(ranks.shared_path / "recording.json")
        pipeline.step(batch)
        if not pipeline.is_spare:
            tracks = recording_from_json((ranks.shared_path / "recording.json").read_text(encoding="utf-8")).tracks
            assert sorted(track.rank for track in tracks) == [first, second, third, fourth]
            (ranks.shared_path / f"before {ranks.rank}").touch()
    assert len(list(ranks.shared_path.glob("before *"))) == 4 or not pipeline.is_spare


@pytest.mark.ranks(3)
@pytest.mark.fault("kill", rank=1, at="closing")
def test_a_spare_rank_does_not_wait_for_one_that_has_died(ranks):
    config = PipelineConfig(deadline=2.0)
    grid, loss = HyperCommGrid([2, 1], ["dp", "pp"]), lambda output, _: output.square().mean()
    module = PipelineModule(made(lambda: nn.Linear(2, 2)), None, grid)
    pipeline = Pipeline({"model": module}, config=config, loss=loss, spare=[2])
    if ranks.rank == 2:
        text = r"rank 1 had not closed the pipeline 2 s after the first rank had, as spare rank 2 saw"
        with pytest.raises(JobFailedError, match=text):
            pipeline.close()
        return
    ranks.reach("closing")
    pipeline.close()


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


class Normed(nn.Module):
    """Layers with a batch norm and dropout; of the first two, which are frozen, both stay in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)
        )
        self.head = nn.Linear(4, 1)
        for layer in self.layers[:2]:
            layer.requires_grad_(False).eval()
        self.layers[2][2].eval()

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def modes_of(stage):
    """Which of a stage's own layers, and of their parts, are in training mode."""
    own = tuple(stage.layers)
    return {name: module.training for name, module in stage.named_modules() if name.startswith(own)}


@pytest.mark.parametrize("make", [made(Normed), made(Normed)()], ids=["made", "given"])
def test_stages_have_the_modes_of_the_model_module_by_module(make):
    whole = made(Normed)()
    for stage in pipeline_stage(make, "Et|tt|L", [0, 1, 2]):
        assert stage.training
        assert modes_of(stage) == {name: whole.get_submodule(name).training for name in modes_of(stage)}
        with evaluating(stage):
            assert not any(module.training for module in (*stage.modules(), stage.whole))
        assert stage.training
        assert stage.whole.training
        assert modes_of(stage) == {name: whole.get_submodule(name).training for name in modes_of(stage)}


@pytest.mark.ranks(2)
def test_what_is_frozen_in_evaluation_mode_stays_so_through_steps_and_evaluations(ranks):
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64, generator=draw)} for _ in range(3)]
    whole = made(Normed)()
    config = PipelineConfig(variable_seq_lengths=True, deadline=30.0)
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    with Pipeline(made(Normed), "Et|ttL", grid, num_microbatches=1, loss=squares, config=config) as pipeline:
        for batch in batches:
            pipeline.step(batch)
            whole(batch["x"]).square().mean().backward()
            with evaluating(whole):
                expected = whole(**batch).square().mean()
            torch.testing.assert_close(pipeline.evaluate(batch), expected.detach(), rtol=1e-12, atol=0.0)
        require_gradients(pipeline.named_parameters(), whole)
        (stage,) = pipeline.stages["model"]
        right = whole.state_dict()
        for name, buffer in stage.named_buffers():
            if name in right and not name.startswith("head"):
                torch.testing.assert_close(buffer, right[name], rtol=1e-12, atol=0.0, msg=name)


def of_words(logits, batch):
    """Following words, as a sum and their number."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return losses.sum(), losses.numel()


def by_name(named):
    """Options as recipes choose them: no decay for one name, another learning rate for another."""
    return [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name.startswith("word") else 0.5,
            "lr": 0.01 if name.startswith("out") else 0.1,
        }
        for name, parameter in named
    ]


@pytest.mark.ranks(2)
def test_a_tied_weight_has_one_name_by_which_options_fall_alike_on_its_copies(ranks):
    ids = torch.randint(0, LAYERED_WORDS, (4, 5), generator=torch.Generator().manual_seed(0))
    make = made(lambda: Layered(tied=True))
    whole = make()
    single = torch.optim.AdamW(by_name(whole.named_parameters()))
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    with Pipeline(make, "Ett|ttL", grid, num_microbatches=2, loss=of_words) as pipeline:
        named = list(pipeline.named_parameters())
        assert [name for name, parameter in named if parameter.shape[0] == LAYERED_WORDS] == ["word.weight"]
        optimizer = torch.optim.AdamW(by_name(named))
        for _ in range(3):
            pipeline.step({"ids": ids})
            loss, count = of_words(whole(ids), {"ids": ids})
            (loss / count).backward()
            for each in (optimizer, single):
                each.step()
                each.zero_grad()
        expected = dict(whole.named_parameters())
        for name, parameter in named:
            torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checked", [False, True])
def test_copies_of_a_tied_weight_under_other_options_are_an_error_in_the_next_step(ranks, checked):
    """Options by place; with ``check_replicas`` the copies are compared after each reduction, else in the second."""
    ids = torch.randint(0, LAYERED_WORDS, (4, 5), generator=torch.Generator().manual_seed(0))
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    # Without `check`, which compares the first update and is there before them:
    config = PipelineConfig(variable_seq_lengths=True, deadline=30.0, check_replicas=checked, check=False)
    make = made(lambda: Layered(tied=True))
    with Pipeline(make, "Ett|ttL", grid, num_microbatches=2, loss=of_words, config=config) as pipeline:
        pipeline.step({"ids": ids})
        (weight,) = [parameter for parameter in pipeline.parameters() if parameter.shape[0] == LAYERED_WORDS]
        torch.optim.SGD([weight], lr=0.1 + 0.1 * ranks.rank).step()
        with pytest.raises(RuntimeError, match="copies of tied parameter 'word.weight' have drifted apart"):
            pipeline.step({"ids": ids})


class Frozen(nn.Module):
    """Four layers between a projection and a head; all before the third layer is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.head = nn.Linear(4, 1)
        for part in (self.embed, *self.layers[:2]):
            part.requires_grad_(False)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_loop_of_the_docs_runs_on_a_rank_with_nothing_to_train(ranks, kind):
    """Steps, checkpoints and loads in layouts that leave the first rank none, one and none of the parameters."""
    optimizer_of = OPTIMIZERS[kind]
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = made(Frozen)()
    single = optimizer_of([parameter for parameter in whole.parameters() if parameter.requires_grad], lr=0.1)
    for number, layout in enumerate(("Ett|ttL", "Ettt|tL", "Et|tttL")):
        with Pipeline(made(Frozen), layout, HyperCommGrid([1, 2], ["dp", "pp"]), loss=squares) as pipeline:
            optimizer = optimizer_of(pipeline.parameters(), lr=0.1)
            found = pipeline.load(ranks.shared_path / "run", optimizer)
            assert (found and found.step) == (number or None)
            assert (len(list(pipeline.named_parameters())) == 0) == (ranks.rank == 0 and number != 1)
            pipeline.step({"x": x})
            (whole(x).square().sum() / len(x)).backward()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            torch.testing.assert_close(pipeline.clip(0.1), norm, rtol=1e-12, atol=0.0)
            torch.nn.utils.clip_grad_norm_(pipeline.parameters(), 1e9)  # as other code does
            for each in (optimizer, single):
                each.step()
                each.zero_grad()
            expected = dict(whole.named_parameters())
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-12, msg=name)
            pipeline.save(ranks.shared_path / "run", optimizer, step=number + 1)
