"""Tokens of a written plan: pieces of text that know their line and column."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from attrs import frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import shown
from pipegrid.plans.errors import PlanError, PlanSyntaxError
from pipegrid.plans.plan.actions import Action, parse_action
from pipegrid.plans.plan.parts import PAIR

_WORD = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^\s#"])+|#.*')
_STEP = re.compile(rf"{PAIR}(?:\s*OVERLAP_F_B)?(?!\S)|\[[^\[\]]*\]|[^\s\[\]]+|[\[\]]")
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
QUOTED = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
"""A string of JSON."""


@frozen
class Token:
    """A piece of the text and its place; ``called`` names it in errors where its text does not."""

    text: str
    line: int
    column: int
    called: str = ""

    def error(self, expected: str) -> PlanSyntaxError:
        """The error for this token where ``expected`` should be."""
        found = self.called or shown(self.text)
        return PlanSyntaxError(line=self.line, column=self.column, found=found, expected=expected)

    def within(self, text: str, offset: int) -> Token:
        """A part of this token."""
        return Token(text, self.line, self.column + offset)

    def end(self) -> Token:
        """The end of a line whose last token is this one."""
        return Token("", self.line, self.column + len(self.text), "the end of the line")

    def words(self) -> Iterator[Token]:
        """The words of this token, up to a comment; a name in double quotes may hold spaces."""
        for match in _WORD.finditer(self.text):
            if match[0].startswith("#"):
                return
            yield self.within(match[0], match.start())

    def steps(self) -> Iterator[tuple[Token, list[Token]]]:
        """The steps of this token, each with its words: an action, those of a batch in brackets, or of a pair."""
        for match in _STEP.finditer(self.text):
            step = self.within(match[0], match.start())
            if match[1] is not None:
                yield step, [self.within(match[part], match.start(part)) for part in (1, 2)]
                continue
            words = re.finditer(r"[^\s\[\]]+", match[0])
            yield step, [step.within(word[0], word.start()) for word in words]

    def action(self) -> Action:
        """This token as an action."""
        try:
            return parse_action(self.text)
        except PlanError as error:
            raise self.error(f"an action ({error})") from None


def parse_edge(text: str) -> Edge:
    """An edge between stages such as ``1>2``."""
    match = _EDGE.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"an edge between stages, such as 1>2, not {text!r}")
    return Edge(int(match[1]), int(match[2]))


def name_text(name: str) -> str:
    """The name of a module as a word of a plan's text: in quotes where it is not a plain word."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name)


def read_name(text: str) -> str:
    """The name that `name_text` has written."""
    return str(json.loads(text)) if text.startswith('"') else text
