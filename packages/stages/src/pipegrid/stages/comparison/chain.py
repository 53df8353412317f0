"""The stages of a cut in one process, one after the other: a microbatch forward, then backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.stages.generators import States, restore
from pipegrid.stages.torch_compat import tensors_in, tree_map_only


@contextmanager
def at_layers(model: nn.Module, layers: Sequence[str], act: Callable[[str], None]) -> Iterator[None]:
    """Call ``act`` with the name of the place, at the start of a forward of ``model`` and at both ends of each layer.

    Stages whose generators are set there to those of the whole model draw the same dropout masks, whatever they leave
    out.
    """

    def hook(at: str) -> Callable[..., None]:
        return lambda *_: act(at)

    with ExitStack() as stack:
        act("start")
        for name in layers:
            layer = model.get_submodule(name)
            stack.enter_context(layer.register_forward_pre_hook(hook(f"before {name}")))
            stack.enter_context(layer.register_forward_hook(hook(f"after {name}")))
        yield


@frozen(eq=False)
class Turn:
    """A forward of one stage.

    Attributes:
        stage: as `pipeline_stage` makes it.
        sent: what it returned.
        inputs: the tensors with gradients of what it received, a copy of what the stage before has sent.
        outputs: those of ``sent``; `inputs` of the next stage are their copies.
    """

    stage: Any
    sent: Any
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def forwards(
    stages: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    carry: Sequence[str],
    states: Mapping[str, States],
    own: Callable[[Any], AbstractContextManager[None]],
) -> list[Turn]:
    """Run the stages in turn, with the random generators set to ``states`` at the places of `at_layers`.

    Those behind the first are called without the arguments that ``carry`` names. Each runs in a context of ``own``.
    """
    turns: list[Turn] = []
    for stage in stages:
        received = tree_map_only(Tensor, _arrived, turns[-1].sent) if turns else None
        if turns:
            stage.set_input_tensor([received])
        given = {name: value for name, value in kwargs.items() if not turns or name not in carry}
        with own(stage), at_layers(stage.whole, stage.assignment.layers, lambda at: restore(states[at])):
            sent = stage(*args, **given)
        turns.append(Turn(stage, sent, _with_gradients(received), _with_gradients(sent)))
    return turns


def _with_gradients(value: Any) -> list[Tensor]:
    return [one for one in tensors_in(value) if one.requires_grad]


def gradients(
    turns: Sequence[Turn], loss: Tensor, own: Callable[[Any], AbstractContextManager[None]]
) -> list[dict[str, Tensor]]:
    """The gradients of ``loss``, by stage and by name. No ``.grad`` is touched.

    Args:
        turns: of all stages.
        loss: made of what the last one returned.
        own: gives the context in which the backward of a stage runs.
    """
    found: list[dict[str, Tensor]] = []
    roots: list[tuple[Tensor, Tensor | None]] = [(loss, None)] if loss.requires_grad else []
    for turn in reversed(turns):
        parameters, inputs = trained(turn.stage), turn.inputs
        made: Sequence[Tensor | None] = [None] * (len(parameters) + len(inputs))
        if roots and made:
            outputs, weights = zip(*roots, strict=True)
            with own(turn.stage):  # checkpoints run forwards again
                made = torch.autograd.grad(outputs, [*parameters.values(), *inputs], weights, allow_unused=True)
        found.append({name: grad for name, grad in zip(parameters, made, strict=False) if grad is not None})
        arrived = made[len(parameters) :]
        before = turns[len(turns) - len(found) - 1].outputs if inputs else []
        roots = [(one, grad) for one, grad in zip(before, arrived, strict=True) if grad is not None]
    return found[::-1]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
