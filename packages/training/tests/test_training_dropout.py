"""Dropout: the masks of one process, whatever the cut, the microbatch before and the checkpoints."""

from __future__ import annotations

import pytest
import torch

from pipegrid.training import CutError, DropoutMasks, cut

from .kit import models
from .kit.models import MAKERS, batch_of

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


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["", "checkpointed", "reentrant"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_are_those_of_one_process_whatever_the_cut(layout, checkpointed):
    """All forwards before the first backward, as in a warmup: a checkpoint runs again after other microbatches."""
    model = gpt2()
    stages = cut(model, layout, list(range(layout.count("|") + 1)))
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
    (stage,) = cut(gpt2(), "Et*4L", [0])
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
