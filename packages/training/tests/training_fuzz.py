"""Models put together from parts at random: ties, copies, buffers, casts, heads, writes in place, dicts between layers,
and forwards that a cut cannot run."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WORDS, WIDTH = 11, 8
BLOCKS = ("linear", "mlp", "norm", "tuple", "buffer", "weight_norm", "attention", "batch_norm", "statistics", "masked")
EDITS = (
    "tie the head",
    "tie two blocks",
    "share a child",
    "share memory",
    "copy a block by load_state_dict",
    "copy a block by copy_",
    "replace a block by a deep copy",
    "scaled copy",
    "clone the embedding into the head",
    "chain of copies",
    "average of blocks",
    "resize",
    "new head",
    "remake a parameter",
    "bfloat16",
    "half and float",
    "double",
    "buffer of a parameter",
    "attribute of a parameter",
    "hidden tie",
    "module in a list",
    "frozen",
    "python random",
    "numpy random",
    "apply",
    "orthogonal",
    "truncated",
    "data",
    "state_dict of another model",
    "deep copy of the model",
    "swap two blocks",
)
FORWARDS = (
    *("plain",) * 12,
    "tanh between",
    "residual outside",
    "skip",
    "embedding again",
    "all outputs",
    "scale in each",
    "twice",
    "reversed",
    "other dtype",
)
STREAMS = ("tensor", "tensor", "tuple of two", "dict", "dict with a mask")
"""What layers take and return."""
WRITES = (
    "adds",
    "masks",
    "part",
    "embedding",
    "batch",
    "first",
    "relu first",
    "input of layers",
    "dropout",
    "view before",
    "another name",
)
"""Writes in place, of the model between its layers and of its layers."""
ASKS = ("device", "zeros like", "new zeros", "to another weight", "next of parameters", "values")
"""What the model's own code asks of parts of other stages."""


