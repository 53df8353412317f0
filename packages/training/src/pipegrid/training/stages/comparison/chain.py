"""The stages of a cut in one process, one after the other: a microbatch forward, then backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.training.generators import States, capture, restore
from pipegrid.training.stages.torch_compat import map_tensors, tensors_in


class Draws:
    """The random numbers of a forward of the whole model, which stages draw again.

    The generators of the whole model are noted at its start and at both ends of each layer, and those of a stage are
    set to that: dropout masks are the same, whatever a stage leaves out.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = layers
        self._noted: dict[str, States] = {}

    @contextmanager
    def noted(self, whole: nn.Module) -> Iterator[None]:
        """Note the draws of a forward."""
        with self._at_layers(whole, lambda at: self._noted.__setitem__(at, capture())):
            yield

    @contextmanager
    def repeated(self, stage: nn.Module) -> Iterator[None]:
        """Repeat them in a forward of ``stage``."""
        with self._at_layers(stage, lambda at: restore(self._noted[at])):
            yield

    @contextmanager
    def _at_layers(self, model: nn.Module, act: Callable[[str], None]) -> Iterator[None]:
        def hook(at: str) -> Callable[..., None]:
            return lambda *_: act(at)

        with ExitStack() as stack:
            act("start")
            for name in self._layers:
                layer = model.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(hook(f"before {name}")).remove)
                stack.callback(layer.register_forward_hook(hook(f"after {name}")).remove)
            yield


@frozen(eq=False)
class Turn:
    """A forward of one stage.

    Attributes:
        stage: as `pipeline_stage` makes it.
        received: a copy of what the stage before has sent; None on the first.
        sent: what the stage returned.
    """

    stage: Any
    received: Any
    sent: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of ``received`` that have gradients."""
        return [one for one in tensors_in(self.received) if one.requires_grad]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors of ``sent`` that have gradients; `inputs` of the next stage are their copies."""
        return [one for one in tensors_in(self.sent) if one.requires_grad]


def forwards(
    stages: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], carry: Sequence[str], draws: Draws
) -> list[Turn]:
    """Run the stages in turn; those behind the first are called without the arguments that ``carry`` names."""
    turns: list[Turn] = []
    for stage in stages:
        received = map_tensors(_arrived, turns[-1].sent) if turns else None
        if turns:
            stage.set_input_tensor([received])
        given = {name: value for name, value in kwargs.items() if not turns or name not in carry}
        with draws.repeated(stage.whole):
            turns.append(Turn(stage, received, stage(*args, **given)))
    return turns


def gradients(turns: Sequence[Turn], loss: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of ``loss``, by stage and by name. No ``.grad`` is touched.

    Args:
        turns: of all stages.
        loss: made of what the last one returned.
    """
    found: list[dict[str, Tensor]] = []
    roots: list[tuple[Tensor, Tensor | None]] = [(loss, None)] if loss.requires_grad else []
    for turn in reversed(turns):
        own, inputs = trained(turn.stage), turn.inputs
        made: Sequence[Tensor | None] = [None] * (len(own) + len(inputs))
        if roots and made:
            outputs, weights = zip(*roots, strict=True)
            made = torch.autograd.grad(outputs, [*own.values(), *inputs], weights, allow_unused=True)
        found.append({name: grad for name, grad in zip(own, made, strict=False) if grad is not None})
        arrived = made[len(own) :]
        before = turns[len(turns) - len(found) - 1].outputs if inputs else []
        roots = [(one, grad) for one, grad in zip(before, arrived, strict=True) if grad is not None]
    return found[::-1]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
