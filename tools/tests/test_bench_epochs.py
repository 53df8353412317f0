"""The bench of epochs prints the cost of done and the times of detection, each within the heartbeat and a second."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench" / "epochs.py"


def test_deaths_are_noticed_in_time():
    done = subprocess.run([sys.executable, BENCH, "--quick"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, silent = (float(re.search(rf"{kind} +([\d.]+) s", done.stdout)[1]) for kind in ("killed", "silent"))
    assert killed < 1.0 <= silent, done.stdout  # the ring needs no heartbeat, which is 1 s
    assert re.search(r"done +\d+ us per key", done.stdout)
