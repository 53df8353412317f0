"""The stages of a cut against the whole model: the same values, the same microbatch, autograd of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.stages.assignment import names_of_ties
from pipegrid.stages.calls import accepted_by, by_name, without_cache
from pipegrid.stages.comparison.chain import Turn, at_layers, forwards, gradients, trained
from pipegrid.stages.errors import CutError, few
from pipegrid.stages.generators import States, capture, generators_as_before, restore
from pipegrid.stages.host_state import HostState
from pipegrid.stages.proof.boundaries import CutProof
from pipegrid.stages.torch_compat import named_leaves, tree_map_only

Loss = Callable[[Any], Tensor]
OptimizerOf = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Gradients = Mapping[str, Tensor | None]
_SHOWN = 4  # values per error


@frozen
class Compared:
    """One value of the stages, compared with that of the whole model.

    Attributes:
        name: in words, such as ``gradient of lm_head.weight``.
        stages: that hold it.
        error: the norm of the difference, over the norm of the whole model's value.
        norm: of the whole model's value.

    Examples:
        >>> Compared("gradient of head.weight", stages=(1,), error=0.0, norm=2.5).error
        0.0
    """

    name: str
    stages: tuple[int, ...]
    error: float
    norm: float

    def __str__(self) -> str:
        where = " and ".join(map(str, self.stages))
        return f"{self.name} on stage {where}: error {self.error:.2g} of the norm {self.norm:.3g}"


@frozen
class StageComparison:
    """The stages of a cut and the whole model, one microbatch in one process.

    Attributes:
        proof: of the cut, for the same call.
        loss: of the whole model.
        loss_of_stages: what the last stage returned.
        gradients: of each parameter of the whole model that is trained.
        buffers: of each stage, those that its ``state_dict`` has.
        limit: the largest error that rounding explains: the square root of the epsilon of the parameters' dtype.
        strides: where rounding depends on the strides of hidden states, by how much; the stages are compared with the
            whole model whose hidden states are contiguous between stages, as the received ones are.
        updates: what an optimizer of each stage makes of its parameters.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        >>> found = check_stages(model, "t|t", (torch.ones(2, 4),), names=Names("0"), loss=torch.sum)
        >>> [one.name for one in found.gradients]
        ['gradient of 0.0.weight', 'gradient of 0.0.bias', 'gradient of 0.1.weight', 'gradient of 0.1.bias']
    """

    proof: CutProof
    loss: float
    loss_of_stages: float
    gradients: tuple[Compared, ...]
    buffers: tuple[Compared, ...]
    limit: float
    strides: float = 0.0
    updates: tuple[Compared, ...] = ()

    @property
    def different(self) -> tuple[Compared, ...]:
        """The values that differ, the largest errors first."""
        found = [one for one in (*self.gradients, *self.buffers, *self.updates) if not one.error <= self.limit]
        return tuple(sorted(found, key=lambda one: -math.inf if math.isnan(one.error) else -one.error))

    @property
    def holds(self) -> bool:
        """Whether the stages compute what the whole model computes."""
        error = abs(self.loss_of_stages - self.loss) / max(abs(self.loss), self.limit)
        return not self.different and error <= self.limit

    def require(self) -> None:
        """Raise where stages and model differ.

        Raises:
            CutError: names values of the model, their stages and errors.
        """
        if self.holds:
            return
        found = self.different
        lines = few([str(one) for one in found], _SHOWN)
        count = len(self.gradients) + len(self.buffers) + len(self.updates)
        raise CutError(
            f"the stages of layout {self.proof.layout} do not compute what the model computes: {self._losses()}; "
            f"{len(found)} of {count} gradients, buffers and updates differ by more than {self.limit:.1g} of their norm"
            + "".join(f"\n  {line}" for line in lines)
        )

    def __str__(self) -> str:
        stages = sorted({stage for one in self.gradients for stage in one.stages})
        lines = [str(self.proof), self._losses()]
        for stage in stages:
            own = [one for one in self.gradients if stage in one.stages]
            worst = max(own, key=lambda one: one.error)
            which = f" ({worst.name})" if worst.error else ""
            lines.append(f"stage {stage}: {len(own)} gradients, the largest error {worst.error:.2g}{which}")
        if self.updates:
            worst = max(self.updates, key=lambda one: one.error)
            lines.append(f"{len(self.updates)} parameters after an update, the largest error {worst.error:.2g}")
        lines.append(f"{'equal' if self.holds else 'different'} (limit {self.limit:.1g})")
        if self.strides:
            lines[-1] += f", where hidden states are contiguous; other strides change the model by {self.strides:.1g}"
        return "\n".join(lines + [f"  {one}" for one in self.different])

    def _losses(self) -> str:
        return f"loss {self.loss:.8g}, of the stages {self.loss_of_stages:.8g}"


def compare(
    make: Callable[[], nn.Module],
    stage_of: Callable[[int], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    carry: Sequence[str] = (),
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    optimizer: OptimizerOf | None = None,
) -> StageComparison:
    """Run one microbatch through the whole model and through its stages, in this process, as `check_stages`.

    The whole model and all stages are in memory together. Generators, and ``.grad`` of what the call is given, stay as
    they were. ``stage_of`` gives the stage of a number, with parameters of its own; the others are as there.

    Raises:
        CutError: the cut is not proved, values of stages and model differ from the start, or nothing has a gradient.
    """
    with torch.enable_grad(), generators_as_before(), _Hosts(make) as hosts:
        start = capture()
        whole = hosts.made(make)
        stages: list[Any] = []
        while not (stages and stages[-1].is_last):
            restore(start)
            stages.append(hosts.made(lambda: stage_of(len(stages))))
        _require_equal_values(whole, stages)
        for model in (whole, *stages) if dtype is not None else ():
            with hosts.of(model):
                model.to(dtype)
        args, kwargs = _placed(whole, (tuple(args), dict(kwargs)), dtype)
        carry = (carry,) if isinstance(carry, str) else carry
        if carry:
            args, kwargs = (), by_name(accepted_by(whole), args, kwargs)
        for stage in stages:
            stage.proofs = stages[0].proofs
        proof, _ = stages[0].proofs.found(whole, args, kwargs)
        proof.require()
        states: dict[str, States] = {}
        with hosts.of(whole), at_layers(whole, stages[0].assignment.layers, lambda at: states.update({at: capture()})):
            output = _called(whole, args, kwargs)
        turns = forwards(stages, args, kwargs, carry, states, hosts.of)
        weigh = _loss_like(turns[-1].sent) if loss is None else loss
        losses = weigh(output), weigh(turns[-1].sent)
        if not (math.isfinite(losses[0].item()) and losses[0].requires_grad):
            raise CutError(f"the loss of the whole model is {losses[0]}; there is nothing to compare with")
        summed, holders = _of_stages(whole, turns, losses[1], hosts)
        limit = max(torch.finfo(one.dtype).eps for one in whole.parameters() if one.is_floating_point()) ** 0.5

        def against(model: nn.Module, loss: float, right: Gradients, strides: float = 0.0) -> StageComparison:
            gradients = tuple(compared_gradients(right, summed, holders))
            buffers = tuple(one for stage in stages for one in _buffers(model, stage))
            return StageComparison(proof, loss, losses[1].item(), gradients, buffers, limit, strides)

        right = _gradients(whole, losses[0], hosts)
        found = against(whole, losses[0].item(), right)
        if found.holds:
            updates = () if optimizer is None else _updates(optimizer, whole, stages, right, hosts, limit)
            return attrs.evolve(found, updates=tuple(updates))
        # Rounding, of a model that computes in a lower precision than its parameters have? Then strides show it.
        restore(start)
        other = hosts.made(lambda: make().to(dtype))
        drawn_as = at_layers(other, stages[0].assignment.layers, lambda at: restore(states[at]))
        with hosts.of(other), drawn_as, _contiguous(other, stages):
            loss_of_other = weigh(_called(other, args, kwargs))
        gradients_of_other = _gradients(other, loss_of_other, hosts)
        every = range(len(stages))
        strides = max(one.error for one in compared_gradients(right, gradients_of_other, dict.fromkeys(right, every)))
        contiguous = against(other, loss_of_other.item(), gradients_of_other, strides)
        return contiguous if contiguous.holds and strides <= torch.finfo(torch.float32).eps ** 0.5 else found


class _Hosts:
    """The state that Python shares, for the whole model and each stage as if each had a process of its own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._start = HostState(make)
        self._states: dict[int, HostState] = {}
        self._made: list[HostState] = []  # which have what the function does not reach: classes that it looks up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for state in (*self._made, self._start):
            state.restore()

    def made(self, make: Callable[[], Any]) -> Any:
        """A model, made as the first one of its process."""
        self._start.restore()
        model = make()
        self._states[id(model)] = self._held(model)
        self._made.append(self._states[id(model)])
        return model

    def _held(self, model: Any) -> HostState:
        return HostState(self._make, getattr(model, "whole", model))  # of a stage, what is the model's

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Code of ``model`` finds what it has left on the host, and not what others have."""
        self._states[id(model)].restore()
        try:
            yield
        finally:
            self._states[id(model)] = self._held(model)


def _require_equal_values(whole: nn.Module, stages: Sequence[Any]) -> None:
    values = dict(whole.named_parameters(remove_duplicate=False))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if not torch.equal(parameter, values[name]):
                raise CutError(
                    f"{name} on stage {stage.number} has other initial values than in the whole model: the function "
                    "that makes it gives others at each call; give the model in place of the function"
                )


def _placed(whole: nn.Module, batch: Any, dtype: torch.dtype | None) -> Any:
    device = next((parameter.device for parameter in whole.parameters()), torch.device("cpu"))

    def placed(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device, dtype if tensor.is_floating_point() else None)

    return tree_map_only(Tensor, placed, batch)


def _called(whole: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output of the whole model for a copy of the batch, to which it may write."""
    args, kwargs = _placed(whole, (args, kwargs), None)
    return whole(*args, **without_cache(accepted_by(whole), kwargs))


