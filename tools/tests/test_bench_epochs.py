"""The benches of survival run: what agreement costs, how soon a death is noticed, what an undisturbed step costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCHES = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("epochs", [r"done +\d+ us per key", r"killed +[\d.]+ s from the signal", r"silent +[\d.]+ s from the signal"]),
        ("deaths", [r"rank 3 killed .* again after [\d.]+ s", r"rank 0 stopped .* again after [\d.]+ s .* by \d"]),
        ("rejoin", [r"came +[\d.]+ s from asking", r"step +[\d.]+ s undisturbed; [\d.]+ MiB"]),
        ("survive", [r"direct [\d.]+ ms, surviving [\d.]+ ms", r"ratio [\d.]+ \(quartiles"]),
    ],
)
def test_a_bench_prints_its_figures(name, printed):
    command = [sys.executable, BENCHES / f"{name}.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in printed:
        assert re.search(line, done.stdout), done.stdout
