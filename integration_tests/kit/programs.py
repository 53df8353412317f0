"""Scripts run as a person runs them."""

from __future__ import annotations

import subprocess
import sys


def run(*command, timeout=240, **options):
    """A Python script with its arguments, or what else Python takes; what it wrote, and its exit code."""
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **options
    )