def _loss_like(output: Any) -> Loss:
    """The loss of what the last stage returned: the model's own; else a weighted sum of all tensors with gradients."""

    def own(output: Any) -> Any:
        return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)

    if isinstance(own(output), Tensor):
        return own
    if isinstance(output, Tensor) and not output.dim():
        return torch.clone
    places = {place for place, leaf in named_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not places:
        raise CutError(f"the model returns {type(output).__name__} with no gradient; give loss=, of what it returns")

    def weighed(output: Any) -> Tensor:
        means = []
        for place, leaf in named_leaves(output):
            if place not in places:
                continue
            numbers = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device)
            weights = (numbers + 1).square().cos()  # without a pattern that a model could cancel
            means.append((leaf * weights.reshape(leaf.shape).to(leaf.dtype)).mean())
        return torch.stack(means).sum()

    return weighed


@contextmanager
def _contiguous(whole: nn.Module, stages: Sequence[Any]) -> Iterator[None]:
    """Make what stages would send contiguous in a forward of the whole model."""
    with ExitStack() as stack:
        for stage in stages[:-1]:
            for layer in stage.layers[-1:]:
                hook = whole.get_submodule(layer).register_forward_hook
                stack.enter_context(hook(lambda _, __, sent: tree_map_only(Tensor, Tensor.contiguous, sent)))
        yield


