"""The first update of a job against one process: the script's own optimizer, with all parameters and their options.

What happens to gradients behind the first step is the script's: it clips, it chooses options by name, it has an
optimizer on each rank. Each rank keeps what its optimizers are given first, the state of a checkpoint with it; with the
next step, the first rank makes the same update of all parameters with one optimizer of each class, to compare.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipegrid.core.errors import StepArgumentError
from pipegrid.gradients.dtensors import is_dtensor
from pipegrid.stages.generators import capture_torch, generators_as_before
from pipegrid.training.pipeline.exchange import RankExchange, first_with, not_of_one_process
from pipegrid.training.pipeline.one_process import are_equal
from pipegrid.transport.collectives.differences import listed

_SOON = 4  # steps
_OVER_ALL = ("DAdapt", "Prodigy")  # classes that estimate a distance, from which all parameters are as one
_STEPS_OPTIMIZERS = GradScaler.step.__code__  # the frame of a scaler that steps an optimizer
_CLIPPED = (
    "between step() and the first update gradients were multiplied by 1: if by clip_grad_norm_ of torch, that clips to "
    "the norm of each rank's stages, and updates will not be those of one process; Pipeline.clip() clips to that of all"
)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@frozen(eq=False)
class _Updated:
    """A parameter before and after an optimizer's step."""

    kind: str  # the name of the optimizer's class
    options: Mapping[str, Any]  # of the parameter's group, as plain data
    before: Tensor
    gradient: Tensor | None  # as the optimizer was given it
    state: list[list[Any]]  # names and values that the optimizer had of it, such as those of a checkpoint
    after: list[Tensor] = field(factory=list)


