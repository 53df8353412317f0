"""Releases that the tests have run with, the oldest and the newest: `python tools/constraints.py` writes the table."""

from __future__ import annotations

import functools
import re
import sys
from typing import Final

TESTED: Final = {"torch": ("2.11", "2.15"), "transformers": ("5.23", "5.24")}


@functools.cache
def say_untested_versions() -> None:
    """Write one line to stderr, once in a process, if what is imported is older or newer than what was tested."""
    found = []
    for name, (oldest, newest) in TESTED.items():
        version = getattr(sys.modules.get(name), "__version__", oldest)
        if not _release(oldest) <= _release(version) <= _release(newest):
            found.append(f"{name} {version} (tested: {oldest} to {newest})")
    if found:
        text = f"pipegrid was not tested with {' and '.join(found)}; docs/install.md has what was"
        print(text, file=sys.stderr, flush=True)  # noqa: T201 -- no error by number, and no logger is set up


def _release(version: str) -> list[int]:
    """Major and minor number, also of ``2.13.0+cpu`` and ``5.25.0.dev0``."""
    return [int(part) for part in re.findall(r"\d+", version)[:2]]
