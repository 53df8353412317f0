"""The words of a written plan: pieces of text that know where they stand, so that errors can point at them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from pipegrid.schedules.arguments import require
from pipegrid.schedules.errors import PlanError, PlanSyntaxError
from pipegrid.schedules.plan.actions import Action, parse_action
from pipegrid.schedules.plan.plan import Lane
from pipegrid.transport.edge import Direction, Edge

_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s#"])+|#.*')
_LANE = re.compile(r"([FB])(\d{1,9})>(\d{1,9})", re.ASCII)
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def require_text(text: object) -> None:
    """Refuse what is no text: a path, say, or bytes.

    Raises:
        PlanError: what to give.
    """
    require("text", text, str, "give the plan's text itself, such as Path(...).read_text()", error=PlanError)


@frozen
class Word:
    """A piece of the text, and where it starts; ``called`` is what to call it where that is not its text."""

    text: str
    line: int
    column: int
    called: str = ""

    def error(self, expected: str) -> PlanSyntaxError:
        """The error that something else was expected here."""
        found = self.called or repr(self.text)
        return PlanSyntaxError(line=self.line, column=self.column, found=found, expected=expected)

    def within(self, text: str, offset: int) -> Word:
        """A part of this word."""
        return Word(text, self.line, self.column + offset)

    def parts(self) -> Iterator[Word]:
        """The parts that commas separate."""
        offset = 0
        for text in self.text.split(","):
            yield self.within(text, offset)
            offset += len(text) + 1

    def end(self) -> Word:
        """Where this word, the last of its line, ends."""
        return Word("", self.line, self.column + len(self.text), "the end of the line")

    def number(self, what: str) -> int:
        """This word as a number from 0."""
        if _NUMBER.fullmatch(self.text) is None:
            raise self.error(f"{what}, an integer from 0 of at most 9 digits")
        return int(self.text)

    def name(self, text: str) -> str:
        """``text``, a part of this word, as the name of a module: plain, or in double quotes."""
        if not text.startswith('"'):
            return text
        try:
            name: Any = json.loads(text)
        except json.JSONDecodeError:
            raise self.error("a name in double quotes, as JSON writes it") from None
        return str(name)

    def edge(self) -> Edge:
        """This word as an edge between stages."""
        try:
            return parse_edge(self.text)
        except PlanError as error:
            raise self.error(str(error)) from None

    def action(self) -> Action:
        """This word as an action."""
        try:
            return parse_action(self.text)
        except PlanError as error:
            raise self.error(f"an action ({error})") from None


def words(line: str, *, line_number: int, start: int = 0) -> Iterator[Word]:
    """The words of a line from ``start`` on, up to a comment; a name in double quotes may hold spaces."""
    at = start
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        match = _WORD.match(line, at)
        if match is None:
            raise Word(line[at:], line_number, at + 1).error('the closing " of the name')
        if match[0].startswith("#"):
            return
        yield Word(match[0], line_number, at + 1)
        at = match.end()


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``.

    Raises:
        PlanError: it is not written so, or does not ascend.
    """
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))


def parse_creation(text: str) -> Lane | str:
    """A lane such as ``F0>1``, or the name of a group."""
    match = _LANE.fullmatch(text)
    return text if match is None else Lane(int(match[2]), int(match[3]), Direction(match[1]))