def _gradients(whole: nn.Module, loss: Tensor, hosts: _Hosts) -> Gradients:
    own = trained(whole)
    with hosts.of(whole):
        return dict(zip(own, torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True))


def _of_stages(
    whole: nn.Module, turns: Sequence[Turn], loss: Tensor, hosts: _Hosts
) -> tuple[dict[str, Tensor], dict[str, Sequence[int]]]:
    """Gradients and stages of parameters; copies on several are summed, as `tie_stage_parameters` sums them."""
    first = {id(parameter): name for name, parameter in trained(whole).items()}
    names = {alias: first.get(id(one), alias) for alias, one in whole.named_parameters(remove_duplicate=False)}
    summed: dict[str, Tensor] = {}
    stages: dict[str, Sequence[int]] = {}
    for turn, found in zip(turns, gradients(turns, loss, hosts.of), strict=True):
        for alias in trained(turn.stage):
            stages[names[alias]] = (*stages.get(names[alias], ()), turn.stage.number)
        for alias, gradient in found.items():
            summed[names[alias]] = gradient + summed[names[alias]] if names[alias] in summed else gradient
    return summed, stages


def _updates(
    optimizer: OptimizerOf, whole: nn.Module, stages: Sequence[Any], right: Gradients, hosts: _Hosts, limit: float
) -> Iterator[Compared]:
    """Updates of an optimizer for each stage, beside one of all; of equal gradients, those of all."""
    before = {name: one.detach().clone() for name, one in trained(whole).items()}
    after = dict(_stepped(optimizer, whole, {}, right, hosts))
    for stage in stages:
        tied = names_of_ties(stage.assignment.ties, stage.number)
        for name, value in _stepped(optimizer, stage, tied, right, hosts):
            least = 4 * torch.finfo(value.dtype).eps * _norm(before[name]) / limit  # the rounding of a sum
            moved = value - before[name], after[name] - before[name]
            yield compared(f"update of {name}", [stage.number], *moved, least)


