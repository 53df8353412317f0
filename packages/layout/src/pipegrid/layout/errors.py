"""Errors of layouts, and the picture of one: the layout string with a caret under the fault."""

from __future__ import annotations

import unicodedata

_WINDOW = 100  # characters of a text shown around the caret; a 100,000-character layout must not fill a log


class LayoutError(ValueError):
    """A layout, or an argument about one, breaks a rule.

    Attributes:
        stage: the offending stage, counted from 0 in model order; None where the fault is not in one stage.

    Examples:
        >>> PipelineParallelLayerLayout("Et|t|tL", 2)
        Traceback (most recent call last):
            ...
        pipegrid.layout.errors.LayoutError: 3 stages do not divide by pipeline_model_parallel_size 2
    """

    def __init__(self, message: str, *, stage: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage


class LayoutSyntaxError(LayoutError):
    """A layout string does not follow the grammar, or expands past the bound.

    Attributes:
        text: the whole layout string.
        column: of the fault, counted from 0; always inside the text.
        found: description of the text at the column.
        expected: description of the text that is legal there.
    """

    def __init__(self, text: str, column: int, found: str, expected: str) -> None:
        super().__init__(
            f"layout string, column {column} (from 0): found {found}, expected {expected}\n{_caret(text, column)}"
        )
        self.text, self.column, self.found, self.expected = text, column, found, expected

    def __reduce__(self) -> tuple[type[LayoutSyntaxError], tuple[str, int, str, str]]:
        return type(self), (self.text, self.column, self.found, self.expected)


class LayoutInfeasibleError(LayoutError):
    """No layout keeps every rank under its memory limit, or a bounded search found none.

    Attributes:
        proven: True where no layout exists, False where a bounded search found none.
    """

    def __init__(self, message: str, *, stage: int | None = None, proven: bool = True) -> None:
        super().__init__(message, stage=stage)
        self.proven = proven


def _caret(text: str, column: int) -> str:
    """Two lines: the part of ``text`` around ``column``, and a caret under that column."""
    start = max(0, min(column - _WINDOW // 2, len(text) - _WINDOW))
    end = min(len(text), start + _WINDOW)
    before = ("..." if start > 0 else "") + "".join(map(_printable, text[start:column]))
    after = "".join(map(_printable, text[column:end])) + ("..." if end < len(text) else "")
    return f"  {before}{after}\n  {' ' * sum(map(_width, before))}^"


def _printable(char: str) -> str:
    return " " if char.isspace() else char if char.isprintable() else "?"


def _width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
