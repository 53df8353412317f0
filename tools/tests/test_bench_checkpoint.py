"""The bench of checkpoints runs, small: it prints all of its rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


def test_the_bench_prints_what_a_save_blocks_beside_a_bare_save():
    bench = ROOT / "tools" / "bench" / "checkpoint.py"
    result = subprocess.run(
        [sys.executable, bench, "--pairs", "2"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode in (0, 1), result.stderr
    assert re.search(r"^176 tensors, 3\.31 MB; medians of 2 interleaved pairs$", result.stdout, re.MULTILINE)
    for row in ("blocked by an asynchronous save", "bare torch.save", "until it is on the disk"):
        assert re.search(rf"^  {row} +\d+\.\d\d ms$", result.stdout, re.MULTILINE)
    assert re.search(
        r"^  blocked / bare +-?\d+\.\d{3} (<=|> ) 0\.25 \[-?\d+\.\d{3}, -?\d+\.\d{3}\]$", result.stdout, re.MULTILINE
    )
