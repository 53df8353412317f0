"""A rank of the restart example's job in a forked process: no launcher, and nothing to import."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

# The server that forks the ranks imports this module before it has pytest's paths.
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))

from integration_tests.kit.processes import write_to

from restart import job


def rank_main(rank, world_size, port, directory, options, line=None):
    """One rank of an attempt; dies before it comes to ``line`` of the job's file, if that is given."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    write_to(said_by(directory, rank))  # tracebacks of lost neighbours, some hundred
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if line is not None:
        sys.settrace(lambda frame, *_: _dying(line) if frame.f_code.co_filename == job.__file__ else None)
    sys.exit(job.main(["--directory", directory, *options]))


def said_by(directory, rank):
    """The file to which a rank writes."""
    return Path(directory).with_name(f"{Path(directory).name}-rank-{rank}.txt")


def lines_of(code):
    """The lines of a function and of those in it."""
    inner = [lines_of(constant) for constant in code.co_consts if hasattr(constant, "co_lines")]
    return {line for *_, line in code.co_lines() if line is not None}.union(*inner) - {code.co_firstlineno}


def _dying(line):
    def trace(frame, event, argument):
        if event == "line" and frame.f_lineno == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace
