"""Scripts run as a person runs them, and the code of pages."""

from __future__ import annotations

import re
import subprocess
import sys


def run(*command, timeout=240, **options):
    """A Python script with its arguments, or what else Python takes; what it wrote, and its exit code."""
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def torchrun(ranks, *command, **options):
    """As `run`, under torchrun."""
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *command, **options)


def blocks(page, language="python"):
    """The blocks of a language in the text of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
