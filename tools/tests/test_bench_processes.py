"""The rank processes of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench"
SCRIPT = """
from contextlib import nullcontext

from runtime_parts.processes import on_ranks


def alone(rank, ranks, store):
    return nullcontext()


def work(report):
    report("a figure")
    raise AssertionError("what was measured is wrong")


if __name__ == "__main__":
    with on_ranks(1, work, join=alone) as reports:
        print(reports.first())
"""


def test_a_rank_that_fails_after_its_last_report_fails_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join((str(BENCH), os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout == "a figure\n"
    assert "ranks [0] failed after their last report" in result.stderr
