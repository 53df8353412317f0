"""A model of no library: layers one after another between an embedding and a projection to words."""

from __future__ import annotations

from torch import nn

WIDTH, WORDS = 4, 50


def linear():
    """A layer."""
    return nn.Linear(WIDTH, WIDTH)


class Layered(nn.Module):
    """Four layers; with ``tied`` the weight of the projection is that of the embedding."""

    def __init__(self, layer=linear, *, tied=False):
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.out.weight = self.word.weight

    def forward(self, ids, *others):
        """Logits, shape [batch, sequence, words]; every layer gets ``others`` as well."""
        hidden = self.word(ids)
        for layer in self.layers:
            hidden = layer(hidden, *others)
        return self.out(hidden)
