"""Digits, drawn larger on a canvas, and a caption of each: "a small seven on the left", "a large two"."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE: Final = 24
IMAGE_TOKENS: Final = 16
DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS: Final = ("<pad>", "<begin>", "<end>", "<image>", "a", "small", "large", "on", "the", "left", "right", *DIGITS)
PAD, BEGIN, END, IMAGE = range(4)
UNSEEN: Final = 360
"""Scans set aside: no image of training shows them."""

Batch = dict[str, Tensor]


@cache
def _scans() -> tuple[Tensor, Tensor]:
    """The scans inside scikit-learn, ``[1797, 1, 8, 8]``, in an order that mixes their writers; and their digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(1797))
    images = torch.from_numpy(digits.images / 8 - 1).float().unsqueeze(1)
    return images[order], torch.from_numpy(digits.target)[order]


def batch_of(numbers: range, *, unseen: bool = False) -> Batch:
    """The samples ``numbers``, each a function of its number: images, texts padded on the right, and their labels.

    Texts have the tokens of an image, the beginning and the caption; labels are -100 where nothing is to be written.
    """
    scans, digits = _scans()
    pool = range(UNSEEN) if unseen else range(UNSEEN, len(scans))
    images, texts = [], []
    for number in numbers:
        generator = torch.Generator().manual_seed(2 * number + unseen)
        scan, place, top = torch.randint(0, 1 << 16, (3,), generator=generator).tolist()
        scan = pool[scan % len(pool)]
        large, left = place % 3 == 0, place % 3 == 1
        size = SIDE if large else SIDE // 2
        drawn = torch.full((1, SIDE, SIDE), -1.0)
        x = 0 if large or left else SIDE - size
        y = 0 if large else top % 3 * (size // 2)
        drawn[:, y : y + size, x : x + size] = F.interpolate(
            scans[scan : scan + 1], size=(size, size), mode="bilinear"
        )[0]
        where = [] if large else ["on", "the", "left" if left else "right"]
        caption = ["a", "large" if large else "small", DIGITS[digits[scan]], *where, "<end>"]
        images.append(drawn)
        texts.append([IMAGE] * IMAGE_TOKENS + [BEGIN] + [WORDS.index(word) for word in caption])
    longest = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (longest - len(text)) for text in texts])
    written = torch.arange(longest) > IMAGE_TOKENS
    return {
        "pixel_values": torch.stack(images),
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill((ids == PAD) | ~written, -100),
    }


def prompts_of(batch: Batch) -> Batch:
    """The part of a batch before its captions."""
    return {
        "pixel_values": batch["pixel_values"],
        "input_ids": batch["input_ids"][:, : IMAGE_TOKENS + 1],
        "attention_mask": batch["attention_mask"][:, : IMAGE_TOKENS + 1],
    }


def captions_of(tokens: Tensor) -> list[str]:
    """Tokens ``[batch, words]`` as text, up to the end."""
    texts = []
    for row in tokens.tolist():
        words = [WORDS[token] for token in row if token >= 0]
        texts.append(" ".join(words[: words.index("<end>")] if "<end>" in words else words).strip())
    return texts


def truth_of(batch: Batch) -> list[str]:
    """The captions of a batch."""
    return captions_of(batch["labels"][:, IMAGE_TOKENS + 1 :])
