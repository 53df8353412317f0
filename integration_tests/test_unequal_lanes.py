"""Modules with different numbers of replicas, a mean and a token-weighted loss: the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from pipegrid.schedules import clip_grad_norm_

from .kit.models import require_same_gradients
from .kit.two_modules import MICROBATCHES, TwoModules, norm_of, of_one_process


@pytest.mark.ranks(3)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("lanes", [(2, 1), (1, 2)], ids=str)
def test_gradients_and_norm_are_those_of_one_process(ranks, lanes, per_token):
    job = TwoModules(ranks, lanes, calculate_per_token_loss=per_token)
    job.step(range(MICROBATCHES))
    whole = of_one_process([range(MICROBATCHES)], per_token=per_token)
    require_same_gradients(job.stage, job.own(whole), rtol=1e-10, atol=1e-14)
    norm = clip_grad_norm_(job.stage, job.groups, 1e-3)
    torch.testing.assert_close(norm.cpu(), norm_of(whole), rtol=1e-10, atol=0.0)
    job.close()