class Block(nn.Module):
    """A layer of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "mlp":
            self.child = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        elif kind == "norm":
            self.child = nn.LayerNorm(WIDTH)
        elif kind == "weight_norm":
            self.child = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        elif kind == "attention":
            self.child = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif kind == "batch_norm":
            self.child = nn.BatchNorm1d(WIDTH)
        elif kind == "buffer":
            self.register_buffer("offset", torch.randn(WIDTH))
            self.register_buffer("factor", torch.rand(WIDTH), persistent=False)
        elif kind == "statistics":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden, mask=None):
        if isinstance(hidden, tuple):
            hidden = hidden[0]
        out = torch.tanh(self.linear(hidden))
        if self.kind in ("mlp", "norm", "weight_norm"):
            out = hidden + self.child(out)
        elif self.kind == "attention":
            out = hidden + self.child(out, out, out, need_weights=False)[0]
        elif self.kind == "batch_norm":
            out = self.child(out.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "buffer":
            out = out * self.factor + self.offset
        elif self.kind == "statistics":
            with torch.no_grad():
                self.seen += 1
        elif self.kind == "masked" and mask is not None:
            out = out * mask[..., None]
        return (out, None) if self.kind == "tuple" else out


class Writing(nn.Module):
    """A layer that may write to its input, and that hands on more than a tensor; no backward reads what it returns."""

    def __init__(self, stream, writes):
        super().__init__()
        self.linear, self.stream, self.writes = nn.Linear(WIDTH, WIDTH), stream, writes
        self.act = nn.ReLU(inplace=True)

    def forward(self, stream):
        hidden = stream if isinstance(stream, torch.Tensor) else next(iter(parts_of(stream)))
        if "relu first" in self.writes:
            hidden = self.act(hidden)
        made = torch.tanh(self.linear(hidden.clone()))
        if (
            "input of layers" in self.writes and "relu first" not in self.writes
        ):  # the backward of ReLU reads its result
            hidden += made
        else:
            hidden = hidden + made
        if self.stream == "tuple of two":
            return hidden, stream[1] + hidden.mean(-1)
        if self.stream == "tensor":
            return hidden
        return {**stream, "hidden": hidden, "sum": stream["sum"] + hidden.mean(-1)}


def parts_of(stream):
    return stream.values() if isinstance(stream, dict) else stream


class Streams(nn.Module):
    """The model of a seed, whose own code writes in place, and asks parts of other stages for devices and dtypes."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        self.stream = choose.choice(STREAMS)
        self.writes = choose.sample(WRITES, choose.choice((0, 1, 1, 2, 3)))
        self.asks = choose.sample(ASKS, choose.choice((0, 0, 1, 2)))
        self.words = nn.Embedding(WORDS, WIDTH)
        if choose.random() < 0.3:
            self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Writing(self.stream, self.writes) for _ in range(choose.randint(2, 5)))
        if choose.random() < 0.4:
            self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        if choose.random() < 0.3:
            self.alias = self.words

    def forward(self, ids, mask=None):
        if "batch" in self.writes:
            ids.add_(1).remainder_(WORDS)
        hidden = getattr(self, "alias", self.words)(ids)
        if hasattr(self, "before"):
            hidden = self.before(hidden)
        if "embedding" in self.writes:
            hidden *= 1.5
        flat = hidden.view(-1, WIDTH)
        stream = self.started(hidden, mask)
        for block in self.blocks:
            stream = block(stream)
            hidden = stream if isinstance(stream, torch.Tensor) else next(iter(parts_of(stream)))
            self.written(hidden, ids)
            asked = self.asked(hidden)
            if "first" in self.writes and block is self.blocks[0]:
                hidden.mul_(0.5)
            stream = self.replaced(stream, hidden + asked)
        hidden = stream if isinstance(stream, torch.Tensor) else next(iter(parts_of(stream)))
        if not isinstance(stream, torch.Tensor):
            hidden = hidden + (stream["sum"] if isinstance(stream, dict) else stream[1])[..., None]
        if "view before" in self.writes:
            hidden = hidden + flat.view(hidden.shape)
        if hasattr(self, "norm"):
            hidden = self.norm(hidden)
        return self.head(hidden)

    def started(self, hidden, mask):
        """What the first layer takes."""
        if self.stream == "tensor":
            return hidden
        if self.stream == "tuple of two":
            return hidden, hidden.mean(-1)
        return {"hidden": hidden, "sum": hidden.mean(-1)} | (
            {"mask": mask} if self.stream == "dict with a mask" else {}
        )

    def replaced(self, stream, hidden):
        """The stream with another hidden state, where the code of the model makes one."""
        if not self.asks or isinstance(stream, torch.Tensor):
            return hidden if self.asks else stream
        return (hidden, *stream[1:]) if isinstance(stream, tuple) else {**stream, "hidden": hidden}

    def written(self, hidden, ids):
        """The writes behind each layer."""
        if "adds" in self.writes:
            hidden += 0.1
        if "masks" in self.writes:
            hidden[ids % 3 == 0] = 0
        if "part" in self.writes:
            hidden[..., :3] *= 2
        if "dropout" in self.writes:
            F.dropout(hidden, 0.0, self.training, inplace=True)
            hidden.clamp_(min=-3)
        if "another name" in self.writes:
            view = hidden.transpose(0, 1)
            view.sub_(0.2)

    def asked(self, hidden):
        """Zeros, by way of parts that may be on another stage; ``values`` reads one of them."""
        made = 0
        if "device" in self.asks:
            made = made + torch.zeros(WIDTH, device=self.head.weight.device, dtype=self.words.weight.dtype)
        if "zeros like" in self.asks:
            made = made + torch.zeros_like(self.head.weight).sum()
        if "new zeros" in self.asks:
            made = made + self.words.weight.new_zeros(self.head.weight.shape[1])
        if "to another weight" in self.asks:
            made = made + torch.zeros(WIDTH).to(self.head.weight)
        if "next of parameters" in self.asks:
            made = made + torch.zeros((), device=next(self.words.parameters()).device, dtype=hidden.dtype)
        if "values" in self.asks:
            made = made + self.head.bias.mean() * 0.1
        return made


