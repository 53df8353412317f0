"""The bench of pretrained weights runs, small: the bytes that a rank allocates are bounded by its share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench" / "pretrained.py"
HIDDEN, VOCAB = 128, 4000
ROW = re.compile(
    r"^  (bfloat16|float32) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+ (?:<=|> ) 1\.2(.*)$", re.MULTILINE
)


@pytest.mark.nightly
def test_a_rank_allocates_its_share_and_reads_no_more() -> None:
    sizes = ("--hidden", str(HIDDEN), "--layers", "8", "--vocab", str(VOCAB), "--ranks", "2", "--shard", "1000000")
    result = subprocess.run(
        [sys.executable, BENCH, *sizes],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode in (0, 1), result.stderr  # of so small a model, pages of other things are most of a peak
    assert re.search(r"^\d+ MiB of bfloat16 in [2-9] shards, ", result.stdout), result.stdout
    rows = ROW.findall(result.stdout)
    assert [(dtype, rank) for dtype, rank, *_ in rows] == [(d, r) for d in ("bfloat16", "float32") for r in "01"]
    for dtype, _, share, _, allocated, read, wrong in rows:
        width = 2 if dtype == "bfloat16" else 4
        largest = VOCAB * HIDDEN / 2**20
        assert (
            float(allocated) <= float(share) + largest * (width + 2) + 0.1
        )  # foreign tensors' buffer, one before a cast
        assert float(read) <= float(share) * 2 / width + 0.3  # headers are read by all
        assert not wrong
