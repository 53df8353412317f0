"""Strips of handwritten digits, each a pure function of (split, seed, index).

Any rank that asks for a sample gets the same one, so nobody has to send data: a rank that needs only the text of
a sample draws only its number and never loads a scan.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch.nn import functional as F

SCAN: Final = 8
"""Rows and columns of a scan."""
DIGITS: Final = (3, 5)
"""Fewest and most digits of a strip."""
JITTER: Final = 2
"""A digit lies 0 to this many rows from the top, and as many columns behind the one before it."""
HEIGHT: Final = SCAN + JITTER
WIDTH: Final = 52
"""Columns of a strip: five digits with their largest gaps, rounded up to a multiple of 4."""

SIGNAL: Final = SCAN * DIGITS[1]
"""Samples of a strip's signal: a row sum for every row of every digit, silence behind the last."""

WARP: Final = 0.15
"""How far each number of a copy's affine map lies from the identity's, at most: some 9 degrees, half a pixel."""

_TEST_SHARE: Final = 0.2
_SPLIT_SEED: Final = 1797

Pixels = npt.NDArray[np.float32]


class Split(enum.Enum):
    """Scans of one split never occur in strips of the other."""

    TRAIN = 0
    TEST = 1


@frozen(eq=False)
class Scans:
    """The scans of one split: per digit an array ``[scans, 8, 8]``, ink 1.0 on 0.0.

    For training, as many copies follow, drawn as another hand might have: turned, slanted, resized.
    """

    split: Split
    of_digit: tuple[Pixels, ...]


def load_scans(split: Split) -> Scans:
    """The scans that ship inside scikit-learn (1,797, by 13 writers), one in five set aside for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    held_out = round(_TEST_SHARE * len(images))
    chosen = order[:held_out] if split is Split.TEST else order[held_out:]
    pools = [images[chosen[digits.target[chosen] == digit]] for digit in range(10)]
    if split is Split.TRAIN:
        pools = [np.concatenate((pool, _warped(pool))) for pool in pools]
    return Scans(split, tuple(pools))


def draw_number(split: Split, *, seed: int, index: int) -> int:
    """The number on strip ``index``: 3, 4 or 5 digits, equally often, the first of them not a zero."""
    return _number(_generator(split, seed, index))


def draw_strip(scans: Scans, *, seed: int, index: int) -> Pixels:
    """Strip ``index`` as pixels ``[HEIGHT, WIDTH]``; it shows `draw_number` of the same arguments."""
    chosen, jitter = _drawn(scans, seed, index)
    strip = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    left = 0
    for scan, (down, gap) in zip(chosen, jitter, strict=True):
        left += gap
        strip[down : down + SCAN, left : left + SCAN] = scan
        left += SCAN
    return strip


def draw_signal(scans: Scans, *, seed: int, index: int) -> Pixels:
    """Strip ``index`` as a sound might have it, ``[SIGNAL]``: the ink in each row of its scans, one after another.

    The scans are those of `draw_strip`, so both show the same hand; where a digit lies on the strip is not heard.
    """
    chosen, _ = _drawn(scans, seed, index)
    signal = np.zeros(SIGNAL, dtype=np.float32)
    for place, scan in enumerate(chosen):
        signal[place * SCAN : (place + 1) * SCAN] = scan.mean(axis=1)
    return signal


def _drawn(scans: Scans, seed: int, index: int) -> tuple[list[Pixels], npt.NDArray[np.int64]]:
    """The scans on a strip, and for each how far it lies down and behind the one before."""
    generator = _generator(scans.split, seed, index)
    digits = [int(digit) for digit in str(_number(generator))]
    choice = generator.random(len(digits))
    jitter = generator.integers(0, JITTER, size=(len(digits), 2), endpoint=True)
    pools = [scans.of_digit[digit] for digit in digits]
    return [pool[int(chance * len(pool))] for pool, chance in zip(pools, choice, strict=True)], jitter


def _warped(scans: Pixels) -> Pixels:
    """Each scan under an affine map near the identity."""
    near = np.random.default_rng(_SPLIT_SEED).uniform(-WARP, WARP, size=(len(scans), 2, 3))
    maps = torch.from_numpy((np.eye(2, 3) + near).astype(np.float32))
    grid = F.affine_grid(maps, [len(scans), 1, SCAN, SCAN], align_corners=False)
    copies: Pixels = F.grid_sample(torch.from_numpy(scans).unsqueeze(1), grid, align_corners=False).squeeze(1).numpy()
    return copies


def _generator(split: Split, seed: int, index: int) -> np.random.Generator:
    return np.random.default_rng((seed, split.value, index))


def _number(generator: np.random.Generator) -> int:
    length = int(generator.integers(*DIGITS, endpoint=True))
    return int(generator.integers(10 ** (length - 1), 10**length))
