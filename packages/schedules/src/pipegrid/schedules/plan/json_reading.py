"""JSON with places at hand: what is wrong is pointed at by line and column."""

from __future__ import annotations

import json
import re
from typing import Any, TypeAlias

from pipegrid.schedules.errors import PlanSyntaxError

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of the document."""


def load_json(text: str) -> Any:
    """The document; an integer of more digits than any count or time has is taken for a float.

    Raises:
        PlanSyntaxError: line and column, what was found, what was expected.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        found = repr(text[error.pos : error.pos + 12]) if error.pos < len(text) else "the end"
        what = error.msg.removeprefix("Expecting ")
        expected = f"a {'JSON ' if what == 'value' else ''}{what}" if what != error.msg else f"JSON ({error.msg})"
        raise PlanSyntaxError(line=error.lineno, column=error.colno, found=found, expected=expected) from None
    except RecursionError:
        start = f"{text[:12]!r}..."
        raise PlanSyntaxError(line=1, column=1, found=start, expected="brackets that nest less deeply") from None


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= _DIGITS else float(text)


_DIGITS = 18
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_int=_integer)


def locate(text: str, path: Path) -> tuple[int, int, str]:
    """Line and column (from 1) of the value at ``path`` in valid JSON, and its text, shortened."""
    at = _skip(text, 0)
    for key in path:
        inside = _skip(text, at + 1)
        if text[inside] in "]}":
            break
        at = _member(text, inside, key) if isinstance(key, str) else _element(text, inside, key)
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    _, end = _DECODER.raw_decode(text, at)
    value = text[at:end]
    return line, column, value if len(value) <= 60 else f"{value[:57]}..."


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _element(text: str, at: int, index: int) -> int:
    for _ in range(index):
        _, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
    return at


def _member(text: str, at: int, key: str) -> int:
    """Where the value of ``key`` starts; of the last one if the key is there twice, as `json` reads it."""
    found = at
    while True:
        name, at = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)
        if name == key:
            found = value
        _, at = _DECODER.raw_decode(text, value)
        at = _skip(text, at)
        if text[at] == "}":
            return found
        at = _skip(text, at + 1)
