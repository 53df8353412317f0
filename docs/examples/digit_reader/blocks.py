"""The transformer block that the language model is made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention of a sequence on itself, ``[batch, length, hidden]`` to the same."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; ``mask`` ``[length, length]`` is True where a row may look at a column."""
        # [batch, length, 3, heads, width of a head]; of the heads that are here, where ranks share them
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        output: Tensor = self.output(mixed)
        return output


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised input and added to its stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.perceptron_norm = nn.LayerNorm(hidden)
        self.perceptron = nn.Sequential(
            nn.Linear(hidden, 4 * hidden, bias=False), nn.ReLU(), nn.Linear(4 * hidden, hidden, bias=False)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[batch, length, hidden]`` to the same."""
        attended: Tensor = x + self.attention(self.attention_norm(x), mask)
        thought: Tensor = attended + self.perceptron(self.perceptron_norm(attended))
        return thought