def random_streams(seed):
    """A function that makes a model that writes, its layout and what was chosen."""
    with torch.random.fork_rng():
        model = Streams(seed)
    choose, count = random.Random(-seed), len(model.blocks)
    stages = choose.randint(2, min(4, count + 1))
    bounds = [0, *sorted(choose.choices(range(count + 1), k=stages - 1)), count]
    layout = "E" + "|".join("t" * (after - before) for before, after in pairwise(bounds)) + "L"
    return lambda: Streams(seed), layout, (model.stream, model.writes, model.asks)


class Random(nn.Module):
    """The model of a seed."""

    def __init__(self, seed):
        super().__init__()
        choose = self.choose = random.Random(seed)  # its own: the script's generators are under test
        self.way = choose.choice(FORWARDS)
        self.words = nn.Embedding(WORDS, WIDTH)
        if choose.random() < 0.4:
            self.position = nn.Parameter(torch.randn(5, WIDTH) * 0.1)
        if choose.random() < 0.3:
            self.before = nn.Linear(WIDTH, WIDTH)
        count = choose.randint(2, 5)
        if choose.random() < 0.3:
            template = Block(choose.choice(BLOCKS))
            blocks = [copy.deepcopy(template) for _ in range(count)]
        else:
            blocks = [Block(choose.choice(BLOCKS)) for _ in range(count)]
        self.blocks = nn.ModuleList(blocks)
        if choose.random() < 0.4:
            self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=choose.random() < 0.5)
        self.scale = nn.Parameter(torch.ones(WIDTH) * 0.9)

    def forward(self, ids, mask=None):
        hidden = self.words(ids)
        if hasattr(self, "position"):
            hidden = hidden + self.position
        if hasattr(self, "before"):
            hidden = self.before(hidden)
        first, outputs = hidden, []
        blocks = list(self.blocks)
        if self.way == "reversed":
            blocks.reverse()
        for block in blocks:
            result = block(hidden, mask)
            if self.way == "twice":
                result = block(result, mask)
            result = result[0] if isinstance(result, tuple) else result
            if self.way == "tanh between":
                result = torch.tanh(result)
            elif self.way == "residual outside":
                result = hidden + result
            elif self.way == "scale in each":
                result = result * self.scale
            elif self.way == "other dtype":
                result = result.to(torch.float64)
            hidden = result
            outputs.append(hidden)
        if self.way == "skip":
            hidden = hidden + first
        elif self.way == "all outputs":
            hidden = torch.stack(outputs).mean(0)
        if hasattr(self, "norm"):
            hidden = self.norm(hidden)
        if hasattr(self, "hidden_weights"):
            return F.linear(hidden * self.scale, self.hidden_weights[0].to(hidden.dtype))
        if hasattr(self, "hidden_module"):
            return F.linear(self.hidden_module[0](hidden * self.scale), self.head.weight)
        if self.way == "embedding again":
            return self.head(hidden * self.scale) + self.words(ids).sum(-1, keepdim=True)
        return self.head(hidden * self.scale)


