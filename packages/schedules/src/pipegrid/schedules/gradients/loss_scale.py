"""The loss scale of half-precision training: how it moves, as plain data and a pure function. No torch.

A float16 gradient below 2^-24 is zero. The loss is multiplied by a scale before the backward, and the gradients are
divided by it after their reduction; where one overflows, anywhere in the job, no rank steps and the scale falls
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from pipegrid.schedules.arguments import as_number, require, require_integer


class LossScaleError(ValueError):
    """A loss scale cannot be what was given."""


def _as_scale(value: float) -> float:
    return as_number("scale", value, "give a number", finite=False, error=LossScaleError)


@frozen(kw_only=True)
class LossScale:
    """A loss scale and its history, the same on every rank. `updated` gives the next one.

    Attributes:
        scale: the factor, now.
        growth_factor: the scale grows by it after ``growth_interval`` steps without overflow; 1 never grows.
        backoff_factor: and falls by it at an overflow; 1 never falls. Powers of two keep scaling exact.
        growth_interval: steps in a row without overflow.
        hysteresis: overflows between two growths that are skipped before the scale falls, itself included.
        min_scale: it does not fall below.
        max_scale: nor grow above.
        clean_steps: steps in a row without overflow, up to now.
        overflows: overflows since the scale last grew or fell.

    Raises:
        LossScaleError: a factor on the wrong side of 1, a count below 1, or a scale outside its bounds.
    """

    scale: float = field(default=2.0**16, converter=_as_scale)
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    clean_steps: int = 0
    overflows: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("growth_factor", "backoff_factor", "min_scale", "max_scale"):
            # That it is finite, and where it lies, is said below.
            require(name, getattr(self, name), (int, float), "give a number", error=LossScaleError)
        for name, least in (("growth_interval", 1), ("hysteresis", 1), ("clean_steps", 0), ("overflows", 0)):
            require_integer(name, getattr(self, name), "give a number of steps", least=least, error=LossScaleError)
        if not math.isfinite(self.scale) or not 0 < self.min_scale <= self.scale <= self.max_scale:
            raise LossScaleError(
                f"scale={self.scale} with min_scale={self.min_scale} and max_scale={self.max_scale}: a scale is finite "
                "and lies between them, and they are positive"
            )
        if not self.growth_factor >= 1 or not 0 < self.backoff_factor <= 1:
            raise LossScaleError(
                f"growth_factor={self.growth_factor} and backoff_factor={self.backoff_factor}: the first is at least "
                "1, the second above 0 and at most 1"
            )


def fixed(scale: float) -> LossScale:
    """A loss scale that never changes; steps that overflow are still skipped."""
    return LossScale(
        scale=scale,
        growth_factor=1.0,
        backoff_factor=1.0,
        min_scale=min(1.0, scale),
        max_scale=max(2.0**24, scale),
    )


def updated(state: LossScale, *, overflow: bool) -> LossScale:
    """The loss scale of the next step."""
    if overflow:
        if state.overflows + 1 < state.hysteresis:
            return evolve(state, clean_steps=0, overflows=state.overflows + 1)
        return evolve(state, scale=max(state.scale * state.backoff_factor, state.min_scale), clean_steps=0, overflows=0)
    if state.clean_steps + 1 < state.growth_interval:
        return evolve(state, clean_steps=state.clean_steps + 1)
    return evolve(state, scale=min(state.scale * state.growth_factor, state.max_scale), clean_steps=0, overflows=0)


def to_state(state: LossScale) -> dict[str, Any]:
    """For a checkpoint: what changes, not how."""
    return {"scale": state.scale, "clean_steps": state.clean_steps, "overflows": state.overflows}


def from_state(settings: LossScale, saved: dict[str, Any]) -> LossScale:
    """A checkpoint's scale, moving from now on as ``settings`` say.

    Raises:
        LossScaleError: ``saved`` lacks a value, or has one that cannot be, or its scale is outside the bounds of
            ``settings``.
    """
    require("saved", saved, Mapping, "give what state_dict() returned", error=LossScaleError)
    missing = {"scale", "clean_steps", "overflows"} - set(saved)
    if missing:
        raise LossScaleError(f"a saved loss scale has no {sorted(missing)}; it has {sorted(saved)}")
    return evolve(
        settings,
        scale=saved["scale"],
        clean_steps=saved["clean_steps"],
        overflows=saved["overflows"],
    )
