"""The gradient of a pipelined step is that of the same step on one process: every schedule, size, loss and stage.

A sample of the whole matrix runs always, the matrix nightly.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from attrs import frozen
from torch import nn
from torch.utils.checkpoint import checkpoint

from autograd_kit.blocks import Residual
from autograd_kit.gradients import difference, gradients_of
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.plans.simulate.costs import Costs
from pipegrid.search import greedy

from ..kit.models import WIDTH, uneven
from ..kit.stages import differentiate, stages_of
from ..kit.threads import DEADLINE


def layer(seed):
    made = Residual().double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made


class Words(nn.Module):
    """The first or the last stage of a model whose embedding is its head as well: ``x @ word`` or ``x @ word.T``."""

    def __init__(self, layer, *, head):
        super().__init__()
        generator = torch.Generator().manual_seed(99)
        self.word = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.layer, self.head = layer, head

    def forward(self, x):
        return self.layer(x) @ self.word.t() if self.head else self.layer(x @ self.word)


@frozen
class Case:
    schedule: str
    positions: int
    microbatches: int
    loss: str
    checkpointed: bool
    special: str

    def plan(self):
        receives = "early" if self.schedule == "early receives" else "late"
        name = "1f1b" if self.schedule == "early receives" else self.schedule
        if name == "greedy":
            costs = Costs(F=1, I=1.1, W=0.7, latency=0.1)
            computes = greedy(costs, num_positions=self.positions, num_microbatches=self.microbatches)
        else:
            computes = SCHEDULES[name].plan(self.positions, self.microbatches)
        tied = {"word": (0, computes.num_stages - 1)} if self.special == "tied" else None
        return lower(computes, receives=receives, tied=tied)

    def models(self, num_stages):
        """The stages' modules; the special one is the second, and there is at least one more with parameters."""
        models = [layer(stage) for stage in range(num_stages)]
        if self.special == "frozen":
            models[1].requires_grad_(requires_grad=False)
        elif self.special == "without parameters":
            models[1] = nn.Softsign()
        elif self.special == "empty":
            models[1] = nn.Identity()
        elif self.special == "tied":
            models[0], models[-1] = Words(models[0], head=False), Words(models[-1], head=True)
        return models


def stages(case, plan, models, **options):
    def loss(output, _):
        return (output**2).sum() if case.loss == "tokens" else (output**2).mean() / case.microbatches

    return stages_of(plan.graph, models, data=uneven, loss=loss, **options)


def reducing(plan, *copies):
    """What a ``REDUCE`` of both copies is among threads: one of them adds them up for all."""

    def add_up():
        total = sum(copy.grad for copy in copies)
        for copy in copies:
            copy.grad = total.clone()

    holders = [any(a.kind is ActionKind.REDUCE for a in plan.actions(p)) for p in range(plan.num_positions)]
    return threading.Barrier(sum(holders), add_up, DEADLINE).wait


def in_order(plan):
    """Whether every stage adds up its gradients microbatch by microbatch, as one process does."""
    added = {stage: [] for stage in range(plan.num_stages)}
    for position in range(plan.num_positions):
        for action in plan.actions(position):
            if action.kind in (ActionKind.B, ActionKind.W):
                added[action.stage].append(action.microbatch)
    return all(order == sorted(order) for order in added.values())


def check(case, network):
    plan = case.plan()
    models, whole = case.models(plan.num_stages), case.models(plan.num_stages)
    reducers = {"word": reducing(plan, models[0].word, models[-1].word)} if case.special == "tied" else {}
    options = {"run": partial(checkpoint, use_reentrant=False)} if case.checkpointed else {}
    deallocate = case.microbatches % 2 == 1
    network.run(plan, stages(case, plan, models, **options), reducers=reducers, deallocate_outputs=deallocate)
    if case.special == "tied":  # one parameter, which has the place of both copies below
        whole[-1].word = whole[0].word
    differentiate(plan, stages(case, plan, whole))
    found, expected = gradients_of(models), gradients_of(whole)
    assert difference(found, expected) < 1e-10
    if case.special == "tied":
        # The copies add up what one parameter would by turns, so only they are not bit for bit.
        names = [name for model in models for name, _ in model.named_parameters()]
        words = [number for number, name in enumerate(names) if name == "word"]
        assert torch.equal(*(found[number] for number in words))
        found, expected = (
            [gradient for number, gradient in enumerate(side) if number not in words] for side in (found, expected)
        )
    if in_order(plan):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


NAMES = [*(name for name, schedule in SCHEDULES.items() if schedule.trains), "greedy", "early receives"]
MATRIX = [
    Case(name, positions, microbatches, loss, checkpointed, special)
    for name in NAMES
    for positions in (2, 3, 4)
    for microbatches in (1, positions, 3 * positions, 2 * positions + 1)
    for loss in ("mean", "tokens")
    for checkpointed in (False, True)
    for special in ("none", "frozen", "without parameters", "empty", "tied")
]
SAMPLE = MATRIX[::49]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_gradients_are_those_of_one_process(case, network):
    check(case, network)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process_in_every_case(name, network):
    for case in MATRIX:
        if case.schedule == name:
            network.lanes.clear()
            check(case, network)


def test_the_sample_has_every_value_of_everything():
    for field in ("schedule", "positions", "loss", "checkpointed", "special"):
        assert {getattr(case, field) for case in SAMPLE} == {getattr(case, field) for case in MATRIX}
    assert {case.schedule for case in SAMPLE if case.special == "tied"} == set(NAMES)
    sizes = {(case.microbatches > case.positions) - (case.microbatches < case.positions) for case in SAMPLE}
    assert sizes == {-1, 0, 1}
    split = [case for case in SAMPLE if case.schedule.startswith(("zero", "v_", "dual", "greedy"))]
    assert {case.special for case in split if case.checkpointed} == {case.special for case in MATRIX}


def test_the_order_of_sums_is_the_same_for_most_schedules():
    assert sum(in_order(case.plan()) for case in SAMPLE) > len(SAMPLE) / 2