def edited(model, edit):
    """``model`` after one of ``EDITS``."""
    choose, blocks = model.choose, model.blocks
    one, other = choose.sample(range(len(blocks)), 2)
    match edit:
        case "tie the head" if len(model.head.weight) == len(model.words.weight):
            model.head.weight = model.words.weight
        case "tie two blocks":
            blocks[one].linear.weight = blocks[other].linear.weight
        case "share a child":
            blocks[one].linear = blocks[other].linear
        case "share memory":
            blocks[one].linear.weight.data = blocks[other].linear.weight.data
        case "copy a block by load_state_dict" if blocks[one].kind == blocks[other].kind:
            # One of them may have a buffer that an edit before has made.
            blocks[one].load_state_dict(blocks[other].state_dict(), strict=False, assign=choose.random() < 0.3)
        case "copy a block by copy_":
            with torch.no_grad():
                blocks[one].linear.weight.copy_(blocks[other].linear.weight)
        case "replace a block by a deep copy":
            blocks[one] = copy.deepcopy(blocks[other])
        case "scaled copy":
            with torch.no_grad():
                blocks[one].linear.weight.copy_(blocks[other].linear.weight * 0.5 + torch.randn(WIDTH, WIDTH) * 0.1)
        case "clone the embedding into the head" if len(model.head.weight) == len(model.words.weight):
            model.head.weight = nn.Parameter(model.words.weight.detach().clone())
        case "chain of copies":
            for before, after in pairwise(blocks):
                after.linear.load_state_dict(before.linear.state_dict())
                nn.init.normal_(before.linear.bias)
        case "average of blocks":
            with torch.no_grad():
                blocks[one].linear.weight.copy_(torch.stack([block.linear.weight for block in blocks]).mean(0))
        case "resize":
            rows = nn.Embedding(WORDS + 3, WIDTH)
            with torch.no_grad():
                rows.weight[:WORDS] = model.words.weight
            model.words = rows
        case "new head":
            model.head = nn.Linear(WIDTH, 3)
        case "remake a parameter":
            model.scale = nn.Parameter(torch.rand(WIDTH))
        case "bfloat16":
            model = model.to(torch.bfloat16)
        case "half and float":
            model = model.half().float()
        case "double":
            model = model.double()
        case "buffer of a parameter":
            blocks[one].register_buffer("copied", blocks[other].linear.weight.detach().clone())
            model.register_buffer("mean", model.words.weight.detach().mean(0), persistent=False)
        case "attribute of a parameter":
            blocks[one].start = blocks[other].linear.bias.detach() * 2
        case "hidden tie" if model.head.weight.shape[0] == WORDS:
            model.hidden_weights = [model.words.weight]
        case "module in a list":
            model.hidden_module = [blocks[one].linear]
        case "frozen":
            blocks[one].requires_grad_(False)
        case "python random":
            with torch.no_grad():
                blocks[one].linear.weight.mul_(random.random())
        case "numpy random":
            blocks[one].linear.bias = nn.Parameter(torch.tensor(np.random.rand(WIDTH)).float())  # noqa: NPY002
        case "apply":
            model.apply(lambda part: nn.init.normal_(part.weight) if type(part) is nn.Linear else None)
        case "orthogonal":
            nn.init.orthogonal_(blocks[one].linear.weight)
        case "truncated":
            nn.init.trunc_normal_(blocks[one].linear.weight)
        case "data":
            blocks[one].linear.weight.data.uniform_()
            blocks[other].linear.bias.data = torch.randn(WIDTH)
        case "state_dict of another model":
            source = nn.Linear(WIDTH, WIDTH)
            blocks[one].linear.load_state_dict(source.state_dict())
            blocks[other].linear.load_state_dict(source.state_dict())
        case "deep copy of the model":
            model = copy.deepcopy(model)
        case "swap two blocks":
            blocks[one], blocks[other] = blocks[other], blocks[one]
    return model


def random_case(seed):
    """A function that makes a model, its layout and what was chosen."""
    choose = random.Random(seed)
    edits = choose.sample(EDITS, choose.choice((0, 1, 1, 2, 2, 3)))

    def make():
        model = Random(seed)
        for edit in edits:
            model = edited(model, edit)
        return model

    with torch.random.fork_rng():
        probe = len(Random(seed).blocks)
    stages = choose.randint(2, min(4, probe + 1))
    ends = sorted(choose.choices(range(probe + 1), k=stages - 1))
    bounds = [0, *ends, probe]
    parts = ["t" * (after - before) for before, after in pairwise(bounds)]
    return make, "E" + "|".join(parts) + "L", edits
