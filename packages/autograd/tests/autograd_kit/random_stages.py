"""Stages of random operators, and their gradients by whole backwards or in two halves."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipegrid.autograd import backward_inputs, backward_weights

BATCH, LENGTH, WIDTH = 2, 3, 4
MICROBATCHES = 2


class Stage(nn.Module):
    """Parameters that operators of a random program share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.5 for _ in range(3))
        self.biases = nn.ParameterList(torch.randn(WIDTH) * 0.5 for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.router = nn.Linear(WIDTH, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.attention_first = nn.MultiheadAttention(WIDTH, 2)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.double()


def routed(stage, x):
    """A mixture of experts: each token through one of two, weighted by the router's probability."""
    tokens = x.reshape(-1, WIDTH)
    probabilities, chosen = stage.router(tokens).softmax(-1).max(-1)
    output = torch.zeros_like(tokens)
    for number, expert in enumerate(stage.experts):
        rows = (chosen == number).nonzero().squeeze(1)
        output = output.index_add(0, rows, expert(tokens[rows]) * probabilities[rows].unsqueeze(1))
    return output.view_as(x)


def autocast(stage, x, k):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), stage.weights[k].float(), stage.biases[k].float()).double()


def bent_in_place(x, bend):
    """An in-place operator on an activation of the stage's own."""
    return bend(x * 1.5)


OPERATORS = {
    "matmul": lambda s, x, y, k: x @ s.weights[k],
    "linear": lambda s, x, y, k: F.linear(x, s.weights[k], s.biases[k]),
    "bias": lambda s, x, y, k: x + s.biases[k],
    "gate": lambda s, x, y, k: x * torch.sigmoid(s.biases[k]),
    "derived weight": lambda s, x, y, k: x @ (s.weights[k] * s.weights[k]),
    "weight norm": lambda s, x, y, k: x @ (s.weights[k] / s.weights[k].norm()),
    "penalty": lambda s, x, y, k: x + 0.1 * s.weights[k].norm() + 0.1 * s.biases[k].square().sum(),
    "embedding": lambda s, x, y, k: x + s.weights[k][torch.tensor([0, 2, 0])],
    "layer norm": lambda s, x, y, k: F.layer_norm(x, (WIDTH,), s.biases[k], s.biases[k - 1]),
    "attention": lambda s, x, y, k: s.attention(x, x, x, need_weights=False)[0],
    "attention, sequence first": lambda s, x, y, k: s.attention_first(x, y, y)[0],
    "gru": lambda s, x, y, k: s.gru(x)[0],
    "conv": lambda s, x, y, k: s.conv(x.transpose(1, 2)).transpose(1, 2),
    "experts": lambda s, x, y, k: routed(s, x),
    "checkpoint": lambda s, x, y, k: checkpoint(s.block, x, use_reentrant=False),
    "block": lambda s, x, y, k: s.block(x),
    "autocast": lambda s, x, y, k: autocast(s, x, k),
    "relu in place": lambda s, x, y, k: bent_in_place(x, torch.relu_),
    "add in place": lambda s, x, y, k: bent_in_place(x, lambda z: z.add_(y)),
    "mask in place": lambda s, x, y, k: bent_in_place(x, lambda z: z.masked_fill_(y > 0.5, 0.0)),
    "write in place": lambda s, x, y, k: bent_in_place(x, lambda z: z.index_copy_(1, torch.tensor([1]), y[:, :1])),
    "einsum": lambda s, x, y, k: torch.einsum("bsh,hk->bsk", x, s.weights[k]),
    "sdpa": lambda s, x, y, k: F.scaled_dot_product_attention(x.unsqueeze(1), y.unsqueeze(1), x.unsqueeze(1))[:, 0],
    "mean": lambda s, x, y, k: x + y.mean(1, keepdim=True),
    "product": lambda s, x, y, k: x * torch.tanh(y),
    "sum": lambda s, x, y, k: x + y,
    "halves swapped": lambda s, x, y, k: torch.cat(x.chunk(2, -1)[::-1], -1),
    "cut off": lambda s, x, y, k: x.detach() + 0.5 * y,
    "apart": lambda s, x, y, k: torch.tanh(x.detach() @ s.weights[k]) * torch.sigmoid(s.biases[k]),
    "tanh": lambda s, x, y, k: torch.tanh(x),
}


def program(rng):
    """Operators with the values that they read (two inputs come first), and the values that leave the stage."""
    length = rng.randrange(1, 9)
    steps = [
        (rng.choice(list(OPERATORS)), rng.randrange(2 + at), rng.randrange(2 + at), rng.randrange(3))
        for at in range(length)
    ]
    return steps, [length + 1, *(rng.randrange(2, 2 + length) for _ in range(rng.randrange(2)))]


def forward(stage, steps, outputs, microbatch):
    torch.manual_seed(100 + microbatch)
    inputs = [torch.randn(BATCH, LENGTH, WIDTH).double().requires_grad_() for _ in range(2)]
    values = list(inputs)
    for name, first, second, k in steps:
        values.append(OPERATORS[name](stage, values[first], values[second], k))
    roots = [values[number] for number in outputs if values[number].requires_grad]
    return inputs, roots, [torch.randn_like(root) for root in roots]


def gradients_of(steps, outputs, *, halves=False, before=lambda edges, held: None):
    """Of the inputs of each microbatch and of the parameters, after all forwards and then all backwards.

    ``before(edges, held)`` is called before each backward, with the edges that it starts at and the tensors that stay.
    """
    stage, found, later = Stage(), [], []
    held = [*stage.parameters(), *stage.buffers()]
    for inputs, roots, gradients in [forward(stage, steps, outputs, number) for number in range(MICROBATCHES)]:
        edges = [get_gradient_edge(root) for root in roots]
        before(edges, held)
        if halves:
            arrived, half = backward_inputs(edges, gradients, inputs)
            found += arrived
            later.append(half)
        else:
            if roots:
                torch.autograd.backward(roots, gradients)
            found += [tensor.grad for tensor in inputs]
    for half in later:
        backward_weights(half)
    return found + [parameter.grad for parameter in stage.parameters()]
