"""Losses that a layer attaches to an activation by an autograd function, whose backward starts their gradient.

Megatron's balance of experts and multi-token prediction are of that kind: the activation's gradient passes unchanged,
and the attached loss gets the scale that is set on the class. The step functions scale the main loss of a microbatch
(by the microbatches, by a loss scale), so they set that scale as well: before each backward, to what the main loss is
scaled by. A function whose scale nothing sets is found in the backwards of a stage's first microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch.autograd.function import BackwardCFunction

from pipegrid.gradients.groups import device_of
from pipegrid.gradients.main_grad import named_modules
from pipegrid.plans.plan import Action, ActionKind
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import AuxLossScaler, option
from pipegrid.schedules.runtime import flatten
from pipegrid.schedules.runtime.stages.stage import graph_nodes

_BACKWARDS = (ActionKind.B, ActionKind.I, ActionKind.W)
_WATCHED = 2  # forwards of a stage: a gradient that does not depend on the one that arrives is the same in both


@define(eq=False)
class AuxLossScales:
    """A hook of the runtime that sets the scales before each backward: microbatches, and stages of a rank, may differ.

    ``scale_of``: by stage, what the step multiplies a mean loss of a microbatch by (`MegatronStage.scale_of_mean`).
    ``one``: a mean loss, as a scalar on the device of the stages.
    """

    scalers: Sequence[AuxLossScaler]
    scale_of: Mapping[int, Callable[[int, bool], float]]
    config: Any
    one: torch.Tensor
    _scales: dict[tuple[str | None, float], torch.Tensor] = field(factory=dict, init=False)

    def before(self, action: Action) -> None:
        """Set the scales of the microbatch whose backward follows."""
        if action.kind not in _BACKWARDS:
            return
        assert action.microbatch is not None  # of every compute
        for scaler in self.scalers:
            factor = self.scale_of[action.stage](action.microbatch, scaler.of_cp_share)
            key = (scaler.grad_scale, factor)
            if key not in self._scales:
                self._scales[key] = grad_scale(self.config, self.one, scaler.grad_scale) * factor
            scaler.set_scale(self._scales[key])

    def after(self, action: Action) -> None:
        """Nothing."""


def one_like(models: Any) -> torch.Tensor:
    """A scalar of one on the device of ``models``, in float64 where these are."""
    dtypes = {parameter.dtype for _, model in named_modules(models) for parameter in model.parameters()}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return torch.ones((), dtype=dtype, device=device_of(models, None))


def grad_scale(config: Any, one: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The loss scale of a step, as a scalar like ``one``; by the function ``name`` of the config, if it has one."""
    if name is not None and (own := getattr(config, name, None)) is not None:
        return torch.as_tensor(own()).to(one).reshape(())
    scale = option(config, "grad_scale_func")
    return one if scale is None else scale(one).detach().reshape(())


@define(eq=False)
class AttachedLosses:
    """What the backwards of a stage's first microbatches show of attached losses.

    Such a function passes the gradient of its output on to one input, and gives another one a constant. One whose
    constant is a scale of its class is known at once; another, when the constant is the same for a second gradient.
    ``names``: of the classes that attach losses; ``left``: forwards that are still to be watched.
    """

    stage: int
    names: dict[str, None] = field(factory=dict, init=False)
    left: int = field(default=_WATCHED, init=False)
    _constants: dict[type, tuple[float, float] | None] = field(factory=dict, init=False)

    def watch(
        self,
        payloads: Iterable[Any],
        microbatch: int,
        handled: Collection[type | None],
        expected: Callable[[], tuple[float, ...]],
    ) -> None:
        """Look, in its backward, at the functions that have made ``payloads``: one of the forwards that are ``left``.

        ``handled``: the classes whose scale is set; ``expected``: what an attached loss may be scaled by.
        """
        self.left -= 1
        outputs: list[torch.Tensor | None] = []
        for payload in payloads:
            outputs += [payload] if isinstance(payload, torch.Tensor | None) else flatten(payload)
        nodes = graph_nodes(each.grad_fn for each in outputs if each is not None and each.grad_fn is not None)
        for node in nodes:
            if not isinstance(node, BackwardCFunction):
                continue
            function: type = type(node)._forward_cls  # noqa: SLF001 (has no public name)
            if function in handled:
                self.names[function.__name__] = None
            elif len(node.next_functions) > 1 and not function.__module__.startswith("torch."):
                node.register_hook(partial(self._look, function, microbatch, expected))

    def _look(
        self,
        function: type,
        microbatch: int,
        expected: Callable[[], tuple[float, ...]],
        to_inputs: Sequence[torch.Tensor | None],
        arrived: Sequence[torch.Tensor | None],
    ) -> None:
        if self._constants.get(function, ()) is None:
            return
        constant = _constant(to_inputs, arrived)
        if constant is None:
            self._constants[function] = None
            return
        norm = sum(each.detach().double().norm().item() for each in arrived if each is not None)
        before = self._constants.setdefault(function, (constant, norm))
        if before is not None and before[0] != constant:
            self._constants[function] = None  # it depends on what arrives
        elif constant in _scales_of(function) or (before is not None and before[1] != norm):
            self.names[function.__name__] = None
            scales = expected()
            if any(math.isclose(constant, each, rel_tol=1e-2) for each in scales):  # in the dtype of the loss
                return
            raise StageOutputError(
                f"the autograd function {function.__name__} of stage {self.stage} attaches a loss with the gradient "
                f"{constant:g}, and the step scales the mean loss of microbatch {microbatch} by {scales[0]:g}. Give "
                "PipelineConfig(aux_loss_scalers=[...]) the class, if it has set_loss_scale, or a function that sets "
                "its scale; or return WithLoss(output, loss). Where the loss is scaled before it is attached: "
                "aux_loss_scalers=None"
            )


def _constant(to_inputs: Sequence[torch.Tensor | None], arrived: Sequence[torch.Tensor | None]) -> float | None:
    """The constant that one input gets where another gets what has arrived; else None."""
    given = [each for each in to_inputs if each is not None]
    came = [each for each in arrived if each is not None]
    others = [each for each in given if not any(_equal(each, one) for one in came)]
    if len(others) == len(given):
        return None
    for each in others:
        if each.numel() and (first := each.flatten()[0]) != 0 and bool((each == first).all()):
            return float(first)
    return None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def _scales_of(function: type) -> list[float]:
    """The numbers that a class has under names with ``scale``."""
    values = [getattr(function, name, None) for name in dir(function) if "scale" in name.lower()]
    numbers = [each for each in values if not isinstance(each, torch.Tensor) or each.numel() == 1]
    return [float(each) for each in numbers if isinstance(each, (int, float, torch.Tensor))]
