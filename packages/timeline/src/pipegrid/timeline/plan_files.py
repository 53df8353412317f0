"""Plans in files: CSV and JSON by their suffix, otherwise the text form."""

from __future__ import annotations

from pathlib import Path

from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import Plan, from_csv, from_json, from_text, to_csv, to_json, to_text


def read_file(path: Path) -> str:
    """The text of a file, without the byte order mark that a spreadsheet puts before its CSV.

    Raises:
        PlanError: it is not UTF-8; with the byte and its offset.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise PlanError(f"{path} is not UTF-8 text: byte {byte:#04x} at offset {error.start}") from None


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: what is wrong with it.
    """
    if path.suffix.lower() == ".toml":
        raise PlanError(f"{path} is a job, not a plan; draw it with: python -m pipegrid.planner show {path} --gpus N")
    text = read_file(path)
    return {".csv": from_csv, ".json": from_json}.get(path.suffix.lower(), from_text)(text)


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan in the form of the suffix, as `read_plan` reads it."""
    writer = {".csv": to_csv, ".json": to_json}.get(path.suffix.lower(), to_text)
    path.write_text(writer(plan), encoding="utf-8")
