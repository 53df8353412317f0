"""Which operators of torch run."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountOps(TorchDispatchMode):
    """How often each operator ran, or, where it is told which of its results are wanted, how many it computed.

    Views, which compute nothing, are left out.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            mask = args[-1] if args and isinstance(args[-1], list) else [True]
            self.counts[str(func)] += sum(mask) if mask and isinstance(mask[0], bool) else 1
        return func(*args, **(kwargs or {}))

    def count(self, *parts):
        """Of all operators in whose names there is one of ``parts``."""
        return sum(count for name, count in self.counts.items() if any(part in name for part in parts))
