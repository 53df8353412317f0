"""Models put together at random, cut by random layouts: equal to the model in one process, or a CutError."""

from __future__ import annotations

import copy
import os
import random
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipegrid.core.errors import P2PError
from pipegrid.schedules import PipelineConfig, PipelineError
from pipegrid.schedules.errors import StageOutputError
from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, Names, Pipeline, pipeline_stage
from stages_kit.chain import gradients, step

from . import host_models
from .skipping_fuzz import BEHIND_EMBEDDING, random_handing, random_handing_on_two_ranks
from .training_fuzz import WORDS, random_case, random_streams

SECONDS = float(os.environ.get("PIPEGRID_FUZZ_SECONDS", "1800"))
"""Of the nightly run; `PIPEGRID_FUZZ_SEED` is its first seed."""


def seeded(make, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 -- the generator that models use
    return make()


def names_of(model):
    embedding, head = (
        [name for name in names if hasattr(model, name)]
        for names in (("position", "alias", *BEHIND_EMBEDDING), ("scale",))
    )
    return Names("blocks", embedding=tuple(embedding), head=tuple(head))


def batch_of(seed):
    ids = torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "mask": (ids % 3 > 0).double()}


def loss_of(logits):
    return logits.double().sin().square().sum()


def require_the_step_of(whole, stages, batch):
    """Loss, gradients summed over tied copies, and buffers of the stages are those of the model in one process."""
    expected = loss_of(whole(**copy.deepcopy(batch)))
    expected.backward()
    assert step(stages, copy.deepcopy(batch), loss_of).item() == pytest.approx(expected.item(), rel=1e-9)
    buffers = dict(whole.named_buffers())
    for stage in stages:
        for name, buffer in stage.named_buffers():
            if name in buffers:
                torch.testing.assert_close(buffer, buffers[name], rtol=1e-9, atol=1e-12, msg=name)
    for name, right, found in gradients(whole, stages):
        zero = torch.zeros_like(whole.get_parameter(name))
        found, right = (zero if each is None else each for each in (found, right))
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


def judge(case, seed):
    """What became of the model of a seed: right or CutError from the model, and from the function that makes it."""
    make, layout, _ = case(seed)
    whole, batch = seeded(make, seed), batch_of(seed)
    names, numbers = names_of(whole), list(range(layout.count("|") + 1))
    found = []
    try:
        model = copy.deepcopy(whole).double()
        reference = copy.deepcopy(model)
        require_the_step_of(reference, pipeline_stage(model, layout, numbers, names=names, allow_empty=True), batch)
        found.append("right")
    except CutError as error:
        found.append(str(error))
    try:
        stages = [
            seeded(lambda n=n: pipeline_stage(make, layout, n, names=names, allow_empty=True), seed) for n in numbers
        ]
        require_initial_values(whole, stages)
        require_the_step_of(whole.double(), [stage.double() for stage in stages], batch)
        found.append("right")
    except CutError as error:
        found.append(str(error))
    return found


def require_judged(case, seed):
    try:
        return judge(case, seed)
    except Exception as error:
        error.add_note(f"seed {seed}: {case(seed)[1:]}")
        raise


@pytest.mark.parametrize("case", [random_case, random_streams])
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, 6),
        pytest.param(0, 20, marks=pytest.mark.thorough),
        pytest.param(20, 20, marks=pytest.mark.nightly),
    ],
)
def test_random_models_are_right_or_a_cut_error(first, count, case):
    found = [require_judged(case, seed) for seed in range(first, first + count)]
    right = sum(each == ["right", "right"] for each in found)
    assert 0.35 * count < right < 0.95 * count  # most are cut, and some cannot be


@pytest.mark.parametrize(
    ("first", "count"), [(0, 8), pytest.param(8, 40, marks=pytest.mark.thorough)], ids=["some", "more"]
)
def test_random_models_whose_stages_hand_on_values_are_right(first, count):
    found = [require_judged(random_handing, seed) for seed in range(first, first + count)]
    assert sum(each == ["right", "right"] for each in found) >= 0.9 * count, found


@pytest.mark.nightly
@pytest.mark.parametrize("case", [random_case, random_streams, random_handing])
def test_many_random_models_are_right_or_a_cut_error(case):
    seed = int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time()))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        require_judged(case, seed)
        seed += 1


# -- models that keep something on the host -------------------------------------------------------------------


def host_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (host_models.ROWS, host_models.TOKENS)
    return [{"ids": torch.randint(0, host_models.WORDS, shape, generator=generator)} for _ in range(3)]


def one_process_of(make, batches):
    """The losses of three microbatches, and the gradients."""
    whole, losses = make(), []
    for batch in batches:
        loss = loss_of(whole(**batch))
        loss.backward()
        losses.append(loss.item())
    return losses, {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}


