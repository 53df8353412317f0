"""The language model, layer by layer, so that a layout can cut it anywhere.

Between its layers travels one tensor: the encoders' tokens and text, ``[batch, seen + TEXT_LENGTH, hidden]``, where
``seen`` tokens come from the encoders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from digit_reader import vocabulary
from digit_reader.blocks import Block
from digit_reader.encoder import IMAGE_TOKENS
from digit_reader.initial import initialise
from digit_reader.sizes import Sizes
from digit_reader.vocabulary import TEXT_LENGTH


class Embedding(nn.Module):
    """Text as vectors, behind what the encoders saw. ``E`` in a layout."""

    def __init__(self, sizes: Sizes, seen: int) -> None:
        super().__init__()
        del seen  # whatever there is, text stands behind it
        self.token = nn.Embedding(vocabulary.SIZE, sizes.hidden)
        self.position = nn.Parameter(torch.empty(TEXT_LENGTH, sizes.hidden))

    def forward(self, seen: Tensor, text: Tensor) -> Tensor:
        """``[batch, seen, hidden]`` and token ids ``[batch, TEXT_LENGTH]``, joined."""
        return torch.cat((seen, self.token(text) + self.position), dim=1)


class Decoder(nn.Module):
    """A block in which text sees all that the encoders saw, and the text before it. ``t`` in a layout."""

    mask: Tensor

    def __init__(self, sizes: Sizes, seen: int) -> None:
        super().__init__()
        self.block = Block(sizes.hidden, sizes.heads)
        length = seen + TEXT_LENGTH
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[:seen, :seen] = True
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream, one layer on."""
        out: Tensor = self.block(x, self.mask)
        return out


class Head(nn.Module):
    """What each text position would write next. ``L`` in a layout; the loss itself is the training loop's."""

    def __init__(self, sizes: Sizes, seen: int) -> None:
        super().__init__()
        self.seen = seen
        self.norm = nn.LayerNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, vocabulary.SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream to logits ``[batch, TEXT_LENGTH, vocabulary]``."""
        logits: Tensor = self.output(self.norm(x[:, self.seen :]))
        return logits


_KINDS: dict[str, type[Embedding | Decoder | Head]] = {"embedding": Embedding, "decoder": Decoder, "loss": Head}


class LanguageStage(nn.Module):
    """The layers of one stage, by their names in the whole model: ``embedding_0``, ``decoder_3``, ``loss_0``.

    A name is a kind of layer and its global id. Parameters are called and initialised by it, so they are the same,
    bit for bit, however the model is cut; the whole model is the stage that has every layer. A stage without layers
    hands on what it receives. ``seen`` is how many tokens the encoders send for a strip.

    Raises:
        ValueError: a layer of a kind that this model does not have.
    """

    def __init__(self, names: Sequence[str], sizes: Sizes, *, seed: int, seen: int = IMAGE_TOKENS) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            kind = name.partition("_")[0]
            if kind not in _KINDS:
                raise ValueError(f"layer {name!r} is of no kind that this model has: {', '.join(_KINDS)}")
            layer = _KINDS[kind](sizes, seen)
            initialise(layer, name=f"language.{name}", seed=seed)
            self.layers[name] = layer

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        """Run the layers on ``x``: the encoders' tokens on the first stage, the stream on the others.

        ``text`` are token ids ``[batch, TEXT_LENGTH]``; only the stage that embeds needs them.
        """
        for name, layer in self.layers.items():
            if not isinstance(layer, Embedding):
                x = layer(x)
            elif text is None:
                raise ValueError(f"layer {name!r} joins text to the encoders' tokens; pass token ids as text")
            else:
                x = layer(x, text)
        return x
