"""Models of random loops over layers: residuals, skips, taps, buffers, masks; and their stages, one after the other."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.training import Names, cut

WIDTH, WORDS, LAYERS = 6, 20, 5
NAMES = Names("blocks", embedding=("embed", "other"), head=("scale", "head"))

BEFORE = ("none", "mask", "view", "gate")
AFTER = ("none", "tanh", "residual", "skip", "tap", "keep", "mask_", "write", "second")
END = ("none", "taps", "last tap", "kept", "first", "embed", "other", "mask", "buffer", "scale twice", "pick")


class Block(nn.Module):
    """Returns its hidden state and something else."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        made = torch.tanh(self.linear(hidden))
        return made, made.cos()


class Looped(nn.Module):
    """Runs ``script``: for each layer what comes before and after it, and what comes at the end."""

    def __init__(self, script, end):
        super().__init__()
        self.script, self.end = script, end
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.other = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in script)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids, mask):
        weights = mask.to(self.head.weight.dtype).unsqueeze(-1)
        longest = int(mask.sum(1).max())  # read by the host: known from the batch
        hidden = first = self.embed(ids)
        taps, kept, table = [], None, hidden.new_zeros(len(self.blocks), *hidden.shape)
        for number, (block, (before, after)) in enumerate(zip(self.blocks, self.script, strict=True)):
            hidden = self.prepared(before, hidden, weights, longest)
            made, second = block(hidden)
            if after == "tanh":
                made = torch.tanh(made * 3)
            elif after == "residual":
                made = hidden + made
            elif after == "skip":
                made = made + first
            elif after == "tap":
                taps.append(made)
            elif after == "keep":
                kept = made
            elif after == "mask_":
                made = made.mul(1.5).mul_(weights)
            elif after == "write":
                table[number] = made
            elif after == "second":
                taps.append(second)
            hidden = made
        return self.finished(hidden, first, taps, kept, table, ids, weights).square().mean()

    def prepared(self, before, hidden, weights, longest):
        """The input of a layer."""
        if before == "mask":
            return hidden * weights
        if before == "view":
            return hidden.flatten(1).view(hidden.shape) + longest
        return hidden * torch.arange(1, WIDTH + 1, dtype=hidden.dtype) if before == "gate" else hidden

    def finished(self, hidden, first, taps, kept, table, ids, weights):
        """What is behind the last layer."""
        if self.end == "taps":
            hidden = hidden + sum(taps)
        elif self.end == "last tap" and taps:
            hidden = hidden * taps[-1]
        elif self.end == "kept" and kept is not None:
            hidden = hidden * kept
        elif self.end == "first":
            hidden = hidden + first
        elif self.end == "embed":
            hidden = hidden + self.embed(ids)
        elif self.end == "other":
            hidden = hidden + self.other(ids)
        elif self.end == "mask":
            hidden = hidden * weights
        elif self.end == "buffer":
            hidden = hidden + table.mean(0)
        elif self.end == "scale twice":
            hidden = self.scale(torch.tanh(self.scale(hidden)))
        elif self.end == "pick":
            hidden = hidden[weights.squeeze(-1) > 0]
        return self.head(hidden)


def made(script, end):
    """A model in float64, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Looped(script, end).double()


def batch():
    """Ids and a mask with padding."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ids = torch.randint(0, WORDS, (3, 4))
    mask = torch.ones(3, 4)
    mask[1, 2:] = 0
    return {"ids": ids, "mask": mask}


def layouts(cuts):
    """The layout that ends a stage after each of these numbers of layers."""
    text = "E" + "".join("t" + "|" * (number in cuts) for number in range(1, LAYERS + 1)) + "L"
    return "E|" + text[1:] if 0 in cuts else text


def stages_are_the_model(script, end, layout):
    """Whether loss and gradients of the stages, run one after the other, are those of the model."""
    whole, given = made(script, end), batch()
    whole(**given).backward()
    stages = cut(made(script, end), layout, list(range(layout.count("|") + 1)), names=NAMES, allow_empty=True)
    received, sent = [], []
    for stage in stages:
        if sent:
            received.append(tuple(one.detach().requires_grad_() for one in _tensors(sent[-1])))
            stage.set_input_tensor([received[-1] if isinstance(sent[-1], tuple) else received[-1][0]])
        result = stage(**given)
        sent.append(result)
    sent[-1].backward()
    for values, inputs in zip(reversed(sent[:-1]), reversed(received), strict=True):
        pairs = [(value, one.grad) for value, one in zip(_tensors(values), inputs, strict=True) if one.grad is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
    own = {name: one for stage in stages for name, one in stage.named_parameters()}
    return all(_equal(one.grad, own[name].grad) for name, one in whole.named_parameters())


def _tensors(payload):
    return payload if isinstance(payload, tuple) else (payload,)


def _equal(a, b):
    a, b = (torch.zeros(1) if one is None else one for one in (a, b))
    return bool((a - b).abs().max() < 1e-9 + 1e-7 * a.abs().max())
