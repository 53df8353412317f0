"""The interpreter of the kit that has imported torch: what its forks must not see of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

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


def test_a_signal_that_comes_after_the_end_of_the_fork_says_nothing(warm_client):
    """As torchrun sends one to each rank that is left, some of which are just ending."""
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.readline(); sys.exit(3)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([warm_client, "-c", program], env=environment, text=True, **pipes) as client:
        fork = Path("/proc", client.stdout.readline().strip())
        client.send_signal(signal.SIGSTOP)
        client.stdin.write("\n")
        client.stdin.flush()
        while fork.exists():
            time.sleep(0.01)
        time.sleep(0.1)  # the server closes the connection behind the fork's end
        client.send_signal(signal.SIGTERM)
        client.send_signal(signal.SIGCONT)
        assert client.communicate(timeout=30) == ("", "")
    assert client.returncode == 3
