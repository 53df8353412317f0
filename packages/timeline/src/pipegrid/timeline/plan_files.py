"""Plans in files: CSV and JSON by their suffix, otherwise the text form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan, from_csv, from_json, from_text, to_csv, to_json, to_text

LARGEST = 256 * 2**20
"""Bytes of a file; a plan of a million actions has about 10 MB."""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of what is read inside begins with the file."""
    try:
        yield
    except PlanError as error:
        error.args = (f"{path}: {error}",)
        raise


def read_file(path: Path) -> str:
    """The text of a file, without the byte order mark that a spreadsheet puts before its CSV.

    Raises:
        PlanError: it is too large, or not UTF-8; with the byte and its offset.
    """
    if (size := path.stat().st_size) > LARGEST:
        raise PlanError(f"{path} has {size} bytes; at most {LARGEST} are read")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PlanError(f"{path} is not UTF-8 text: byte {byte:#04x} at offset {error.start}") from None


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: what is wrong with it, after the name of the file.
    """
    if path.suffix.lower() == ".toml":
        raise PlanError(f"{path} is a job, not a plan; draw it with: python -m pipegrid.planner show {path} --gpus N")
    text = read_file(path)
    with named(path):
        return {".csv": from_csv, ".json": from_json}.get(path.suffix.lower(), from_text)(text)


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan in the form of the suffix, as `read_plan` reads it."""
    writer = {".csv": to_csv, ".json": to_json}.get(path.suffix.lower(), to_text)
    path.write_text(writer(plan), encoding="utf-8")
