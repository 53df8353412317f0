"""The bench of torch's runtime runs, small: a row for each schedule, and V-Min holds the least."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench" / "torch_runtime.py"


@pytest.mark.nightly
def test_each_schedule_has_a_time_and_a_peak_for_each_rank() -> None:
    command = [sys.executable, BENCH, "--quick", "--ranks", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^(\S.*?) +\d+\.\d+ +\d+\.\d\d  \d+ \(.*?\), (\d+) \((.*?)\)", result.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["torch's ZBV", "v_half", "v_min"], result.stdout
    assert float(rows[2][2]) < float(rows[1][2]) < 1.0
