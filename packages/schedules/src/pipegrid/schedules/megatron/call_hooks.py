"""The hooks of the running call, as one hook of a runtime that serves many calls."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrid.plans.plan import Action
from pipegrid.schedules.runtime import Hook, MessageHook


class CallHooks:
    """A hook that calls those of the running call, ``current``."""

    def __init__(self) -> None:
        self.current: Sequence[Hook] = ()

    @staticmethod
    def of(hooks: Sequence[Hook]) -> CallHooks:
        """For calls with hooks such as ``hooks``: told of the ends of messages if one of these is."""
        return CallMessageHooks() if any(isinstance(each, MessageHook) for each in hooks) else CallHooks()

    def before(self, action: Action) -> None:
        """See `Hook`."""
        for hook in self.current:
            hook.before(action)

    def after(self, action: Action) -> None:
        """See `Hook`."""
        for hook in self.current:
            hook.after(action)


class CallMessageHooks(CallHooks):
    """`CallHooks` where at least one hook is a `MessageHook`."""

    def completed(self, action: Action) -> None:
        """See `MessageHook`."""
        for hook in self.current:
            if isinstance(hook, MessageHook):
                hook.completed(action)
