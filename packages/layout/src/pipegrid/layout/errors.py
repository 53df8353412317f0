"""What can be wrong with a layout, and the picture that goes with it: the text with a caret under the fault."""

from __future__ import annotations

import unicodedata

_WINDOW = 100  # characters of a text shown around the caret; a 100,000-character layout must not fill a log


class LayoutError(ValueError):
    """A layout, or a question asked of one, breaks a rule.

    Attributes:
        stage: the offending stage, counted from 0 in model order; None where the fault is not one stage's.
    """

    def __init__(self, message: str, *, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class LayoutSyntaxError(LayoutError):
    """A layout string cannot be read, or would expand past the bound.

    Attributes:
        text: the whole layout string.
        column: where the fault is, counted from 0; always inside the text.
        found: what stands there.
        expected: what could have stood there.
    """

    def __init__(self, text: str, column: int, found: str, expected: str) -> None:
        picture = caret(text, column)
        super().__init__(f"layout string, column {column} (from 0): found {found}, expected {expected}\n{picture}")
        self.text = text
        self.column = column
        self.found = found
        self.expected = expected

    def __reduce__(self) -> tuple[type[LayoutSyntaxError], tuple[str, int, str, str]]:
        return type(self), (self.text, self.column, self.found, self.expected)


class LayoutInfeasibleError(LayoutError):
    """No layout keeps every rank under its memory limit, or none was found by a bounded search.

    Attributes:
        proven: True where it is certain that no layout exists, False where a bounded search merely found none.
    """

    def __init__(self, message: str, *, stage: int | None = None, proven: bool = True) -> None:
        super().__init__(message, stage=stage)
        self.proven = proven


def caret(text: str, column: int) -> str:
    """Two lines: the part of ``text`` around ``column``, and a caret under that column."""
    start = max(0, min(column - _WINDOW // 2, len(text) - _WINDOW))
    end = min(len(text), start + _WINDOW)
    before = ("..." if start > 0 else "") + "".join(map(_printable, text[start:column]))
    after = "".join(map(_printable, text[column:end])) + ("..." if end < len(text) else "")
    return f"  {before}{after}\n  {' ' * sum(map(_width, before))}^"


def _printable(char: str) -> str:
    """Show each character in a known width: spaces as one space, what cannot be printed as a question mark."""
    if char.isspace():
        return " "
    return char if char.isprintable() else "?"


def _width(char: str) -> int:
    """Columns that a terminal gives to ``char``."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
