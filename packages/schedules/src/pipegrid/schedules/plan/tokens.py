"""Tokens of a written plan: pieces of text that know their line and column."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from attrs import frozen

from pipegrid.schedules.errors import PlanError, PlanSyntaxError
from pipegrid.schedules.plan.actions import Action, GroupName, parse_action
from pipegrid.topology.fields import checked
from pipegrid.transport.edge import Edge

_TOKEN = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s#"])+|#.*')
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)


@frozen
class Token:
    """A piece of the text and its place; ``called`` names it in errors where its text does not."""

    text: str
    line: int
    column: int
    called: str = ""

    def error(self, expected: str) -> PlanSyntaxError:
        """The error for this token where ``expected`` should be."""
        found = self.called or repr(self.text)
        return PlanSyntaxError(line=self.line, column=self.column, found=found, expected=expected)

    def within(self, text: str, offset: int) -> Token:
        """A part of this token."""
        return Token(text, self.line, self.column + offset)

    def parts(self) -> Iterator[Token]:
        """The parts between commas."""
        offset = 0
        for text in self.text.split(","):
            yield self.within(text, offset)
            offset += len(text) + 1

    def end(self) -> Token:
        """The end of a line whose last token is this one."""
        return Token("", self.line, self.column + len(self.text), "the end of the line")

    def number(self, what: str) -> int:
        """This token as a number from 0."""
        if _NUMBER.fullmatch(self.text) is None:
            raise self.error(f"{what}, an integer from 0 of at most 9 digits")
        return int(self.text)

    def numbers(self, what: str) -> tuple[int, ...]:
        """This token as numbers between commas."""
        return tuple(part.number(what) for part in self.parts())

    def edges(self) -> tuple[Edge, ...]:
        """This token as edges between commas."""
        found = []
        for part in self.parts():
            try:
                found.append(parse_edge(part.text))
            except PlanError as error:
                raise part.error(str(error)) from None
        return tuple(found)

    def name(self, text: str) -> str:
        """``text``, a part of this token, as the name of a module: plain, or in double quotes."""
        if not text.startswith('"'):
            return text
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            raise self.error("a name in double quotes, as JSON writes it") from None

    def group_name(self) -> str:
        """This token as the name of a group."""
        name: str = checked(self.text, GroupName, "", lambda text: self.error(text.partition("must be ")[2]))
        return name

    def action(self) -> Action:
        """This token as an action."""
        try:
            return parse_action(self.text)
        except PlanError as error:
            raise self.error(f"an action ({error})") from None


def tokens(line: str, *, line_number: int, start: int = 0) -> Iterator[Token]:
    """The tokens of a line from ``start`` on, up to a comment; a name in double quotes may hold spaces."""
    at = start
    while at < len(line):
        if line[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(line, at)
        if match is None:
            raise Token(line[at:], line_number, at + 1).error('the closing " of the name')
        if match[0].startswith("#"):
            return
        yield Token(match[0], line_number, at + 1)
        at = match.end()


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``.

    Raises:
        PlanError: another form, or an edge that does not ascend.
    """
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))
