"""The error of this package. No torch."""

from __future__ import annotations


class GradientError(ValueError):
    """Gradients that cannot be reduced, tied, deferred, clipped or scaled correctly as asked.

    Also a loss scale outside of its range.

    Examples:
        >>> LossScale(scale=-1.0)
        Traceback (most recent call last):
            ...
        pipegrid.gradients.errors.GradientError: LossScale.scale is -1.0; it must be a finite number above 0
    """