@define(eq=False)
class FirstUpdate:
    """The updates of this rank's optimizers after a step that was compared; every rank makes one."""

    named: Callable[[], Iterable[tuple[str, nn.Parameter]]]  # the parameters to train, by the script's names
    ranks: RankExchange
    limit: float  # the largest error, of a norm, that rounding explains
    _steps: int = field(default=0, init=False)
    _gradients: dict[str, tuple[Tensor, int]] = field(factory=dict, init=False)  # of the last step, and their versions
    updated: dict[str, _Updated] = field(factory=dict, init=False)  # empty until an optimizer of this rank has stepped
    _optimizers: dict[str, Optimizer] = field(factory=dict, init=False)  # by class
    _inside: list[Optimizer] = field(factory=list, init=False)  # whose steps run; a class may call that of its base
    _why_not: str | None = field(default=None, init=False)
    _written: bool = field(default=False, init=False)  # whether the script has written to gradients in between
    _handles: list[Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self.keep()

    def keep(self) -> None:
        """Keep the gradients at the end of a step."""
        self._steps += 1
        gradients = [(name, one.grad) for name, one in self.named() if one.grad is not None]
        # The documented way to ask whether an operation has written to a tensor:
        self._gradients = {name: (one.clone(), one._version) for name, one in gradients}  # noqa: SLF001

    def close(self) -> None:
        """Watch optimizers no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._inside.append(optimizer)
        if self._inside[-2:] == [optimizer, optimizer]:
            return
        names = {id(one): name for name, one in self.named()}
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        held = [(group, one) for group in optimizer.param_groups for one in group["params"] if id(one) in names]
        if held or kind not in self._optimizers:  # of a rank with nothing to train, the settings
            self._optimizers[kind] = optimizer
        if held:
            self._why_not = self._why_not or _why_not(optimizer, args, kwargs)
        for group, one in held:
            options = {name: value for name, value in _options(group).items() if _is_plain(value)}
            gradient = None if one.grad is None else one.grad.clone()
            if one.grad is not None and names[id(one)] in self._gradients and not hasattr(one.grad, "is_clipped"):
                version = self._gradients[names[id(one)]][1]
                self._written = self._written or one.grad._version != version  # noqa: SLF001
            if is_dtensor(one):
                self._why_not = "parameters are sharded"
            held_state = optimizer.state.get(one, {}).items()
            state = [[key, value.detach().clone() if isinstance(value, Tensor) else value] for key, value in held_state]
            if names[id(one)] in self.updated:
                self._why_not = f"optimizers update {names[id(one)]} twice between two steps"
            self.updated[names[id(one)]] = _Updated(kind, options, one.detach().clone(), gradient, state)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if not self._inside:  # a closure of this step has called the one of the job that is compared
            return
        self._inside.pop()
        if self._inside[-1:] == [optimizer]:
            return
        held = {one for group in optimizer.param_groups for one in group["params"]}
        for name, one in self.named():
            if one in held and name in self.updated:
                self.updated[name].after.append(one.detach().clone())

    @property
    def is_soon(self) -> bool:
        """Whether few steps have passed: ranks then meet as a step begins, for the plainest error; later as it ends."""
        return self._steps <= _SOON

    def compare(self) -> None:
        """Compare the update that some rank has made, before the next; a difference is a `CutError` on every rank."""
        unended = None if all(one.after for one in self.updated.values()) else "an optimizer's step has failed"
        own = {
            "why": self._why_not or unended,
            "held": [name for name, _ in self.named()],
            "updated": {name: [one.kind, one.options] for name, one in self.updated.items()},
            "scale": self._scale(),
            "written": self._written,
        }
        told = self.ranks.plain(own)
        self.close()
        if why := next((each["why"] for each in told if each["why"]), None):
            self.ranks.say_not_compared(why)
            return
        lines = _otherwise(told)
        if not lines:
            if (right := self._right(told)) is None:
                return
            own_lines = [self._difference(name, one, *right[name]) for name, one in self.named() if name in right]
            lines = [*dict.fromkeys(line for each in self.ranks.plain(own_lines) for line in each if line)]
        if lines:
            raise not_of_one_process("the first update is not that of one process", lines)
        alone = any(each["held"] != told[0]["held"] for each in told)  # else each rank's norm is that of all
        if self.ranks.rank == 0 and alone and any(each["written"] and each["scale"] == 1.0 for each in told):
            warnings.warn(_CLIPPED, stacklevel=2)

    def _scale(self) -> float | None:
        """The factor of all gradients between the step and the optimizers; None: they have not one."""
        pairs = [
            (one.gradient.double(), self._gradients[name][0].double())
            for name, one in self.updated.items()
            if one.gradient is not None and name in self._gradients
        ]
        norm = sum(float(kept.square().sum()) for _, kept in pairs)
        if not norm or not math.isfinite(norm):
            return None
        scale = sum(float((now * kept).sum()) for now, kept in pairs) / norm
        apart = sum(float((now - scale * kept).square().sum()) for now, kept in pairs)
        return scale if apart <= (self.limit * scale) ** 2 * norm else None

    def _right(self, told: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Parameters before and after the update of one process, on all ranks; None where it fails, which is said."""
        rank = self.ranks.rank
        holders = first_with([each["updated"] for each in told])
        own = {
            name: [one.before, one.gradient, one.state] for name, one in self.updated.items() if holders[name] == rank
        }
        arrived = {name: one for each in self.ranks.nested(own) for name, one in each.items()}
        found: dict[str, Any] = {}
        if rank == 0:
            options = {name: told[number]["updated"][name] for name, number in holders.items()}
            try:
                found = {"after": self._update(options, arrived)}
            except Exception as error:  # noqa: BLE001 (told to all ranks: they wait for what is found)
                found = {"why": f"{type(error).__name__}: {error}"}
        right = self.ranks.nested(found, after_first=True)[0]
        if "why" in right:
            self.ranks.say_not_compared(right["why"])
            return None
        return {name: (arrived[name][0], after) for name, after in right["after"].items()}

    def _update(self, options: Mapping[str, Any], arrived: Mapping[str, Any]) -> dict[str, Tensor]:
        """Parameters after a step of one optimizer of each class, with a group for each choice of options."""
        random, weights = capture_torch(self.ranks.device), {}
        for name, (before, gradient, _) in arrived.items():
            weights[name] = nn.Parameter(before.clone())
            weights[name].grad = gradient
        for kind in dict.fromkeys(kind for kind, _ in options.values()):
            if kind not in self._optimizers:
                raise LookupError(f"the first rank has no {kind}")
            groups: dict[str, dict[str, Any]] = {}
            for name, (of, chosen) in options.items():
                if of == kind:
                    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()}
                    group = groups.setdefault(json.dumps(chosen, sort_keys=True), {"params": [], **plain})
                    group["params"].append(weights[name])
            with generators_as_before():
                # One of the same class and settings, without a state, hooks or a scheduler:
                optimizer: Optimizer = object.__new__(type(self._optimizers[kind]))
                vars(optimizer).update({key: one for key, one in vars(self._optimizers[kind]).items() if key != "step"})
                vars(optimizer).update({key: OrderedDict() for key in _HOOKS})
                vars(optimizer).update(state=defaultdict(dict), param_groups=[*groups.values()])
                states = ((weights[name], dict(state)) for name, (*_, state) in arrived.items() if state)
                optimizer.state.update(states)
                optimizer.step()
                if not are_equal(capture_torch(self.ranks.device), random):
                    raise ValueError(f"{kind} draws random numbers")
        return {name: one.detach() for name, one in weights.items()}

    def _difference(self, name: str, own: nn.Parameter, before: Tensor, right: Tensor) -> str | None:
        """In words, how a parameter differs from that of one process; where no optimizer of this rank has it, now."""
        after = self.updated[name].after[0] if name in self.updated else own.detach()
        rounding = 4 * torch.finfo(right.dtype).eps * float(right.double().norm())
        moved = float((right.double() - before.double()).norm())
        apart = float((after.double() - right.double()).norm())
        if apart <= self.limit * moved + rounding:
            return None
        return f"{name}: {apart:.3g} away from the parameter of one process, which the update moves by {moved:.3g}"


