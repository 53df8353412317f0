"""Models of random loops over layers: residuals, skips, taps, losses of layers, buffers, masks, writes in place, layers
with one weight; over one list of layers, or over an encoder's and a decoder's. And their stages, one after the other.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from pipegrid.stages import Names, pipeline_stage
from pipegrid.stages.errors import CutError
from stages_kit.chain import gradients, step

WIDTH, WORDS, LAYERS = 6, 20, 5
NAMES = Names("blocks", embedding=("embed", "other"), head=("scale", "head"))

BEFORE = ("none", "mask", "view", "gate", "relu_")
AFTER = (
    "none",
    "tanh",
    "residual",
    "skip",
    "tap",
    "keep",
    "mask_",
    "write",
    "second",
    "loss",
    "add_",
    "zero_",
    "part_",
)
END = (
    *("none", "taps", "last tap", "kept", "first", "embed", "other", "mask", "buffer", "scale twice", "pick"),
    *("per token", "last token"),
)
SHARED = (None, (0, 1), (0, 4), (2, 3))  # two blocks with one linear layer


class Block(nn.Module):
    """Returns its hidden state and something else. The model may write to what it returns: no backward reads that."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        made = torch.tanh(self.linear(hidden))
        return made + 0, made.cos()


class Looped(nn.Module):
    """Runs ``script``: for each layer what comes before and after it, and what comes at the end."""

    def __init__(self, script, end, shared=None):
        super().__init__()
        self.script, self.end = script, end
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.other = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in script)
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        if shared is not None:
            self.blocks[shared[1]].linear = self.blocks[shared[0]].linear

    def forward(self, ids, mask):
        weights = mask.to(self.head.weight.dtype).unsqueeze(-1)
        longest = int(mask.sum(1).max())  # read by the host: known from the batch
        hidden = first = self.embed(ids)
        taps, kept, table, loss = [], None, hidden.new_zeros(len(self.blocks), *hidden.shape), 0.0
        for number, (block, (before, after)) in enumerate(zip(self.blocks, self.script, strict=True)):
            hidden = self.prepared(before, hidden, weights, longest)
            made, second = block(hidden)
            if after == "tanh":
                made = torch.tanh(made * 3) + 0
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
            elif after == "loss":
                loss = loss + made.mean(1).square().mean()
            elif after == "add_":
                made += 0.1
            elif after == "zero_":
                made[mask == 0] = 0
            elif after == "part_":
                made[..., :2] *= 1.5
            hidden = made
        scores = self.finished(hidden, first, taps, kept, table, ids, weights).square()
        if self.end == "per token":
            return (scores * weights).sum() / mask.sum() + loss
        return scores.mean() + loss

    def prepared(self, before, hidden, weights, longest):
        """The input of a layer."""
        if before == "mask":
            return hidden * weights
        if before == "relu_":
            return hidden.relu_()
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
        elif self.end == "last token":
            hidden = hidden[torch.arange(len(ids)), weights.squeeze(-1).sum(1).long() - 1]
        elif self.end == "pick":
            hidden = hidden[weights.squeeze(-1) > 0]
        return self.head(hidden)


class Keeper(Block):
    """Keeps what the model's own code reads, and returns it to nobody."""

    def forward(self, hidden):
        made, self.tap = super().forward(hidden)
        return made, made


class Tapped(Looped):
    """Reads at the end what a layer keeps."""

    def __init__(self, number=1):
        super().__init__((("none", "tanh"),) * LAYERS, "none")
        self.number, self.blocks[number] = number, Keeper()

    def forward(self, ids, mask):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)[0]
        return self.head(hidden + self.blocks[self.number].tap).square().mean()


class Encoder(nn.Module):
    """Runs its script, and returns its hidden state and perhaps what a layer made."""

    def __init__(self, script, end):
        super().__init__()
        self.script, self.end = script, end
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in script)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, mask):
        hidden = first = self.embed(ids)
        for layer, after in zip(self.layers, self.script, strict=True):
            made = layer(hidden)[0]
            hidden = hidden + made if after == "residual" else made + first if after == "skip" else torch.tanh(made)
        hidden = self.norm(hidden * mask.to(hidden.dtype).unsqueeze(-1))
        return (hidden, first) if self.end == "first" else (hidden,)


class Layer(Block):
    """Reads what the encoder made."""

    def forward(self, hidden, encoded):
        return torch.tanh(self.linear(hidden) + encoded.mean(1, keepdim=True))


class Paired(nn.Module):
    """An encoder, and a decoder that runs a script of its own."""

    def __init__(self, before, script, end):
        super().__init__()
        self.encoder, self.script, self.end = Encoder(before, end), script, end
        self.decoder = nn.Module()
        self.decoder.embed = nn.Embedding(WORDS, WIDTH)
        self.decoder.layers = nn.ModuleList(Layer() for _ in script)
        self.head = nn.Linear(WIDTH, 1)

    def get_encoder(self):
        return self.encoder

    def forward(self, ids, mask, words, encoder_outputs=None):
        encoder_outputs = self.encoder(ids, mask) if encoder_outputs is None else encoder_outputs
        encoded = encoder_outputs[0]
        hidden = first = self.decoder.embed(words)
        for layer, after in zip(self.decoder.layers, self.script, strict=True):
            made = layer(hidden, encoded)
            hidden = hidden + made if after == "residual" else made + first if after == "skip" else torch.tanh(made)
        scores = self.head(hidden).square().mean()
        if self.end == "encoded":
            scores = scores + encoded.square().mean()
        elif self.end == "first":
            scores = scores + encoder_outputs[1].square().mean()
        elif self.end == "again":
            scores = scores + self.encoder.embed(words).square().mean()
        return scores * mask.sum() if self.end == "count" else scores


PAIR = Names({"encoder": "encoder.layers", "decoder": "decoder.layers"}, head=("head",))
IN_PAIR = ("tanh", "tanh", "tanh", "residual", "skip")
PAIR_END = ("none", "encoded", "first", "again", "count")


def made(script, end, shared=None):
    """A model in float64, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Looped(script, end, shared).double()


def made_pair(before, script, end):
    """An encoder and a decoder in float64, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Paired(before, script, end).double()


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


def pair_layouts(cuts):
    """The same over three layers of an encoder and three of a decoder."""
    return "E" + "".join(kind + "|" * (number in cuts) for number, kind in enumerate("eeettt", start=1)) + "L"


def stages_are_the_model(whole, layout, given, names, *, proved=False):
    """Whether loss and gradients of the stages, run one after the other, are those of the model.

    Where nothing is ``proved``, they hand on nothing past others.
    """
    stages = pipeline_stage(
        copy.deepcopy(whole), layout, list(range(layout.count("|") + 1)), names=names, allow_empty=True
    )
    for stage in stages:
        stage.proofs = stage.proofs if proved else None
    whole.zero_grad()
    expected = whole(**given)
    expected.backward()
    try:
        loss = step(stages, given, lambda output: output)
    except (CutError, RuntimeError, IndexError):  # stand-ins met a value that is on another stage
        return False
    return _equal(expected.detach(), loss) and all(_equal(right, found) for _, right, found in gradients(whole, stages))


def _equal(a, b):
    a, b = (torch.zeros(1) if one is None else one for one in (a, b))
    return bool((a - b).abs().max() < 1e-9 + 1e-7 * a.abs().max())
