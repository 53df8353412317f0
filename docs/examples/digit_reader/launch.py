"""Start the ranks through torchrun's machinery, and say in one line what ended them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, untyped
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipegrid.monitor import Control, where_all_stand
from pipegrid.training.restart import NO_PROGRESS, PREEMPTED, read_attempts

CONTROL = "digit_reader"
"""Prefix of the ranks' keys on the control store."""


def launch(script: Path, arguments: Sequence[str], *, processes: int, checkpoints: Path | None) -> int:
    """Run ``script`` with ``arguments`` on ``processes`` ranks of this machine.

    The first rank that dies ends the others within seconds. Ranks write their positions to a store in this process,
    which outlives them, rank 0 included.

    Args:
        script: what each rank runs.
        arguments: of the script.
        processes: how many ranks.
        checkpoints: directory of a run that is saved, else None.

    Returns:
        The exit code for this process: 0; `PREEMPTED` after a signal that the ranks have answered by saving; or 1 after
        lines that name the rank that failed first and say where in their plan all ranks were.
    """
    # torchrun tells at length how it kills the other ranks; the lines below say what matters.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
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
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun has it
    try:
        elastic_launch(config, python)("-u", str(script), *arguments, "--control", f"localhost:{store.port}")
    except SignalException as error:  # which the ranks were sent as well, and had time to answer
        attempts = [] if checkpoints is None else read_attempts(checkpoints)
        return PREEMPTED if attempts and attempts[-1].end == "preempted" else 128 + error.sigval
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes & {PREEMPTED, NO_PROGRESS}:  # the ranks have said why
            return PREEMPTED if PREEMPTED in codes else NO_PROGRESS
        print(_what_happened(error, Control(PrefixStore(CONTROL, store), -1, tuple(range(processes)))), file=sys.stderr)
        return 1
    return 0


def _what_happened(error: ChildFailedError, control: Control) -> str:
    """Whose failure was the first, and where all ranks stood.

    A rank that was killed could not say so itself, and the others then fail on its closed connections; of a rank that
    failed in any other way, the control store has the first word, and of one that a signal ended after it had said it.
    """
    rank, failure = min(error.failures.items(), key=lambda item: (not _killed(item[1].exitcode), item[1].timestamp))
    ended, said = f"exit code {failure.exitcode}", control.failure()
    if _killed(failure.exitcode) and (said is None or said.rank != rank):
        ended = failure.signal_name()
    elif said is not None:
        rank, ended = said.rank, said.text
    stood = where_all_stand(control.positions(seconds=0))
    return f"rank {rank} failed first ({ended}); the other ranks were stopped. Where the ranks stood:\n{stood}"


def _killed(exitcode: int) -> bool:
    """Whether a signal ended the rank, other than the one by which torchrun ends those that are left."""
    return exitcode < 0 and exitcode != -signal.SIGTERM
