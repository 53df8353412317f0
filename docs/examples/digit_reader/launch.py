"""Start the ranks through torchrun's machinery, and say in one line what ended them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(script: Path, arguments: Sequence[str], *, processes: int) -> int:
    """Run ``script`` with ``arguments`` on ``processes`` ranks of this machine.

    The first rank that dies ends the others within seconds.

    Returns:
        The exit code for this process: 0, or 1 after a line that names the rank that failed first.
    """
    # torchrun tells at length how it kills the other ranks; the line below says what matters.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="digit_reader",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", str(script), *arguments)
    except ChildFailedError as error:
        # A killed rank first: the others fail on its closed connections within the same poll.
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        ended = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(f"rank {rank} failed first ({ended}); the other ranks were stopped", file=sys.stderr)
        return 1
    return 0
