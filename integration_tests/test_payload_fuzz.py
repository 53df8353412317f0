"""Random payloads along the edges of a pipeline with split backwards: gradients and losses are those of one process.

A payload is a random tree of lists, tuples and dicts; its leaves are tensors of four dtypes, with and without grad,
some without rows, some views of a larger buffer, some the same tensor twice, some passed on as received; and None.
"""

from __future__ import annotations

import random

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from pipegrid.schedules import Forwarded, PipelineRuntime, lower, zero_bubble_h1, zero_bubble_v
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.data import normal
from .kit.stages import in_one_process

MICROBATCHES, ROWS, WIDTH = 3, 3, 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
CONTAINERS = (list, tuple, lambda parts: dict(zip(["x", 7, "mask", "y z"], parts, strict=False)))
# Contiguous views of the memory of a tensor [rows, WIDTH], with its values.
VIEWS = {
    "whole": lambda tensor: tensor,
    "second half": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
    "flat": lambda tensor: tensor.view(-1),
    "unsqueezed": lambda tensor: tensor.unsqueeze(1),
    "column of one": lambda tensor: tensor.unsqueeze(-1),
}


# ---- Payloads


@attrs.frozen
class Leaf:
    """A tensor to send: how it is made, its dtype, its rows, and the view of its memory that is sent."""

    kind: str  # "made" of the stage's result, "constant", "index", "passed" on as received, "again" the leaf before
    dtype: torch.dtype
    rows: int
    view: str  # of VIEWS


def random_leaf(rng, *, used):
    if not used and rng.random() < 0.15:
        return None
    kind = "made" if used else rng.choice(["made", "made", "made", "constant", "index", "passed", "again"])
    rows = rng.randrange(1, ROWS + 1) if used else rng.randrange(ROWS + 1)
    return Leaf(kind, rng.choice(DTYPES), rows, rng.choice(["whole", *VIEWS]))


