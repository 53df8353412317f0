"""Words as token ids: what the language model reads and writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from digit_reader.words import WORDS, spell

PAD: Final = 0
BEGIN: Final = 1
END: Final = 2
TOKENS: Final = ("<pad>", "<begin>", "<end>", *WORDS)
SIZE: Final = len(TOKENS)

TEXT_LENGTH: Final = 9
"""Positions that hold any number of 3 to 5 digits: eight words at most ("seventy three thousand four hundred
and sixty two"), and the end."""

_IDS: Final = {token: index for index, token in enumerate(TOKENS)}


def inputs_of(number: int) -> list[int]:
    """What the model is given at each position: the beginning, then the words, padded."""
    return _padded([BEGIN, *(_IDS[word] for word in spell(number))])


def targets_of(number: int) -> list[int]:
    """What the model should write at each position: the words, then the end, padded."""
    return _padded([*(_IDS[word] for word in spell(number)), END])


def words_of(ids: Iterable[int]) -> tuple[str, ...]:
    """The tokens up to the end, as words. Tokens that are no words show as themselves ("<pad>")."""
    words: list[str] = []
    for index in ids:
        if index == END:
            break
        words.append(TOKENS[index])
    return tuple(words)


def _padded(ids: list[int]) -> list[int]:
    if len(ids) > TEXT_LENGTH:
        raise ValueError(
            f"{' '.join(TOKENS[index] for index in ids)!r} takes {len(ids)} positions; a text has {TEXT_LENGTH}"
        )
    return ids + [PAD] * (TEXT_LENGTH - len(ids))
