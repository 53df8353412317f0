"""The error of this package. No torch."""

from __future__ import annotations


class GradientError(ValueError):
    """Gradients that cannot be reduced, tied, deferred, clipped or scaled correctly as asked.

    Also a loss scale outside of its range.
    """
