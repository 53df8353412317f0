"""From a plan, a communicator and models to the `PipelineRuntime` of an earlier call of a step function: a cache.

Building a runtime costs as much as several steps of a small model. The cache is a weak dictionary by first model:
between steps it holds no reference to a model, an iterator, a config or a hook, so a deleted model is freed at once,
with its runtime. `pipegrid.schedules.megatron.call_cache` is the faster cache before this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from pipegrid.schedules.gradients.all_reduce import Waiting
from pipegrid.schedules.gradients.reduction import TiedParameters, last_backwards
from pipegrid.schedules.megatron.config import option
from pipegrid.schedules.megatron.stage import MegatronStage
from pipegrid.schedules.plan import Action, ActionKind, Plan
from pipegrid.schedules.runtime import Hook, MessageHook, PipelineError, PipelineRuntime, position_of
from pipegrid.schedules.verify import Proof

_KEPT = 8  # per model: training and evaluation, each with a few numbers of microbatches

_PREPARED: weakref.WeakKeyDictionary[torch.nn.Module, list[PreparedStep]] = weakref.WeakKeyDictionary()


def prepared_step(
    proof: Proof,
    communicator: Any,
    models: Mapping[int, torch.nn.Module],
    config: Any,
    ties: Sequence[TiedParameters],
    *,
    hooked: bool,
) -> PreparedStep:
    """The runtime of an earlier call with the same arguments, or a new one. ``hooked``: the step function adds hooks.

    Runtimes on other communicators are dropped: a model trains through one at a time.
    """
    hooks = option(config, "hooks")
    key = _Key(
        hooked=hooked or bool(hooks),
        messages=any(isinstance(hook, MessageHook) for hook in hooks),
        ties=tuple(tie.name for tie in ties),
        deallocate=bool(option(config, "deallocate_pipeline_outputs")),
        deadline=option(config, "deadline"),
        scales=option(config, "grad_scale_func") is not None,
        monitor=option(config, "monitor"),
        failure_dir=option(config, "failure_dir"),
    )
    kept = _PREPARED.setdefault(next(iter(models.values())), [])
    for prepared in kept:
        if prepared.serves(proof.plan, communicator, models, key):
            return prepared
    kept[:] = [prepared for prepared in kept if prepared.communicator is communicator][1 - _KEPT :]
    prepared = PreparedStep(proof, communicator, models, key)
    # Data lanes compare once: a later comparison, where one of them has another hook, would meet a reduction of theirs.
    prepared.compared = any(each.compared for each in kept)
    kept.append(prepared)
    return prepared


def describe_steps(model: Any) -> str:
    """`PipelineRuntime.describe` of each plan that step functions have run with ``model``, an argument of theirs."""
    parts = list(model.values()) if isinstance(model, Mapping) else [model]
    first = [part[0] if isinstance(part, (list, tuple)) else part for part in parts]
    return "\n\n".join(prepared.runtime.describe() for each in first for prepared in _PREPARED.get(each, ()))


def forget(prepared: PreparedStep) -> None:
    """Drop a runtime whose step has failed; the next call builds another."""
    for kept in _PREPARED.values():
        kept[:] = [each for each in kept if each is not prepared]


class _Key(NamedTuple):
    """The options of a config and of a call that a runtime is built with."""

    hooked: bool
    messages: bool
    ties: tuple[str, ...]
    deallocate: bool
    deadline: float | None
    scales: bool
    monitor: Any
    failure_dir: Any


class PreparedStep:
    """A runtime and its stages, for calls of a step function with one plan, communicator and set of models."""

    def __init__(self, proof: Proof, communicator: Any, models: Mapping[int, torch.nn.Module], key: _Key) -> None:
        self.plan = plan = proof.plan
        self.communicator, self._key = communicator, key
        self._models = {stage: weakref.ref(model) for stage, model in models.items()}
        self.position = position = position_of(plan, models)
        chunks = _chunk_numbers(plan, models)
        self.stages = {
            stage: MegatronStage(
                plan.graph,
                stage,
                window=_window(plan, position),
                forwards=_forwards(plan, position, stage),
                vp_stage=chunks.get(stage),
            )
            for stage in models
        }
        self.last_backwards: Mapping[int, int] = last_backwards(plan, position)
        self._hooks = _CallMessageHooks() if key.messages else _CallHooks()
        self._config: Any = None
        self._output_layers: Sequence[Callable[[], None]] = ()
        self.runtime = PipelineRuntime(
            proof,
            self.stages,
            communicator,
            hooks=[self._hooks] if key.hooked else [],
            reducers={name: partial(self._reduce, name) for name in key.ties},
            deallocate_outputs=key.deallocate,
            deadline=key.deadline,
            loss_scale=self._scale if key.scales else None,
            monitor=key.monitor,
            failure_dir=key.failure_dir,
        )
        self.ties = key.ties
        self.compared = False  # with the other data lanes
        self.waiting = Waiting(key.deadline, key.monitor)

    def serves(self, plan: Plan, communicator: Any, models: Mapping[int, torch.nn.Module], key: _Key) -> bool:
        """Whether a call with these arguments can use this runtime."""
        return (
            self.communicator is communicator
            and (self.plan is plan or self.plan == plan)
            and self._key == key
            and list(self._models) == list(models)
            and all(self._models[stage]() is model for stage, model in models.items())
        )

    def require_idle(self) -> None:
        """Raise PipelineError inside a step, such as that of another thread, which goes on."""
        if self._config is not None:
            raise PipelineError(f"a step function inside a step, at {self.runtime.where}: a model runs one at a time")

    def begin(self, config: Any, hooks: Sequence[Hook], output_layers: Sequence[Callable[[], None]]) -> None:
        """Store the arguments of a call, before its step."""
        self._config, self._hooks.current, self._output_layers = config, hooks, output_layers

    def end(self) -> None:
        """Drop the arguments of the call, after its step."""
        for stage in self.stages.values():
            stage.end()
        self._config, self._hooks.current, self._output_layers = None, (), ()

    def finish_output_layers(self) -> None:
        """Compute the deferred weight gradients of output layers; idempotent."""
        for finish in self._output_layers:
            finish()

    def _reduce(self, name: str) -> None:
        self.finish_output_layers()  # the REDUCE of a tied weight includes its deferred gradient
        next(tie for tie in option(self._config, "tied_parameters") if tie.name == name).reduce(self.waiting)

    def _scale(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = option(self._config, "grad_scale_func")(loss)
        return scaled


class _CallHooks:
    """The hooks of the running call, as one hook of the runtime."""

    def __init__(self) -> None:
        self.current: Sequence[Hook] = ()

    def before(self, action: Action) -> None:
        for hook in self.current:
            hook.before(action)

    def after(self, action: Action) -> None:
        for hook in self.current:
            hook.after(action)


class _CallMessageHooks(_CallHooks):
    """`_CallHooks` where at least one hook is a `MessageHook`."""

    def completed(self, action: Action) -> None:
        for hook in self.current:
            if isinstance(hook, MessageHook):
                hook.completed(action)


def _chunk_numbers(plan: Plan, stages: Iterable[int]) -> dict[int, int]:
    """The chunk number of each stage, for modules with several stages on this rank."""
    by_module: dict[str, list[int]] = {}
    for stage in stages:
        by_module.setdefault(plan.graph.module_of(stage)[0], []).append(stage)
    return {stage: chunk for held in by_module.values() if len(held) > 1 for chunk, stage in enumerate(held)}


def _forwards(plan: Plan, position: int, stage: int) -> tuple[int, ...]:
    """Per microbatch of ``stage``, the number of earlier forwards (of any stage) on ``position``."""
    forwards = [action for action in plan.actions(position) if action.kind is ActionKind.F]
    places = {action.microbatch: place for place, action in enumerate(forwards) if action.stage == stage}
    return tuple(places[microbatch] for microbatch in range(plan.num_microbatches))


def _window(plan: Plan, position: int) -> int:
    """Number of forwards on ``position`` before its first backward: the microbatches in flight."""
    count = 0
    for action in plan.actions(position):
        if action.kind is ActionKind.F:
            count += 1
        elif action.kind.is_compute:
            break
    return count
