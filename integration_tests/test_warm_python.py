"""The interpreter of the kit that has imported torch: what its forks must not see of it."""

from __future__ import annotations

import os
import subprocess

PROGRAM = """
import gc, os, sys
assert "torch" in sys.modules  # a fork, not an interpreter of its own
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
gc.collect()
for number in opened:
    os.fstat(number)
"""


def test_a_fork_keeps_the_files_that_it_opens(warm_client):
    """What the server had open is closed by its objects: one that is collected later closes no other's number."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([warm_client, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
