"""A small language model with residuals of blocks: each layer reads the ends of all blocks of layers before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention over depth, then one over tokens and a feed-forward part.

    What it adds to is a mean of the embedding, the ends of blocks and the hidden states, weighed by a query of its own
    (attention residuals: Kimi Team 2026).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))
        self.depth_norm = nn.RMSNorm(width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, blocks: list[Tensor], mask: Tensor) -> Tensor:
        """``hidden`` and each of ``blocks`` are [rows, tokens, width]."""
        states = torch.stack([*blocks, hidden])
        weights = (self.depth_norm(states) @ self.query).softmax(0)
        hidden = torch.einsum("drt,drtw->rtw", weights, states)
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        made: Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return made


class BlockResiduals(nn.Module):
    """Layers in blocks of ``block``; their loss is that of the next token."""

    def __init__(
        self, num_layers: int = 16, block: int = 4, *, words: int = 64, width: int = 32, heads: int = 4
    ) -> None:
        super().__init__()
        self.block = block
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of ``ids`` [rows, tokens]."""
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        hidden = self.embed(ids)
        blocks = [hidden]
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, blocks, mask)
            if number % self.block == 0:
                blocks.append(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
