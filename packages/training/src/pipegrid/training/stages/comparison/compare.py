"""Compare the stages of a cut with the whole model: the same values, the same microbatch, autograd of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.training.errors import CutError
from pipegrid.training.generators import capture, generators_as_before, restore
from pipegrid.training.stages.calls import accepted_by, by_name, without_cache
from pipegrid.training.stages.comparison.chain import Draws, Turn, forwards, gradients, trained
from pipegrid.training.stages.comparison.differences import Compared, StageComparison
from pipegrid.training.stages.proof.operators import named_leaves
from pipegrid.training.stages.torch_compat import tree_map

Loss = Callable[[Any], Tensor]


def compare(
    make: Callable[[], nn.Module],
    stage_of: Callable[[int], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    carry: Sequence[str] = (),
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
) -> StageComparison:
    """Run one microbatch through the whole model and through its stages, in this process.

    The whole model and all stages are in memory together. Generators, and ``.grad`` of what the call is given, stay as
    they were.

    Args:
        make: the whole model.
        stage_of: the stage of a number, with parameters of its own.
        args: of the call of the whole model; tensors are moved to its device.
        kwargs: likewise.
        carry: as in `pipeline_stage`.
        loss: of what the model returns. None: its own loss, or a weighted sum of all that it returns.
        dtype: compute in this dtype; None: as made.

    Raises:
        CutError: the cut is not proved, values of stages and model differ from the start, or nothing has a gradient.
    """
    with torch.enable_grad(), generators_as_before():
        start = capture()
        whole = make()
        stages: list[Any] = []
        while not (stages and stages[-1].is_last):
            restore(start)
            stages.append(stage_of(len(stages)))
        _require_equal_values(whole, stages)
        for model in (whole, *stages) if dtype is not None else ():
            model.to(dtype)
        args, kwargs = _placed(whole, (tuple(args), dict(kwargs)), dtype)
        carry = (carry,) if isinstance(carry, str) else carry
        if carry:
            args, kwargs = (), by_name(accepted_by(whole), args, kwargs)
        for stage in stages:
            stage.proofs = stages[0].proofs
        proof, _ = stages[0].proofs.found(whole, args, kwargs)
        proof.require()
        draws = Draws(stages[0].assignment.layers)
        with draws.noted(whole):
            output = whole(*args, **without_cache(accepted_by(whole), kwargs))
        turns = forwards(stages, args, kwargs, carry, draws)
        weigh = _loss_like(turns[-1].sent) if loss is None else loss
        losses = weigh(output), weigh(turns[-1].sent)
        if not (math.isfinite(losses[0].item()) and losses[0].requires_grad):
            raise CutError(f"the loss of the whole model is {losses[0]}; there is nothing to compare with")
        return StageComparison(
            proof,
            losses[0].item(),
            losses[1].item(),
            tuple(_gradients(whole, losses[0], turns, losses[1])),
            tuple(one for stage in stages for one in _buffers(whole, stage)),
            max(torch.finfo(one.dtype).eps for one in whole.parameters() if one.is_floating_point()) ** 0.5,
        )


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
    """A copy of the batch, on the device of the model and in ``dtype``."""
    device = next((parameter.device for parameter in whole.parameters()), torch.device("cpu"))

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(device, dtype if leaf.is_floating_point() else None)

    return tree_map(placed, batch)


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
        leaves = [leaf for place, leaf in named_leaves(output) if place in places]
        return torch.stack([(leaf * _weights(leaf)).mean() for leaf in leaves]).sum()

    return weighed


def _weights(leaf: Tensor) -> Tensor:
    """Numbers without a pattern that a model could cancel."""
    numbers = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device)
    return (numbers + 1).square().cos().reshape(leaf.shape).to(leaf.dtype)


def _gradients(whole: nn.Module, loss: Tensor, turns: Sequence[Turn], loss_of_stages: Tensor) -> list[Compared]:
    """Of each trained parameter; copies on several stages are summed, as `tie_stage_parameters` sums them."""
    own = trained(whole)
    right = dict(zip(own, torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True))
    first = {id(parameter): name for name, parameter in own.items()}
    names = {alias: first.get(id(one), alias) for alias, one in whole.named_parameters(remove_duplicate=False)}
    summed: dict[str, Tensor] = {}
    stages: dict[str, list[int]] = {}
    for turn, found in zip(turns, gradients(turns, loss_of_stages), strict=True):
        for alias in trained(turn.stage):
            stages.setdefault(names[alias], []).append(turn.stage.number)
        for alias, gradient in found.items():
            summed[names[alias]] = gradient + summed[names[alias]] if names[alias] in summed else gradient
    total = sum(_norm(one) ** 2 for one in right.values()) ** 0.5
    least = 1e-3 * total / len(right) ** 0.5  # some gradients are zero in exact arithmetic
    return [
        _compared(f"gradient of {name}", stages[name], summed.get(name), right[name], least)
        for name in own
        if name in stages  # parts that other modules run are on none
    ]


def _buffers(whole: nn.Module, stage: Any) -> list[Compared]:
    right, parameters = whole.state_dict(), dict(whole.named_parameters(remove_duplicate=False))
    return [
        _compared(f"buffer {name}", [stage.number], value, right[name], 0.0)
        for name, value in stage.state_dict().items()
        if name in right and name not in parameters
    ]


def _compared(name: str, stages: Sequence[int], value: Tensor | None, right: Tensor | None, least: float) -> Compared:
    norm = _norm(right)
    if value is None or right is None:
        difference = _norm(value) + norm
    else:
        difference = 0.0 if torch.equal(value, right) else _norm(value.double() - right.double())
    return Compared(name, tuple(stages), difference / max(norm, least) if difference else 0.0, norm)


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else tensor.detach().double().norm().item()
