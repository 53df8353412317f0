"""The bench of pairs runs, small: at least 70% of the exchanges in pairs are hidden."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "pairs.py"


@pytest.mark.nightly
def test_the_exchanges_of_pairs_are_hidden() -> None:
    result = subprocess.run(
        [sys.executable, BENCH, "--rounds", "2"], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    hidden = dict(re.findall(r"^  (one after the other|by turns) +\d+\.\d +(\d+)% +\d+%$", result.stdout, re.MULTILINE))
    assert int(hidden["by turns"]) >= 70 > int(hidden["one after the other"])
