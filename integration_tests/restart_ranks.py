"""A rank of the restart example's job in a forked process: no launcher, and nothing to import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from restart import job


def rank_main(rank, world_size, port, directory, options):
    """One rank of an attempt."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with Path(os.devnull).open("w") as nowhere:  # tracebacks of lost neighbours, some hundred
        os.dup2(nowhere.fileno(), 2)
        sys.exit(job.main(["--directory", directory, *options]))