def _otherwise(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, where ranks give copies of a parameter other options, or scale gradients by a number of their own."""
    lines, first = [], {name: one for each in reversed(told) for name, one in each["updated"].items()}
    for rank, each in enumerate(told):
        for name, one in each["updated"].items():
            if one != first[name]:
                (kind, options), (of, others) = one, first[name]
                keys = [key for key in {**options, **others} if options.get(key) != others.get(key)]
                apart = ", ".join(f"{key} {options.get(key)} and {others.get(key)}" for key in keys)
                lines.append(f"{name}: {apart if kind == of else f'{kind} and {of}'} on rank {rank} and on others")
        for name in each["held"]:
            if name in first and name not in each["updated"]:
                others = [number for number, one in enumerate(told) if name in one["updated"]]
                lines.append(
                    f"{name}: rank {rank} has not updated it between two steps, and {listed(others)} "
                    f"{'has' if len(others) == 1 else 'have'}: is a call of step() on some ranks alone?"
                )
    scales = {rank: each["scale"] for rank, each in enumerate(told) if each["scale"] is not None}
    if scales and not max(scales.values()) - min(scales.values()) <= 1e-3 * max(map(abs, scales.values())):
        found = ", ".join(f"{scale:.4g} on rank {rank}" for rank, scale in scales.items())
        lines.append(
            f"between step() and the optimizer gradients are multiplied by {found}: are they clipped to the norm of a "
            "rank? Pipeline.clip() clips to that of all"
        )
    return lines


def _why_not(optimizer: Optimizer, args: Any, kwargs: Any) -> str | None:
    """Why the step of an optimizer cannot be made again."""
    name = type(optimizer).__name__
    others = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")]
    if any(one is not None for one in (*args[1:], *kwargs.values())):  # behind the optimizer itself
        return f"{name}.step() has arguments"
    states = [optimizer.state.get(one, {}) for group in optimizer.param_groups for one in group["params"]]
    if not all(isinstance(value, Tensor) or _is_plain(value) for state in states for value in state.values()):
        return f"{name} has states that are neither tensors, numbers nor texts"
    if any(isinstance(value, (Optimizer, Tensor)) for value in others):
        return f"{name} keeps an optimizer or tensors of its own"
    if not all(_is_plain(value) for group in optimizer.param_groups for value in _options(group).values()):
        return f"{name} has options that are neither numbers nor texts"
    return None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group; a learning rate may be a tensor."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def refuse_what_decides_alone(stages: Iterable[nn.Module]) -> tuple[Any, set[int]]:
    """Look at each optimizer of parameters of ``stages``, which it does not keep alive, as it steps first.

    The hook raises `StepArgumentError`, before a parameter changes, for `torch.optim.LBFGS`, classes that estimate a
    distance, those that clip by themselves (``max_grad_norm``, as LAMB), and for what a `torch.amp.GradScaler` steps
    that looks for overflows on its own rank (`ShardedGradScaler` looks on all of a group). Returns its handle, and the
    ids of the parameters to train that have been in no optimizer yet.
    """
    held, seen = weakref.WeakSet(stages), weakref.WeakSet[Optimizer]()
    left = {id(one) for stage in held for one in stage.parameters() if one.requires_grad}

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if optimizer in seen:
            return
        own = {id(one) for stage in held for one in stage.parameters()}
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]} & own
        if not updated:
            return
        name = type(optimizer).__name__
        if isinstance(optimizer, LBFGS) or name.startswith(_OVER_ALL):
            raise StepArgumentError(
                f"{name} makes its step of sums over all parameters, and this rank has those of its stages alone. Take "
                "an optimizer that updates each parameter by itself, such as AdamW"
            )
        if any(group.get("max_grad_norm") for group in optimizer.param_groups):
            raise StepArgumentError(
                f"{name} has max_grad_norm, and would clip to the norm of this rank's stages. Set it to None, and call "
                "Pipeline.clip(), which clips to that of all"
            )
        if _scales_alone():
            raise StepArgumentError(
                "GradScaler leaves an update out where gradients of this rank overflow, and other stages make theirs. "
                "Give LossScaler() as PipelineConfig(grad_scale_func=), and step where its unscale(pipeline.stages) is "
                "true; it looks at all ranks"
            )
        seen.add(optimizer)
        left.difference_update(updated)

    return register_optimizer_step_pre_hook(look), left


def _scales_alone() -> bool:
    """Whether a `GradScaler` that tells no other rank of overflows steps the optimizer."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (torch tells a hook of no scaler)
    while frame is not None and frame.f_code is not _STEPS_OPTIMIZERS:
        frame = frame.f_back
    return frame is not None and type(frame.f_locals["self"]).unscale_ is GradScaler.unscale_
