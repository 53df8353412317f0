"""The errors of the package."""

from __future__ import annotations


class CutError(ValueError):
    """A model that cannot be cut so: layers not found, a layout that does not fit, a part in the wrong place."""