def random_tree(rng, depth=0):
    """A nested payload of leaves."""
    if depth == 3 or (depth and rng.random() < 0.5):
        return random_leaf(rng, used=False)
    parts = [random_tree(rng, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice(CONTAINERS)(parts)


def random_payload(rng):
    """One leaf that carries gradients, alone or beside a random tree: a stage with parameters must have an output."""
    leaf = random_leaf(rng, used=True)
    if rng.random() < 0.2:
        return leaf
    parts = [random_tree(rng), leaf]
    rng.shuffle(parts)
    return rng.choice(CONTAINERS)(parts)


def form(tree):
    """What a receiver can see of a payload's structure: containers, dtypes, shapes."""
    return tree_map_only(torch.Tensor, lambda tensor: (tensor.dtype, tensor.shape), tree)


# ---- Stages


@attrs.frozen
class Case:
    """A random job; ``varying`` payloads have another tree in each microbatch."""

    seed: int
    varying: bool
    communicators: str
    reuse: bool

    @classmethod
    def of(cls, seed):
        rng = random.Random(seed)
        return cls(seed, rng.random() < 0.5, rng.choice(["separate", "shared"]), rng.random() < 0.5)

    def rng(self, stage, microbatch):
        return random.Random(f"{self.seed}, {stage}, {microbatch if self.varying else 'all'}")


class Stage:
    """Sums up what arrives, applies a layer, and makes its random payload of the result."""

    def __init__(self, case, number, graph, device):
        self.case, self.number, self.device = case, number, device
        self.weights = [normal(10 * number + which, WIDTH, WIDTH, device=device).requires_grad_() for which in range(2)]
        self.out = [edge for edge in graph.stage_edges if edge.source == number]
        self.losses = []
        self.forms = {}

    def forward(self, microbatch, inputs):
        rng = self.case.rng(self.number, microbatch)
        x = normal(100 * self.number + microbatch, ROWS, WIDTH, device=self.device)
        arrived = [leaf for leaf in tree_leaves(list(inputs.values())) if leaf is not None]
        self.forms[microbatch] = [form(payload) for payload in inputs.values()]
        for place, tensor in enumerate(arrived):
            if rng.random() < 0.85:  # the others are not used: their gradient is zero
                x = x + tensor.double().reshape(-1, WIDTH).sum(0) * 0.3 / (1 + place)
        hidden = torch.tanh(x @ self.weights[0])
        loss = hidden.square().mean() if not self.out or rng.random() < 0.3 else None
        if loss is not None:
            self.losses.append(loss.detach())
        payload = random_payload(rng)
        return Forwarded({edge: self.payload(payload, hidden, arrived) for edge in self.out}, loss)

    def payload(self, tree, hidden, arrived):
        """A payload of the form of ``tree``."""
        made = []
        exact = [tensor for tensor in arrived if tensor.dtype in (torch.float64, torch.int64)]

        def tensor(leaf):
            # Gradients of several uses are summed in the tensor's dtype: in bfloat16 their order would decide.
            if leaf.kind == "again" and made and made[-1].dtype is torch.float64:
                return made[-1]
            if leaf.kind == "passed" and exact:
                return exact[len(made) % len(exact)]
            if leaf.kind == "index":
                return VIEWS[leaf.view](torch.arange(leaf.rows * WIDTH, device=self.device).view(-1, WIDTH))
            y = (torch.tanh(hidden @ self.weights[1]) * (1 + len(made)))[: leaf.rows].to(leaf.dtype)
            made.append(VIEWS[leaf.view](y.detach() if leaf.kind == "constant" else y))
            return made[-1]

        return tree_map_only(Leaf, tensor, tree)


def check(ranks, seeds, plan):
    """A step for each seed. Cases with the same settings share a communicator, whose fixed shapes are renewed."""
    opened, placement = {}, [place[0] for place in plan.placement]
    for case in map(Case.of, seeds):
        ranks.report_position(case)
        config = P2PConfig(
            variable_seq_lengths=case.varying,
            communicators=case.communicators,
            strict=ranks.strict_sends,
            deadline=120.0,
        )
        if config not in opened:
            opened[config] = P2PCommunicator(dist.group.WORLD, config, placement=placement)
        elif not case.varying:
            opened[config].renew_shapes()
        mine = {number: Stage(case, number, plan.graph, ranks.device) for number in plan.stages_at[ranks.rank]}
        PipelineRuntime(plan, mine, opened[config], reuse_buffers=case.reuse).step()
        whole = [Stage(case, number, plan.graph, ranks.device) for number in range(plan.num_stages)]
        in_one_process(whole, plan.num_microbatches)
        compare(case, mine, whole)
    for communicator in opened.values():
        communicator.close()


def compare(case, mine, whole):
    for number, stage in mine.items():
        where = f"{case}, stage {number}"
        assert stage.forms == whole[number].forms, where
        assert stage.losses == whole[number].losses, where
        for pair in zip(stage.weights, whole[number].weights, strict=True):
            # A part that the next stage does not use has a gradient of zeros where one process has none.
            ours, theirs = (torch.zeros_like(w) if w.grad is None else w.grad for w in pair)
            torch.testing.assert_close(
                ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, where=where: f"{where}: {text}"
            )


@pytest.mark.ranks(2, deadline=300)
def test_thirty_random_payloads(ranks):
    check(ranks, range(30), lower(zero_bubble_h1(2, MICROBATCHES)))


@pytest.mark.nightly
@pytest.mark.ranks(2, deadline=2 * 3600)
def test_two_thousand_random_payloads(ranks):
    check(ranks, range(2000), lower(zero_bubble_h1(2, MICROBATCHES)))


@pytest.mark.nightly
@pytest.mark.ranks(3, 4, deadline=2 * 3600)
def test_random_payloads_through_a_v(ranks):
    check(ranks, range(2000, 2300), lower(zero_bubble_v(ranks.world_size, MICROBATCHES + 2)))
