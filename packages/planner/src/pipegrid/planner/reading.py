"""Jobs from TOML or JSON."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from pipegrid.core.fields import checked, instance
from pipegrid.core.strict_json import first_fault, read_json
from pipegrid.planner.errors import JobError
from pipegrid.planner.job import Job

if TYPE_CHECKING:
    from cattrs import Converter


Form: TypeAlias = Literal["toml", "json"]
Read = TypeVar("Read")

_MOST_PARTS = 100  # of a dotted key
_KEY_ENDS = re.compile(r"[=,\[\]{}\n]")
_Text = Annotated[str, instance(str, "the job's text; read_job takes a path")]


def read_job(path: str | Path) -> Job:
    """The job in a file: JSON by its suffix, otherwise TOML.

    Raises:
        JobError: the file, the path of the fault in it, and what is wrong.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("job.toml").write_text("global_batch = 16")
        >>> read_job("job.toml")
        Traceback (most recent call last):
            ...
        pipegrid.planner.errors.JobError: job.toml: modules: the key 'modules' is missing
    """
    return read_as(path, parse_job)


def read_as(path: str | Path, parse: Callable[[str, Form], Read]) -> Read:
    """Parse the text of a file with ``parse``; errors begin with the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: {error}") from None
    try:
        return parse(text, "json" if path.suffix == ".json" else "toml")
    except JobError as error:
        raise JobError(f"{path}: {error}") from None


def parse_job(text: str, form: Form = "toml") -> Job:
    """The job that a text describes.

    Raises:
        JobError: the path of the fault, such as ``modules[1].layers[0]``, and what is wrong.
    """
    from cattrs import BaseValidationError

    try:
        return _converter().structure(parse_document(text, form), Job)
    except BaseValidationError as error:
        where, what = first_fault(error, JobError)
        raise JobError(f"{where}: {what}" if where else what) from None


def parse_document(text: str, form: Form) -> dict[str, Any]:
    """The object that a text describes; `JobError`, with line and column, where it is none."""
    checked(text, _Text, "text", JobError)
    try:
        data = read_json(text) if form == "json" else _from_toml(text)
    except (ValueError, RecursionError) as error:  # both decoders' errors, with line and column
        raise JobError(f"not {form.upper()}: {error}") from None
    if not isinstance(data, dict):
        raise JobError(f"the document is a {type(data).__name__}; it must be an object with 'modules', ...")
    return data


def _from_toml(text: str) -> dict[str, Any]:
    """The document; not one with a key of so many parts that the decoder, quadratic in them, takes minutes."""
    if any(piece.count(".") > _MOST_PARTS for piece in _KEY_ENDS.split(text)):
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    return tomllib.loads(text)


@cache
def _converter() -> Converter:
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=True)
    # Values are checked by the annotations of the classes.
    converter.register_structure_hook_func(_is_plain, lambda value, _: value)
    return converter


def _is_plain(kind: Any) -> bool:
    """Whether a type is a value, not a part of a job with keys of its own."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return _is_plain(get_args(kind)[0])
    return kind in (int, float, str, bool) or get_origin(kind) is Literal
