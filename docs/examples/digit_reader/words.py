"""A number in English words, and back: 407 is "four hundred and seven"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# fmt: off
SMALL: Final = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS: Final = (*SMALL, *TENS, "hundred", "thousand", "and")
LARGEST: Final = 999_999

_VALUES: Final = {word: value for value, word in enumerate(SMALL, start=1)} | {
    word: 10 * value for value, word in enumerate(TENS, start=2)
}


class NotANumberError(ValueError):
    """The words, in this order, do not write a number."""


def spell(number: int) -> tuple[str, ...]:
    """The words of ``number``, 1 to 999,999: ``("four", "hundred", "and", "seven")``.

    Raises:
        ValueError: a number outside that range.
    """
    if not 1 <= number <= LARGEST:
        raise ValueError(f"{number} cannot be spelled; the words reach from 1 to {LARGEST}")
    if number < 20:
        return (SMALL[number - 1],)
    if number < 100:
        tens, ones = divmod(number, 10)
        return (TENS[tens - 2], *(spell(ones) if ones else ()))
    unit, word = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, unit)
    return (*spell(count), word, *(("and",) if 0 < rest < 100 else ()), *(spell(rest) if rest else ()))


def read(words: Sequence[str]) -> int:
    """The number that ``words`` write; the inverse of `spell`, and strict about it.

    Raises:
        NotANumberError: an unknown word, or words that `spell` would not put this way ("six one", "five and").
    """
    total = group = 0
    for word in words:
        if word == "thousand":
            total, group = total + 1000 * group, 0
        elif word == "hundred":
            group *= 100
        elif word in _VALUES:
            group += _VALUES[word]
        elif word != "and":
            raise NotANumberError(f"{word!r} is no number word; known are {', '.join(WORDS)}")
    number = total + group
    # Adding up accepts more than English does; spelling the sum again is the whole grammar, once.
    if not 1 <= number <= LARGEST or spell(number) != tuple(words):
        raise NotANumberError(f"{' '.join(words)!r} does not write a number from 1 to {LARGEST}")
    return number
