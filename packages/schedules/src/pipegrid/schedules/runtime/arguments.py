"""What a runtime is given is what it takes: looked at when it is made, not when a step comes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegrid.schedules.arguments import as_number, require, require_function, require_items, shown
from pipegrid.schedules.errors import RuntimeArgumentError
from pipegrid.schedules.plan.plan import require_plan
from pipegrid.schedules.runtime.hooks import Hook

_HOOK = "a hook has before(action) and after(action)"
_MONITOR = "give a Monitor(store, rank=..., ranks=...), or None"


def check_arguments(
    plan: Any, stages: Any, hooks: Any, reducers: Any, loss_scale: Any, deadline: Any, monitor: Any
) -> None:
    """Refuse what is of another kind.

    Raises:
        RuntimeArgumentError: which, and what is wanted in its place.
    """
    error = RuntimeArgumentError
    require_plan(plan, error=error)
    require("stages", stages, Mapping, "give a dict of this rank's stages by global number", error=error)
    for number, stage in stages.items():
        if not callable(getattr(stage, "forward", None)):
            raise RuntimeArgumentError(
                f"stage {number} is {shown(stage)}, without a forward(microbatch, inputs) that returns Forwarded"
            )
    for index, hook in enumerate(require_items("hooks", hooks, object, f"give a list; {_HOOK}", error=error)):
        if not isinstance(hook, Hook) or not callable(hook.before) or not callable(hook.after):
            raise RuntimeArgumentError(f"hook {index} is {shown(hook)}; {_HOOK}")
    if reducers is not None:
        require("reducers", reducers, Mapping, "give a dict of functions by group (or stage)", error=error)
    for name, reduce in (reducers or {}).items():
        require_function(f"the reducer for {name!r}", reduce, "give a function of no arguments", error=error)
    if loss_scale is not None:
        require_function("loss_scale", loss_scale, "give a function from a loss to the scaled loss", error=error)
    if deadline is not None:
        as_number("deadline", deadline, "give a positive number of seconds, or None", above=0.0, error=error)
    for verb in () if monitor is None else ("begin", "end", "failed"):
        if isinstance(monitor, type) or not callable(getattr(monitor, verb, None)):
            raise RuntimeArgumentError(f"monitor is {shown(monitor)}; {_MONITOR}")
