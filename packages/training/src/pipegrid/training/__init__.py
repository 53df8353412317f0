"""Train existing models as one pipeline: what a training script needs above plans, lanes and step functions."""

from __future__ import annotations

__all__: list[str] = []