def judge_host(seed):
    """Whether the stages of a model compute what it does, or what the error says."""
    make, layout, _ = host_models.random_case(seed)
    seeded_make, batches, names = (lambda: seeded(make, seed)), host_batches(seed), Names("blocks")
    random.seed(seed)
    losses, right = one_process_of(seeded_make, batches)
    config = PipelineConfig()
    try:
        numbers = range(layout.count("|") + 1)
        stages = [pipeline_stage(seeded_make, layout, n, names=names, allow_empty=True, config=config) for n in numbers]
        random.seed(seed + 1)  # a rank has a state of its own
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "layout .* is not proved")
            found = [step(stages, batch, loss_of).item() for batch in batches]
    except CutError as error:
        return str(error)
    assert found == pytest.approx(losses, rel=1e-9)
    for stage in stages:
        for name, one in stage.named_parameters():
            torch.testing.assert_close(one.grad, right.get(name), rtol=1e-8, atol=1e-11, msg=name)
    return "right"


def stream_batches(seed):
    return [batch_of(seed + number) for number in range(3)]


def judge_host_on_ranks(seed, case=host_models.random_case, batches_of=host_batches):
    """The same through `Pipeline`, two stages on two ranks (of `random_handing_on_two_ranks` four); else None."""
    make, layout, _ = case(seed)
    if layout.count("|") not in ((1, 3) if case is random_handing_on_two_ranks else (1,)):
        return None
    several = ("interleaved_1f1b", "zero_bubble_v", "dualpipe_v")[seed % 3]
    seeded_make, batches = (lambda: seeded(make, seed).double()), batches_of(seed)
    random.seed(seed)
    losses, right = one_process_of(seeded_make, copy.deepcopy(batches))
    random.seed(seed + 1 + dist.get_rank())
    config = PipelineConfig(variable_seq_lengths=True, deadline=30.0)
    error = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layout .* is not proved|rows have other outputs")
        try:
            with Pipeline(
                seeded_make,
                layout,
                HyperCommGrid([2], ["pp"]),
                schedule="1f1b" if layout.count("|") == 1 else several,
                num_microbatches=len(batches),
                config=config,
                names=names_of(make()),
                loss=lambda logits, _: (loss_of(logits), 1),
            ) as pipeline:
                found = pipeline.step(batches).item()
                gradients_here = {name: one.grad for name, one in pipeline.named_parameters()}
        except (CutError, P2PError, PipelineError, StageOutputError) as failed:
            error = failed
    told = [None, None]
    dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None or any(told):
        assert any("CutError" in text for text in told if text), told
        return "a CutError"
    assert found == pytest.approx(sum(losses) / 3, rel=1e-9)
    for name, one in gradients_here.items():
        if one is None:
            assert name not in right, name
            continue
        expected = right.get(name, torch.zeros_like(one)) / 3
        torch.testing.assert_close(one, expected, rtol=1e-8, atol=1e-11, msg=name)
    return "right"


def judge_streams_on_ranks(seed):
    """A model that writes in place, hands on dicts, and asks parts of the other rank for devices and dtypes."""
    return judge_host_on_ranks(seed, random_streams, stream_batches)


def judge_handing_on_ranks(seed):
    """A model whose stages hand on values past others, most of four stages on two ranks."""
    return judge_host_on_ranks(seed, random_handing_on_two_ranks, stream_batches)


def require_host_judged(seed, judge=judge_host):
    try:
        return judge(seed)
    except Exception as error:
        cases = {judge_streams_on_ranks: random_streams, judge_handing_on_ranks: random_handing_on_two_ranks}
        case = cases.get(judge, host_models.random_case)
        error.add_note(f"seed {seed}: {case(seed)[1:]}")
        raise


def test_stages_of_models_that_keep_something_on_the_host_are_right_or_a_cut_error():
    found = [require_host_judged(seed) for seed in range(5, 15)]
    assert 2 < sum(each == "right" for each in found) < 8


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_models_that_keep_something_on_the_host_are_right_or_a_cut_error_on_two_ranks(ranks):
    found = [require_host_judged(seed, judge_host_on_ranks) for seed in range(5, 13)]
    assert {"right", "a CutError"} <= {*found}


@pytest.mark.ranks(2)
def test_models_that_write_in_place_are_right_or_a_cut_error_on_two_ranks(ranks):
    found = [require_host_judged(seed, judge_streams_on_ranks) for seed in range(12)]
    assert {"right", "a CutError"} <= {*found}


@pytest.mark.thorough
@pytest.mark.ranks(2, deadline=200)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_models_whose_stages_hand_on_values_are_right_on_two_ranks(ranks, seed):
    assert require_host_judged(seed, judge_handing_on_ranks) == "right"


@pytest.mark.nightly
@pytest.mark.ranks(2, deadline=SECONDS + 300)
@pytest.mark.parametrize("judge", [judge_host_on_ranks, judge_streams_on_ranks, judge_handing_on_ranks])
def test_many_models_that_keep_something_on_the_host_are_right_or_a_cut_error_on_two_ranks(ranks, judge):
    seed = torch.tensor(int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time())))
    dist.broadcast(seed, 0)
    end = time.monotonic() + SECONDS
    for number in range(int(seed), int(seed) + 10**6):
        goes_on = torch.tensor(time.monotonic() < end)
        dist.broadcast(goes_on, 0)
        if not goes_on:
            return
        require_host_judged(number, judge)


@pytest.mark.nightly
def test_many_models_that_keep_something_on_the_host_are_right_or_a_cut_error():
    seed = int(os.environ.get("PIPEGRID_FUZZ_SEED", time.time()))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        require_host_judged(seed)
        seed += 1
