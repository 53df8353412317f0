"""Packed samples, and what travels with the hidden states: a stage without data has masks, positions and boundaries."""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipegrid.training import CutError, Names, pipeline_stage
from stages_kit.chain import sent, stages_of, step
from stages_kit.models import WORDS, batch_of, llama, loss_of

from .kit.layered import WIDTH, Layered

README = Path(__file__).parents[1] / "README.md"


def of_readme():
    """The functions of the README's example."""
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(code, names)
    return names


def samples_of(count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def sum_of(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def test_packed_samples_have_the_gradients_of_single_ones():
    """In microbatches of two lanes by the README's functions; stages but the first get no positions of the script."""
    names, samples = of_readme(), samples_of(9)
    stages = stages_of(llama(), "Et|tt|tL", carry=["position_ids"])
    torch.manual_seed(1)
    whole = llama()().double()
    count = 0
    for lane in range(2):
        for batch in names["microbatches_of"](samples, lane, replicas=2, microbatches=2):
            arrived = None
            for stage in stages:
                stage.set_input_tensor([arrived])
                given = {key: batch[key] for key in ("input_ids", "position_ids")} if stage.is_first else {}
                arrived = stage(**given)
            sum_of(arrived.logits, batch["labels"]).backward()
            count += (batch["labels"] != -100).sum()
    for sample in samples:
        sum_of(whole(input_ids=sample[None]).logits, sample[None]).backward()
    assert count == sum(len(sample) - 1 for sample in samples)
    held = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(held[name].grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


class Bounded(nn.Module):
    """A layer whose tokens see the mean of their own sample, as `cu_seqlens` bounds it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cu_seqlens):
        parts = x.split(cu_seqlens.diff().tolist(), dim=1)
        mean = torch.cat([part.mean(dim=1, keepdim=True).expand_as(part) for part in parts], dim=1)
        return x + torch.tanh(self.linear(mean))


class Variable(Layered):
    """Its layers are told the boundaries of samples."""

    def forward(self, ids, cu_seqlens=None):
        return super().forward(ids, cu_seqlens)


def test_middle_stages_read_the_boundaries_that_travel():
    names, samples = of_readme(), samples_of(4)
    batch = names["packed"](samples)
    stages = stages_of(partial(Variable, Bounded), "Et|tt|tL", names=Names("layers"), carry="cu_seqlens")
    torch.manual_seed(1)
    whole = Variable(Bounded).double()
    hidden = None
    for stage in stages:
        stage.set_input_tensor([hidden])
        hidden = stage(batch["input_ids"], batch["cu_seqlens"]) if stage.is_first else stage(batch["input_ids"])
    alone = torch.cat([whole(sample[None], torch.tensor([0, len(sample)])) for sample in samples], dim=1)
    torch.testing.assert_close(hidden, alone, rtol=1e-12, atol=1e-14)


def test_a_mask_that_travels_is_that_of_the_batch():
    batch = batch_of("llama")
    stages = stages_of(llama(), "Et|tt|tL", carry=("attention_mask",))
    torch.manual_seed(1)
    whole = llama()().double()
    expected = whole(**batch).loss
    expected.backward()
    arrived = None
    for stage in stages:
        stage.set_input_tensor([arrived])
        own = batch if stage.is_first else {"labels": batch["labels"]}
        arrived = stage(**own)
        if not stage.is_last:
            assert torch.equal(arrived[1], batch["attention_mask"])
    arrived.loss.backward()
    assert arrived.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


def test_what_the_model_does_not_take_cannot_travel():
    with pytest.raises(CutError, match="carry has 'mask', and the forward of LlamaForCausalLM takes input_ids"):
        pipeline_stage(llama(), "Et|tttL", 0, carry=("mask",))


class InPlace(nn.Module):
    """Writes into its activation, and counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += len(x)
        return self.norm(self.act(self.linear(x)))


def test_layers_that_write_in_place_and_buffers_are_those_of_one_process():
    def layers():
        return nn.Sequential(OrderedDict(blocks=nn.Sequential(*(InPlace() for _ in range(4)))))

    x = torch.randn(8, 6, dtype=torch.float64)
    torch.manual_seed(1)
    whole = layers().double()
    stages = stages_of(layers, "t|tt|t", names=Names("blocks"))
    for _ in range(2):
        whole(x).square().sum().backward()
        hidden, left = x, []
        for stage in stages:
            hidden = hidden if stage.is_first else sent(hidden)
            stage.set_input_tensor([hidden])
            left.append((hidden, stage(x)))
            hidden = left[-1][1]
        gradient = 2 * hidden.detach()
        for given, made in reversed(left):
            made.backward(gradient)
            gradient = given.grad
    state = {name: value for stage in stages for name, value in stage.state_dict().items()}
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14, msg=name)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_stages_under_autocast_compute_as_the_whole_model_does():
    batch = batch_of("llama")
    torch.manual_seed(1)
    whole = llama()()
    torch.manual_seed(1)
    stages = pipeline_stage(llama(), "Et|tt|tL", [0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(**batch).loss
    expected.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(stages, batch, loss_of)
    assert torch.equal(loss, expected.detach())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-2, atol=1e-3)
