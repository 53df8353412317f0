"""What a runtime is given is what it takes: looked at when it is made, not when a step comes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipegrid.schedules.errors import RuntimeArgumentError
from pipegrid.schedules.hooks import Hook
from pipegrid.schedules.plan import Plan


def check_arguments(
    plan: Any, stages: Any, hooks: Iterable[Any], reducers: Any, loss_scale: Any, deadline: float | None
) -> None:
    """Refuse what is of another kind.

    Raises:
        RuntimeArgumentError: which, and what is wanted in its place.
    """
    if not isinstance(plan, Plan):
        raise RuntimeArgumentError(f"plan is {_kind(plan)}; give a Plan: lower(generator(...)), or from_text(...)")
    if not isinstance(stages, Mapping):
        raise RuntimeArgumentError(f"stages is {_kind(stages)}; give a dict of this rank's stages by global number")
    for number, stage in stages.items():
        if not callable(getattr(stage, "forward", None)):
            raise RuntimeArgumentError(
                f"stage {number} is {_kind(stage)}, without a forward(microbatch, inputs) that returns Forwarded"
            )
    for index, hook in enumerate(hooks):
        if not isinstance(hook, Hook) or not callable(hook.before) or not callable(hook.after):
            raise RuntimeArgumentError(f"hook {index} is {_kind(hook)}; a hook has before(action) and after(action)")
    if reducers is not None and not isinstance(reducers, Mapping):
        raise RuntimeArgumentError(f"reducers is {_kind(reducers)}; give a dict of functions by group (or stage)")
    for name, reduce in (reducers or {}).items():
        if not callable(reduce):
            raise RuntimeArgumentError(f"the reducer for {name!r} is {_kind(reduce)}; give a function of no arguments")
    if loss_scale is not None and not callable(loss_scale):
        raise RuntimeArgumentError(f"loss_scale is {_kind(loss_scale)}; give a function from a loss to the scaled loss")
    if deadline is not None and not deadline > 0:
        raise RuntimeArgumentError(f"deadline={deadline}: give a positive number of seconds, or None")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}, {value!r:.60}"
