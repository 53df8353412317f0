"""Models put together at random, cut by random layouts: equal to the model in one process, or a CutError."""

from __future__ import annotations

import copy
import os
import random
import time

import numpy as np
import pytest
import torch

from pipegrid.training import CutError, Names, cut

from .test_training_cut import sent, tensors
from .training_fuzz import WORDS, random_case

SECONDS = float(os.environ.get("PIPEGRID_FUZZ_SECONDS", "1800"))
"""Of the nightly run; `PIPEGRID_FUZZ_SEED` is its first seed."""


def seeded(make, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- the generator that models use
    return make()


def names_of(model):
    beside = [name for name in ("position",) if hasattr(model, name)]
    return Names("blocks", embedding=tuple(beside), head=("scale",))


def batch_of(seed):
    ids = torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "mask": (ids % 3 > 0).double()}


def loss_of(logits):
    return logits.double().sin().square().sum()


def run(stages, batch):
    """Forward and backward through the stages in turn, as if each were on a rank of its own; the loss."""
    arrived, left = [None], []
    for stage in stages:
        stage.set_input_tensor([arrived[-1]])
        left.append(stage(**batch))
        arrived.append(sent(left[-1]) if not stage.is_last else None)
    loss = loss_of(left[-1])
    loss.backward()
    for outputs, inputs in reversed(list(zip(left[:-1], arrived[1:-1], strict=True))):
        pairs = [
            (output, received.grad)
            for output, received in zip(tensors(outputs), tensors(inputs), strict=True)
            if output.requires_grad and received.grad is not None
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    return loss.item()


def require_the_step_of(whole, stages, batch):
    """Loss, gradients summed over tied copies, and buffers of the stages are those of the model in one process."""
    expected = loss_of(whole(**batch))
    expected.backward()
    assert run(stages, batch) == pytest.approx(expected.item(), rel=1e-9)
    of_name = dict(whole.named_parameters(remove_duplicate=False))
    summed, counted = {}, set()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if id(parameter) not in counted and parameter.grad is not None:
                key = id(of_name[name])
                summed[key] = summed.get(key, 0) + parameter.grad
            counted.add(id(parameter))
        for name, buffer in stage.named_buffers():
            if name in dict(whole.named_buffers()):
                torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-9, atol=1e-12, msg=name)
    for name, parameter in whole.named_parameters():
        right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = summed.get(id(parameter), torch.zeros_like(parameter))
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-11, msg=name)


def require_initial_values(whole, stages):
    values = dict(whole.named_parameters(remove_duplicate=False))
    held = [name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)]
    assert sorted(held) == sorted(values)
    for stage in stages:
        for name, value in (*stage.named_parameters(), *stage.state_dict().items()):
            expected = values.get(name, whole.state_dict().get(name))
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), f"initial value of {name}"
            if name in values and isinstance(value, torch.nn.Parameter):
                assert value.requires_grad == values[name].requires_grad


def judge(seed):
    """What became of the model of a seed: right or CutError from the model, and from the function that makes it."""
    make, layout, _ = random_case(seed)
    whole, batch = seeded(make, seed), batch_of(seed)
    names, numbers = names_of(whole), list(range(layout.count("|") + 1))
    found = []
    try:
        model = copy.deepcopy(whole).double()
        reference = copy.deepcopy(model)
        require_the_step_of(reference, cut(model, layout, numbers, names=names, allow_empty=True), batch)
        found.append("right")
    except CutError as error:
        found.append(str(error))
    try:
        stages = [seeded(lambda n=n: cut(make, layout, n, names=names, allow_empty=True), seed) for n in numbers]
        require_initial_values(whole, stages)
        require_the_step_of(whole.double(), [stage.double() for stage in stages], batch)
        found.append("right")
    except CutError as error:
        found.append(str(error))
    return found


def require_judged(seed):
    try:
        return judge(seed)
    except Exception as error:
        error.add_note(f"seed {seed}: {random_case(seed)[1:]}")
        raise


def test_random_models_are_right_or_a_cut_error():
    found = [require_judged(seed) for seed in range(40)]
    right = sum(each == ["right", "right"] for each in found)
    assert 15 < right < 38  # most are cut, and some cannot be


@pytest.mark.nightly
def test_many_random_models_are_right_or_a_cut_error():
    seed = int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time()))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        require_judged(seed)
        seed += 1
