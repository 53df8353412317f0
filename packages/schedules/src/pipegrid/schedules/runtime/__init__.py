"""Execute a verified plan on real modules: the runtime, its stages, hooks and payloads."""

from pipegrid.schedules.runtime.stages.hooks import Hook, MessageHook, ProfilerRanges
from pipegrid.schedules.runtime.stages.payloads import describe, flatten, gradient_of, map_tensors, tensors_of
from pipegrid.schedules.runtime.preflight import position_of
from pipegrid.schedules.runtime.runtime import PipelineRuntime
from pipegrid.schedules.runtime.stages.slices import Slice
from pipegrid.schedules.runtime.stages.stage import Forwarded, SlicedStage, RuntimeStage
from pipegrid.schedules.runtime.step_failures import PipelineError
from pipegrid.schedules.runtime.turns import TakeTurns, exchange_tokens, hand_over
from pipegrid.schedules.runtime.unit_times import UnitTimes
from pipegrid.schedules.runtime.warm_up import warm_up

__all__ = [
    "Forwarded",
    "Hook",
    "MessageHook",
    "PipelineError",
    "PipelineRuntime",
    "ProfilerRanges",
    "RuntimeStage",
    "Slice",
    "SlicedStage",
    "TakeTurns",
    "UnitTimes",
    "describe",
    "exchange_tokens",
    "flatten",
    "gradient_of",
    "hand_over",
    "map_tensors",
    "position_of",
    "tensors_of",
    "warm_up",
]