def _stepped(
    optimizer: OptimizerOf, model: nn.Module, tied: Mapping[str, str], right: Gradients, hosts: _Hosts
) -> Iterator[tuple[str, Tensor]]:
    named = [(tied.get(name, name), one) for name, one in trained(model).items()]
    for name, one in named:
        gradient = right[name]
        one.grad = None if gradient is None else gradient.clone()  # a step may clip it
    if named:
        with hosts.of(model):
            optimizer(named).step()
    return ((name, one.detach()) for name, one in named)


def compared_gradients(right: Gradients, found: Gradients, stages: Mapping[str, Sequence[int]]) -> Iterator[Compared]:
    """The gradients ``found`` on ``stages`` beside those of the whole model, by name."""
    total = sum(_norm(one) ** 2 for one in right.values()) ** 0.5
    least = 1e-3 * total / max(len(right), 1) ** 0.5  # some gradients are zero in exact arithmetic
    for name, gradient in right.items():
        if name in stages:  # parts that other modules run are on none
            yield compared(f"gradient of {name}", stages[name], found.get(name), gradient, least)


def _buffers(whole: nn.Module, stage: Any) -> list[Compared]:
    right, parameters = whole.state_dict(), dict(whole.named_parameters(remove_duplicate=False))
    return [
        compared(f"buffer {name}", [stage.number], value, right[name], 0.0)
        for name, value in stage.state_dict().items()
        if name in right and name not in parameters
    ]


def compared(name: str, stages: Sequence[int], value: Tensor | None, right: Tensor | None, least: float) -> Compared:
    """A value beside that of the whole model, whose norm is taken as ``least`` at least."""
    norm = _norm(right)
    if value is None or right is None:
        difference = _norm(value) + norm
    elif torch.equal(value, right):
        difference = 0.0
    elif not math.isfinite(norm) and torch.equal(value.isfinite(), right.isfinite()):
        # An overflow of both; what else they hold is compared.
        return compared(name, stages, value.nan_to_num(0, 0, 0), right.nan_to_num(0, 0, 0), least)
    else:
        difference = _norm(value.double() - right.double())
    of = max(norm, least)
    return Compared(name, tuple(stages), (difference / of if of else math.inf) if difference else 0.0, norm)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else tensor.detach().double().norm().item()
