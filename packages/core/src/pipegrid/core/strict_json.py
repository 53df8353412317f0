"""The one reader of JSON documents: plans, costs, recordings, orders, jobs, layouts, manifests of checkpoints.

A repeated key is an error, since readers differ in which value they keep. The schema of a document is an attrs class,
which cattrs builds; `first_fault` locates the first deviation, for packages that depend on cattrs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from attrs import fields, has

from pipegrid.core.fields import nearest, shown

if TYPE_CHECKING:
    from cattrs import BaseValidationError

_DIGITS = 300  # about the range of a float: an integer of fewer digits is read exactly


def read_json(text: str, *, finite: bool = True) -> Any:
    """The document in ``text``; an integer of more than 300 digits becomes a float.

    ``finite=False`` reads the words NaN and Infinity, and numbers beyond floats, as Python does: for documents of other
    programs, and where infinity is a value (a bandwidth).

    Raises:
        ValueError: an object has a key twice, or a number is not finite; as `json.JSONDecodeError`, which has the
            place, it is not JSON, or nests too deeply.
    """
    number = _finite if finite else float
    try:
        return json.loads(
            text,
            parse_int=partial(_bounded_int, beyond=number),
            parse_float=number,
            parse_constant=number,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise json.JSONDecodeError("brackets nest too deeply", text, 0) from None


def _bounded_int(text: str, *, beyond: Callable[[str], float]) -> int | float:
    return int(text) if len(text) <= _DIGITS else beyond(text)  # int() raises above thousands of digits


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is no finite number; numbers of JSON are, up to about 1.8e308")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"an object has the key {key!r:.80} twice; each is there once")
        found[key] = value
    return found


class _KindError(ValueError):
    pass


def exactly(value: Any, kind: type) -> Any:
    """A hook of cattrs for integers and strings: ``value``, if it is of that ``kind``; nothing is converted."""
    if type(value) is not kind:
        raise _KindError(f"{shown(value)} is not {'an integer' if kind is int else 'a string'}")
    return value


def first_fault(error: BaseValidationError, own: type[Exception]) -> tuple[str, str]:
    """The place of the first fault in a document, such as ``positions[3][2]``, and its text.

    ``own``: errors of this type, raised for a value, tell it in their own text. The path of the document is "".
    """
    from cattrs import transform_error

    def text(fault: BaseException, kind: Any) -> str:
        return str(fault) if isinstance(fault, (own, _KindError)) else _fault_text(fault, kind)

    what, _, path = transform_error(error, path="", format_exception=text)[0].rpartition(" @ ")
    return path.lstrip("."), what


def _fault_text(error: BaseException, kind: Any) -> str:
    from cattrs.errors import ForbiddenExtraKeysError

    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        known = [attribute.name for attribute in fields(error.cl)]
        extra = sorted(error.extra_fields)
        return f"unknown keys {extra}{nearest(extra[0], known)}; the keys are {', '.join(known)}"
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and has(kind):
        return f"it must have the keys {', '.join(attribute.name for attribute in fields(kind))}"
    if get_origin(kind) is tuple:
        return "it must be a list"
    return f"not of the form of {getattr(kind, '__name__', kind)}: {error}"
