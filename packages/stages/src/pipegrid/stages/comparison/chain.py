"""The stages of a cut in one process, one after the other: a microbatch forward, then backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from pipegrid.core.edge import Edge
from pipegrid.stages.generators import States, restore
from pipegrid.stages.torch_compat import tensors_in, tree_map_only


@contextmanager
def at_layers(model: nn.Module, layers: Sequence[str], act: Callable[[str], None]) -> Iterator[None]:
    """Call ``act`` with the name of the place, at the start of a forward of ``model`` and at both ends of each layer.

    Stages with the generators of the whole model there draw the same dropout masks, whatever they leave out.
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
    """A forward of one stage."""

    stage: Any  # as `pipeline_stage` makes it
    sent: Any  # what it returned
    inputs: Sequence[Tensor]  # the tensors with gradients of what it received, copies of what stages before have sent
    origins: Sequence[tuple[int, Tensor]]  # the outputs that they are copies of, each with the number of its stage


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
    under_way: dict[Edge, list[Tensor]] = {}  # values that stages hand on besides
    for number, stage in enumerate(stages):
        values = {edge: tensors for edge, tensors in under_way.items() if edge.destination == number}
        sent = [(edge.source, tensor) for edge, tensors in values.items() for tensor in tensors]
        sent += [(number - 1, tensor) for tensor in tensors_in(turns[-1].sent)] if turns else []
        received, arrived = tree_map_only(Tensor, _arrived, (turns[-1].sent if turns else None, values))
        if turns:
            stage.set_input_tensor([received])
        stage.set_skips(arrived)
        given = {name: value for name, value in kwargs.items() if not turns or name not in carry}
        with own(stage), at_layers(stage.whole, stage.assignment.layers, lambda at: restore(states[at])):
            made = stage(*args, **given)
        under_way |= stage.take_skips()
        came = [one for tensors in arrived.values() for one in tensors] + tensors_in(received)
        pairs = [(one, origin) for one, origin in zip(came, sent, strict=True) if one.requires_grad]
        turns.append(Turn(stage, made, [one for one, _ in pairs], [origin for _, origin in pairs]))
    return turns


def gradients(
    turns: Sequence[Turn], loss: Tensor, own: Callable[[Any], AbstractContextManager[None]]
) -> list[dict[str, Tensor]]:
    """The gradients of ``loss``, by stage and by name. No ``.grad`` is touched; backwards run in ``own``."""
    found: list[dict[str, Tensor]] = []
    roots: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in turns]
    roots[-1] += [(loss, None)] if loss.requires_grad else []
    for number, turn in reversed([*enumerate(turns)]):
        parameters, inputs = trained(turn.stage), turn.inputs
        made: Sequence[Tensor | None] = [None] * (len(parameters) + len(inputs))
        if roots[number] and made:
            outputs, weights = zip(*roots[number], strict=True)
            with own(turn.stage):  # checkpoints run forwards again
                made = torch.autograd.grad(outputs, [*parameters.values(), *inputs], weights, allow_unused=True)
        found.append({name: grad for name, grad in zip(parameters, made, strict=False) if grad is not None})
        for (source, origin), grad in zip(turn.origins, made[len(parameters) :], strict=True):
            roots[source] += [] if grad is None else [(origin, grad)]
    return found[::-1]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
