r"""A layout string to its stages.

The grammar, with white space and commas allowed between any two tokens::

    layout  :=  { item }
    item    :=  ( letter | "|" | "(" layout ")" ) { "*" count }

Repetition is textual: ``(t|t)*2`` is ``t|tt|t``; ``t*2*3`` is six layers; ``*0`` removes; ``|*3`` makes four empty
stages.

Two passes, neither recursive. `_scan` reads the text into tokens, gives each bracket the count of its group, and
adds up the size of the expansion with saturating sums, so that ``((t*999999)*999999)*999999`` is an error before any
of it is built. `_expand` then writes the expanded text into one buffer: a repeated group copies the part of the
buffer that it has just written, and a removed group is skipped, so the time is linear in the text plus the result,
whatever the nesting.
"""

from __future__ import annotations

import re
import string

import attrs

from pipegrid.layout.errors import LayoutSyntaxError
from pipegrid.layout.fields import MAX_LAYERS
from pipegrid.layout.grammar import LayoutGrammar

_TOO_MANY = MAX_LAYERS + 1  # sums saturate here
_COSMETIC = re.compile(r"[\s,]*")
_ITEM = re.compile(
    r"""
    (?: \( (?P<flat> [A-Za-z|\s,]* ) \)               # a group with no group or count in it
      | (?P<run> [A-Za-z|] (?: [\s,]* [A-Za-z|] )* )   # letters and separators, of which a count repeats the last
      | (?P<bracket> [()] )
    )
    (?: [\s,]* (?P<star> \* ) [\s,]* (?P<count> [0-9]* ) (?P<more> (?: [\s,]* \* [\s,]* [0-9]* )* ) )?
    """,
    re.VERBOSE,
)
_REPEAT = re.compile(r"[\s,]*(?P<star>\*)[\s,]*(?P<count>[0-9]*)")


def parse(text: str, grammar: LayoutGrammar) -> tuple[tuple[str, ...], ...]:
    """Read a layout string.

    Returns:
        For each stage, in model order, its kinds of layer. The empty text is one empty stage.

    Raises:
        LayoutSyntaxError: the text does not follow the grammar, or makes more than `MAX_LAYERS` layers or stages.
    """
    kinds = grammar.symbols
    stages: dict[str, tuple[str, ...]] = {}  # equal stages share one tuple
    result = []
    for stage in _expand(_scan(text, grammar)).split("|"):
        if stage not in stages:
            stages[stage] = tuple(kinds[symbol] for symbol in stage)
        result.append(stages[stage])
    return tuple(result)


_Token = tuple[str, int]
"""Letters and separators with a count; or a bracket, with the count of its group."""


@attrs.define
class _Size:
    """Size of the expansion of the text, or of a group, so far; and the column at which it passed the bound, or -1."""

    layers: int = 0
    separators: int = 0
    passed: int = -1

    def add(self, layers: int, separators: int, column: int) -> None:
        self.layers = min(self.layers + layers, _TOO_MANY)
        self.separators = min(self.separators + separators, _TOO_MANY)
        if self.passed < 0 and (self.layers > MAX_LAYERS or self.separators >= MAX_LAYERS):
            self.passed = column


