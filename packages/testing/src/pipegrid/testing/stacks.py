"""Where the threads of this process stand, in a person's words."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import _pytest
import pluggy

from pipegrid.testing import errors


def stacks() -> str:
    """Every Python thread's stack, this one's excepted, the main thread's first."""
    frames = sys._current_frames()  # noqa: SLF001 (documented in the sys module)
    main_thread = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads.sort(key=lambda thread: thread is not main_thread)
    parts = [
        f"thread {thread.name}:\n{''.join(of_the_test(traceback.extract_stack(frames[thread.ident])).format())}"
        for thread in threads
        if thread.ident in frames
    ]
    return "\n".join(parts)


def of_the_test(stack: traceback.StackSummary) -> traceback.StackSummary:
    """``stack`` from the first frame that is not pytest's or this package's; all of it where there is none."""
    ours = tuple(str(Path(str(module.__file__)).parent) for module in (_pytest, pluggy, errors))
    outside = [i for i, entry in enumerate(stack) if not entry.filename.startswith((*ours, "<string>"))]
    return traceback.StackSummary.from_list(stack[outside[0] :]) if outside else stack
