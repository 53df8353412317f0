"""A mixture of experts over two ranks, in pairs: the exchanges of a forward hide behind a backward, and its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.core.edge import Edge
from pipegrid.plans.generators import SCHEDULES
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import ActionKind
from pipegrid.schedules.runtime import Forwarded, PipelineRuntime, TakeTurns, exchange_tokens
from pipegrid.timeline import Recorder
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PCommunicator, P2PConfig

WIDTH, TOKENS, EXPERTS, MICROBATCHES, LAYERS = 4, 7, 2, 6, 2


class Layer(nn.Module):
    """Attention in name, then a token's best expert. ``group``: of ranks with an expert each; None: all are here."""

    def __init__(self, seed, group=None, here=None):
        super().__init__()
        torch.manual_seed(seed)
        self.attention, self.router = (nn.Linear(WIDTH, out).double() for out in (WIDTH, EXPERTS))
        experts = [nn.Linear(WIDTH, WIDTH).double() for _ in range(EXPERTS)]
        self.group, self.experts = group, nn.ModuleList(experts if here is None else [experts[here]])

    def forward(self, x):
        x = x + self.attention(x).tanh()
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        tokens = x[order]
        sends = torch.bincount(chosen, minlength=EXPERTS)
        if self.group is None:
            parts = tokens.split(sends.tolist())
            done = torch.cat([expert(part).tanh() for expert, part in zip(self.experts, parts, strict=True)])
        else:
            receives = torch.empty_like(sends)
            dist.all_to_all_single(receives, sends, group=self.group)
            there, back = sends.tolist(), receives.tolist()
            tokens = exchange_tokens(tokens, self.group, sends=there, receives=back, point="dispatch")
            tokens = self.experts[0](tokens).tanh()
            done = exchange_tokens(tokens, self.group, sends=back, receives=there, point="combine")
        return x + weight[:, None] * done[order.argsort()]


def layers(stage, *where):
    return nn.Sequential(*(Layer(10 * stage + number, *where) for number in range(LAYERS)))


def tokens(lane, microbatch):
    generator = torch.Generator().manual_seed(100 * lane + microbatch)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


class Part:
    """A stage of a chain of ``count``."""

    def __init__(self, number, count, model, lane):
        self.number, self.count, self.model, self.lane = number, count, model, lane

    def forward(self, microbatch, inputs):
        y = self.model(next(iter(inputs.values())) if inputs else tokens(self.lane, microbatch))
        if self.number == self.count - 1:
            return Forwarded({}, y.square().sum())
        return Forwarded({Edge(self.number, self.number + 1): y})


def expected(count):
    """The model in one process, with the gradients of all tokens of both lanes."""
    stages = [layers(stage) for stage in range(count)]
    for lane in range(EXPERTS):
        for microbatch in range(MICROBATCHES):
            nn.Sequential(*stages)(tokens(lane, microbatch)).square().sum().backward()
    return stages


@pytest.mark.ranks(4)
@pytest.mark.parametrize("turns", [False, True], ids=["one after the other", "by turns"])
@pytest.mark.parametrize("name", ["dualpipe_v", "interleaved_1f1b", "zero_bubble_v"])
def test_gradients_are_those_of_one_process_and_exchanges_travel_while_the_other_computes(ranks, name, turns):
    grid = HyperCommGrid([2, 2], ["ep", "pp"])
    pp, ep = grid.create_pgs(["pp", "ep"])
    here = grid.coords(ranks.rank)
    plan = lower(SCHEDULES[name].plan(2, MICROBATCHES, overlap=True))
    stages = plan.stages_at[here["pp"]]
    models = {stage: layers(stage, ep, here["ep"]) for stage in stages}
    config = P2PConfig(pipeline_dtype=torch.float64, deadline=60)
    communicator = P2PCommunicator(pp, config, placement=[place for (place,) in plan.placement])
    recorder = Recorder()
    runtime = PipelineRuntime(
        plan,
        {stage: Part(stage, plan.num_stages, model, here["ep"]) for stage, model in models.items()},
        communicator,
        hooks=[recorder],
    )
    if turns:
        runtime.register(ActionKind.F_B, TakeTurns(aside=recorder.aside))
    recorder.start()
    runtime.step()
    communicator.close()
    whole = expected(plan.num_stages)
    for stage, model in models.items():
        for mine, theirs in zip(model, whole[stage], strict=True):
            for dense in ("attention", "router"):
                for parameter in getattr(mine, dense).parameters():
                    dist.all_reduce(parameter.grad, group=ep)
                assert _difference(getattr(mine, dense), getattr(theirs, dense)) < 1e-10
            assert _difference(mine.experts[0], theirs.experts[here["ep"]]) < 1e-10
    if turns:
        _require_hidden(plan, here["pp"], recorder.track(plan, rank=ranks.rank, position=here["pp"]))


def _difference(mine, theirs):
    return max(
        float((a.grad - b.grad).abs().max()) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )


def _require_hidden(plan, position, track):
    """While an exchange of one half is under way the other computes: up to the start of its own next one."""
    by_index, actions = {entry.index: entry for entry in track.actions}, list(plan.actions(position))
    # The I of a first stage has no input to differentiate: all of it runs at its W, which is in no pair.
    pairs = [first for first in plan.pairs[position] if str(actions[first + 1]).rstrip("0123456789") != "0I"]
    assert pairs
    for first in pairs:
        forward, backward = by_index[first], by_index[first + 1]
        assert max(forward.start, backward.start) < min(forward.end, backward.end)
        begin, end = min(forward.start, backward.start), max(forward.end, backward.end)
        inside = sorted((one for one in track.asides if begin <= one.start <= end), key=lambda one: one.start)
        halves = [one.name.split(" of ")[1] for one in inside]
        other = str(actions[first + 1].kind)
        assert halves == [other, "F"] * (2 * LAYERS), "each hands over to the other, the backward first"
        names = [one.name.split(" of ")[0] for one in inside]
        assert names == ["combine", "dispatch", "dispatch", "combine"] * LAYERS
        for one, following in pairwise(inside):
            assert one.start < following.start < one.end, "the next begins while this one is under way"
