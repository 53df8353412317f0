"""The bench of slices runs, small: it prints all of its rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench" / "slices.py"


@pytest.mark.nightly
def test_slices_have_a_time_beside_1f1b_and_the_simulation() -> None:
    result = subprocess.run(
        [sys.executable, BENCH, "--rounds", "2", "--tokens", "128"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = r"^  seq1f1b, [\d ]+ tokens +\d+\.\d +\d\.\d\d \[\d\.\d\d, \d\.\d\d\] +0\.\d\d +\d\.\d\d +0\.\d\d$"
    assert len(re.findall(rows, result.stdout, re.MULTILINE)) == 2, result.stdout