def _scan(text: str, grammar: LayoutGrammar) -> list[_Token]:
    known = {*grammar.symbols, "|"}
    tokens: list[_Token] = []
    size = _Size()  # of the group that is open, or of the whole
    around: list[tuple[_Size, int, int]] = []  # size, column and token of each group around it
    column = _skip(text, 0)
    while column < len(text):
        item = _ITEM.match(text, column)
        if item is None:
            raise _unexpected(text, column, grammar)
        count = _count(text, item)
        if item["bracket"] == "(":
            if item["star"]:
                raise _unexpected(text, item.start("star"), grammar)
            around.append((size, column, len(tokens)))
            tokens.append(("(", 1))
            size = _Size()
        elif item["bracket"] == ")":
            if not around:
                raise LayoutSyntaxError(text, column, "')'", f"its '(' before it, or {_starts(grammar)}")
            group, (size, _, opening) = size, around.pop()
            tokens[opening] = ("(", count)
            tokens.append((")", count))
            if count:  # a removed group may be of any size
                last = column if group.passed < 0 else group.passed
                size.add(group.layers * count, group.separators * count, last)
        else:
            run = item["run"]
            inner = item["flat"] if run is None else run
            last = item.end("flat") if run is None else item.end("run") - 1
            letters = "".join(inner.replace(",", " ").split())
            if not known.issuperset(letters):
                letter = next(letter for letter in letters if letter not in known)
                raise _unexpected(text, text.index(letter, column), grammar)
            if run is not None and count != 1:
                tokens.append((letters[:-1], 1))
                size.add(len(letters) - 1 - letters.count("|", 0, -1), letters.count("|", 0, -1), last)
                letters = letters[-1]
            tokens.append((letters, count))
            separators = letters.count("|")
            size.add((len(letters) - separators) * count, separators * count, last)
        column = _skip(text, item.end())
    if around:
        raise LayoutSyntaxError(text, around[-1][1], "'(' that is never closed", "a ')' after it")
    if size.passed >= 0:
        what = "layers" if size.layers > MAX_LAYERS else "stages"
        found = f"more than {MAX_LAYERS:,} {what} up to here"
        raise LayoutSyntaxError(text, size.passed, found, f"at most {MAX_LAYERS:,}")
    return tokens


def _skip(text: str, column: int) -> int:
    """The first column from ``column`` on that holds neither white space nor a comma."""
    match = _COSMETIC.match(text, column)
    return match.end() if match else column


def _count(text: str, item: re.Match[str]) -> int:
    """The product of an item's counts: 1 where it has none, at most `_TOO_MANY`."""
    digits, more = item["count"], item["more"]
    if digits is None:
        return 1
    if 0 < len(digits) < len(str(MAX_LAYERS)) and not more:  # nearly every count
        return int(digits)
    product = _number(text, item.start("star"), item.end("count"), digits)
    for repeat in _REPEAT.finditer(text, *item.span("more")):
        count = _number(text, repeat.start("star"), repeat.end(), repeat["count"])
        product = min(product * count, _TOO_MANY)
    return product


def _number(text: str, star: int, end: int, digits: str) -> int:
    """The count of digits after the ``*`` at column ``star``, up to ``end``; at most `_TOO_MANY`."""
    if not digits:
        column, found = (star, "'*' at the end of the text") if end == len(text) else (end, f"{text[end]!r} after '*'")
        raise LayoutSyntaxError(text, column, found, "a whole number after it")
    digits = digits.lstrip("0")
    # Python's int() has an error of its own for the thousands of digits that a legal count may have.
    return int(digits or "0") if len(digits) <= len(str(_TOO_MANY)) else _TOO_MANY


def _unexpected(text: str, column: int, grammar: LayoutGrammar) -> LayoutSyntaxError:
    """The error for a character that is not legal at its column."""
    if text[column] == "*":
        return LayoutSyntaxError(text, column, "'*'", "a layer, '|' or ')' before it, to repeat")
    hint = ", or '*' before a count" if text[column] in string.digits else ""
    return LayoutSyntaxError(text, column, repr(text[column]), f"{_starts(grammar)}{hint}")


def _starts(grammar: LayoutGrammar) -> str:
    return f"a layer ({grammar.describe()}), '|', ',' or '('"


def _expand(tokens: list[_Token]) -> str:
    buffer = bytearray()  # letters are ASCII
    starts: list[int] = []  # length of the buffer at the beginning of each open group
    removed = 0  # depth of open brackets inside of a removed group, its own included
    for text, count in tokens:
        if text == "(":
            if removed or count == 0:
                removed += 1
            else:
                starts.append(len(buffer))
        elif text == ")":
            if removed:
                removed -= 1
            else:
                start = starts.pop()
                if count > 1:
                    buffer += buffer[start:] * (count - 1)
        elif not removed:
            buffer += text.encode() * count
    return buffer.decode()
