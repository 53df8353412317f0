"""Dropout: the masks of one process, whatever the cut, the microbatch before and the checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, DropoutMasks, Pipeline, pipeline_stage
from stages_kit import models
from stages_kit.gradients import require_gradients
from stages_kit.models import MAKERS, batch_of

LAYOUTS = ("Et*4L", "Et|t*3L", "E|tt|t|tL")


def gpt2():
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    return models.gpt2(tie_word_embeddings=False, **rates)().double().train()


def batch(microbatch):
    return {"input_ids": batch_of("gpt2", seed=microbatch)["input_ids"]}


def of_one_process(*, step, lane, microbatches):
    """The logits of each microbatch, and the gradients of all."""
    model, masks = gpt2(), DropoutMasks(seed=5, lane=lane, step=step)
    masks.apply(model)
    logits = []
    for masks.microbatch in range(microbatches):
        logits.append(model(**batch(masks.microbatch)).logits)
        logits[-1].square().mean().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.pairs
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["", "checkpointed", "reentrant"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_are_those_of_one_process_whatever_the_cut(layout, checkpointed):
    """All forwards before the first backward, as in a warmup: a checkpoint runs again after other microbatches."""
    model = gpt2()
    stages = pipeline_stage(model, layout, list(range(layout.count("|") + 1)))
    masks = DropoutMasks(seed=5, lane=1)
    for stage in stages:
        masks.apply(stage)
        if checkpointed is not None:
            stage.whole.activation_checkpointing_enable({"use_reentrant": checkpointed})
    masks.step = 3
    before = torch.get_rng_state()
    losses = []
    expected, gradients = of_one_process(step=3, lane=1, microbatches=3)
    torch.set_rng_state(before)
    for microbatch in range(3):
        received = None
        for stage in stages:
            stage.current_microbatch = microbatch
            stage.set_input_tensor([received])
            received = stage(**batch(microbatch))
        torch.testing.assert_close(received.logits, expected[microbatch], rtol=1e-12, atol=1e-13)
        losses.append(received.logits.square().mean())
    assert torch.equal(torch.get_rng_state(), before), "the script's own generator goes on as it was"
    for loss in losses:
        loss.backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-11, atol=1e-13, msg=name)


def test_every_step_lane_microbatch_and_seed_has_masks_of_its_own():
    model, masks = gpt2(), DropoutMasks(seed=5)
    masks.apply(model)
    seen = []
    for name, number in (("seed", 5), ("seed", 6), ("lane", 1), ("step", 1), ("microbatch", 1)):
        setattr(masks, name, number)
        seen.append(model(**batch(0)).logits)
        assert torch.equal(seen[-1], model(**batch(0)).logits)
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_a_microbatch_of_another_replica_has_the_masks_of_its_home():
    """As the step functions number it, on a stage of replica 0: ``current_replica`` is None at home."""
    (stage,) = pipeline_stage(gpt2(), "Et*4L", [0])
    DropoutMasks(seed=5, lane=0, step=3).apply(stage)
    for lane, replica in ((0, None), (2, 2)):
        expected, _ = of_one_process(step=3, lane=lane, microbatches=2)
        for stage.current_microbatch in range(2):
            stage.current_replica = replica
            stage.set_input_tensor([None])
            found = stage(**batch(stage.current_microbatch)).logits
            torch.testing.assert_close(found, expected[stage.current_microbatch], rtol=1e-12, atol=1e-13)


def test_a_model_with_two_lists_of_layers_is_an_error():
    with pytest.raises(CutError, match="T5ForConditionalGeneration has 2 lists of layers; masks are those of one"):
        DropoutMasks(seed=1).apply(MAKERS["t5"]())
    with pytest.raises(CutError, match="seed is -1"):
        DropoutMasks(seed=-1)


class Noisy(nn.Module):
    """Four layers with dropout."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4))
        self.last = nn.Dropout(0.5)
        self.head = nn.Linear(16, 1)
        self.double()

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.last(hidden))


@pytest.mark.parametrize("layout", ["Et*4|L", "E|t*4|L", "Et*3|tL"])
def test_a_stage_of_the_head_alone_has_the_masks_of_one_process(layout):
    x = torch.ones(4, 4, dtype=torch.float64)
    model, masks = Noisy(), DropoutMasks(seed=5, step=2, microbatch=1)
    masks.apply(model)
    received = None
    for stage in pipeline_stage(Noisy(), layout, list(range(layout.count("|") + 1))):
        masks.apply(stage)
        stage.current_microbatch = 1
        stage.set_input_tensor([received])
        received = stage(x=x)
    torch.testing.assert_close(received, model(x), rtol=1e-12, atol=0.0)


