"""No wait of the packages is bounded by hours or days: jobs run for weeks, and the end of such a wait ends them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUR, YEAR = timedelta(hours=1), timedelta(days=365)
UNITS = {"milliseconds": 1e-3, "seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0, "weeks": 604800.0}
# Not waits: the longest deadline that a test may ask for, and a day in a table of units.
LIMITS = {
    ("packages/testing/src/pipegrid/testing/settings.py", 7 * 86400.0),
    ("packages/goodput/src/pipegrid/goodput/durations.py", 86400.0),
}


def number(node: ast.AST) -> float | None:
    """The value of arithmetic of constants."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add(), right=right):
            parts = number(left), number(right)
            if None not in parts:
                return parts[0] * parts[1] if isinstance(node.op, ast.Mult) else parts[0] + parts[1]
    return None


def durations(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Line and seconds of each constant that reads as a duration: in a timedelta, or a product as ``24 * 3600``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("timedelta"):
            named = [(key.arg, number(key.value)) for key in node.keywords]
            days = [("days", number(argument)) for argument in node.args[:1]]
            seconds = [UNITS[unit] * value for unit, value in (*named, *days) if unit in UNITS and value is not None]
            yield node.lineno, sum(seconds)
        elif isinstance(node, ast.BinOp | ast.Constant):
            value = number(node)
            if value is not None and value and value % 86400 == 0:
                yield node.lineno, value


def bounded_waits(source: str) -> list[tuple[int, float]]:
    """Those above an hour and under a year: nobody waits that long on purpose, and a job runs for longer."""
    return [
        (line, seconds)
        for line, seconds in durations(ast.parse(source))
        if HOUR.total_seconds() < seconds < YEAR.total_seconds()
    ]


@pytest.mark.parametrize(
    "source",
    [
        "work.wait(timedelta(days=1))",
        "_FOREVER = datetime.timedelta(1)",
        "_WATCHDOG: Final = timedelta(days=7)",
        "_LONG = timedelta(hours=23, minutes=60)",
        "thread.join(timeout=86_400)",
        "_DAY = 24 * 3600",
        "_WEEK = 7 * 24 * 60 * 60.0",
    ],
)
def test_the_lint_finds_a_planted_bound(source):
    assert bounded_waits(source)


@pytest.mark.parametrize("source", ["timedelta(days=36_500)", "timedelta(seconds=300)", "x = 4 * 3600 // n", "2**20"])
def test_the_lint_leaves_deadlines_and_other_numbers(source):
    assert not bounded_waits(source)


def test_no_wait_is_bounded_by_days():
    files = sorted(ROOT.glob("packages/*/src/**/*.py"))
    assert len(files) > 200
    found = [
        (str(file.relative_to(ROOT)), seconds, line)
        for file in files
        for line, seconds in bounded_waits(file.read_text())
        if (str(file.relative_to(ROOT)), seconds) not in LIMITS
    ]
    assert found == []
