"""The bench of `reroute` keeps ReCycle's example within 3% of the bound, and prints its three tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench" / "reroute.py"


def test_the_example_is_close_to_its_bound():
    done = subprocess.run([sys.executable, BENCH, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "/" in line]
    assert ["0@0", "1@0", "1@1", "2@2", "3@3", "73", "/", "73", "73", "/", "73"] in rows
    assert "random cases" in done.stdout
    assert "planning" in done.stdout