def watched(pipeline):
    """A list of the masks that this rank's layers draw."""
    masks = []
    for stage in pipeline.stages["model"]:
        for name in stage.layers:
            drop = stage.get_submodule(name)[2]
            drop.register_forward_hook(lambda _, given, result: masks.append((result / given[0]).detach()))
    return masks


def gathered(values):
    found = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values.contiguous())
    return found


def mean(output, batch):
    return output.square().mean()


@pytest.mark.ranks(4)
def test_replicas_stages_steps_and_microbatches_have_masks_of_their_own_that_a_checkpoint_goes_on_with(ranks):
    """The script's generators are as without dropout, and so are parameters and buffers."""
    rows = {"x": torch.ones(4, 4, dtype=torch.float64)}
    options = {"grid": HyperCommGrid([2, 2], ["dp", "pp"]), "num_microbatches": 2, "loss": mean}
    with Pipeline(Noisy, "Ett|ttL", **options) as pipeline:
        whole = dict(Noisy().named_parameters())
        assert all(torch.equal(one, whole[name]) for name, one in pipeline.named_parameters())
        torch.manual_seed(7)
        before = torch.get_rng_state()
        masks = watched(pipeline)
        pipeline.step(rows)
        seen = [*masks]
        pipeline.evaluate(rows)
        pipeline.save(ranks.shared_path / "run", step=1)
        masks.clear()
        loss = pipeline.step(rows)
        assert torch.equal(torch.get_rng_state(), before)
        every = [mask for of_rank in gathered(torch.stack([*seen, *masks])) for mask in of_rank]
        assert not any(torch.equal(one, other) for at, one in enumerate(every) for other in every[:at])
    with Pipeline(Noisy, "Ett|ttL", **options) as pipeline:
        assert pipeline.load(ranks.shared_path / "run").same_layout
        again = watched(pipeline)
        assert torch.equal(pipeline.step(rows), loss)
        assert torch.equal(torch.stack(again), torch.stack(masks))
    options["grid"] = HyperCommGrid([1, 4], ["dp", "pp"])
    with Pipeline(Noisy, "Et|t|t|tL", **options) as pipeline:
        assert not pipeline.load(ranks.shared_path / "run").same_layout
        others = watched(pipeline)
        pipeline.step(rows)
        assert not any(torch.equal(one, mask) for one in others for mask in every)


@pytest.mark.ranks(2)
def test_tensor_parallel_ranks_draw_alike_unless_they_are_seeded_otherwise(ranks):
    rows = {"x": torch.ones(2, 4, dtype=torch.float64)}

    def otherwise():
        model = Noisy()
        torch.manual_seed(ranks.rank)
        return model

    for make, alike in ((Noisy, True), (otherwise, False)):
        grid = HyperCommGrid([2, 1, 1], ["tp", "dp", "pp"])
        with Pipeline(make, "Et*4L", grid, num_microbatches=1, loss=mean) as pipeline:
            masks = watched(pipeline)
            pipeline.step(rows)
            one, other = gathered(torch.stack(masks))
            assert torch.equal(one, other) == alike


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_a_checkpointed_layer_draws_the_masks_of_its_forward_again(ranks, schedule):
    texts = batch_of("gpt2", rows=4)
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    with Pipeline(gpt2, "Ett|ttL", grid, schedule=schedule, loss=models.next_words) as pipeline:
        found = []
        for checkpointed in (False, True):
            pipeline.generators["model"].manual_seed(3)
            if checkpointed:
                (stage,) = pipeline.stages["model"]
                stage.whole.activation_checkpointing_enable({"use_reentrant": False})
            pipeline.step(texts)
            found.append([parameter.grad.clone() for parameter in pipeline.parameters()])
            for parameter in pipeline.parameters():
                parameter.grad = None
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.ranks(4)
def test_the_masks_of_one_process_where_a_script_asks_for_them(ranks):
    texts = [batch_of("gpt2", seed=lane, rows=4) for lane in range(2)]
    whole = gpt2()
    sums = []
    for lane, batch in enumerate(texts):
        masks = DropoutMasks(seed=5, lane=lane, step=2)
        masks.apply(model := gpt2())
        for masks.microbatch in range(2):
            part = {name: value[2 * masks.microbatch :][:2] for name, value in batch.items()}
            loss, count = models.next_words(model(**part), part)
            loss.backward()
            sums.append(count)
        for one, other in zip(whole.parameters(), model.parameters(), strict=True):
            one.grad = other.grad + (0.0 if one.grad is None else one.grad)
    for parameter in whole.parameters():
        parameter.grad /= sum(sums)
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(gpt2, "Ett|ttL", grid, num_microbatches=2, loss=models.next_words) as pipeline:
        own = DropoutMasks(seed=5, lane=pipeline.replica, step=2)
        for stage in pipeline.stages["model"]:
            own.apply(stage)
        pipeline.step(texts[pipeline.replica])
        require_gradients(pipeline.named_parameters(), whole)
