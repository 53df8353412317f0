"""The loss scale of half-precision training as plain data, and how it moves: a pure function. No torch.

A float16 gradient below 2^-24 is zero. The loss is multiplied by a scale before the backward, and the gradients are
divided by it after their reduction; where one overflows, anywhere in the job, no rank steps and the scale falls
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from attrs import evolve, frozen

from pipegrid.core.fields import Count, Index, checked_fields, number
from pipegrid.gradients.errors import GradientError

Positive = Annotated[float, number(above=0.0)]
Growth = Annotated[float, number(least=1.0)]
_CHANGING = ("scale", "clean_steps", "overflows")


@frozen(kw_only=True, field_transformer=checked_fields(GradientError))
class LossScale:
    """A loss scale and its history, the same on every rank. `updated` gives the next one.

    Attributes:
        scale: the factor that multiplies losses.
        growth_factor: multiplies the scale after ``growth_interval`` steps without overflow; 1 never grows.
        backoff_factor: multiplies it at an overflow; 1 never falls. Powers of two keep scaling exact.
        growth_interval: steps in a row without overflow.
        hysteresis: the scale falls at every so-many-th overflow between two growths; 1 is each.
        min_scale: lower bound of the scale.
        max_scale: upper bound of the scale.
        clean_steps: steps in a row without overflow, up to now.
        overflows: overflows since the scale last grew or fell.

    Raises:
        GradientError: a value outside its range.

    Examples:
        >>> LossScale(scale=1024.0, growth_interval=100).scale
        1024.0
    """

    scale: Positive = 2.0**16
    growth_factor: Growth = 2.0
    backoff_factor: Positive = 0.5
    growth_interval: Count = 2000
    hysteresis: Count = 1
    min_scale: Positive = 1.0
    max_scale: Positive = 2.0**24
    clean_steps: Index = 0
    overflows: Index = 0

    def __attrs_post_init__(self) -> None:
        if not self.min_scale <= self.scale <= self.max_scale:
            raise GradientError(f"scale is {self.scale}; it must be in {self.min_scale} to {self.max_scale}")
        if self.backoff_factor > 1:
            raise GradientError(f"backoff_factor is {self.backoff_factor}; it must be at most 1")


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
    """The part of a loss scale that changes, for a checkpoint."""
    return {name: getattr(state, name) for name in _CHANGING}


def from_state(settings: LossScale, saved: Mapping[str, Any]) -> LossScale:
    """The loss scale of a checkpoint, with the rules of ``settings``."""
    if lacking := [name for name in _CHANGING if name not in saved]:
        raise GradientError(f"a saved loss scale has no {lacking[0]!r}; it has {list(saved)}")
    return evolve(settings, **{name: saved[name] for name in _CHANGING})
