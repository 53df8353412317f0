"""A copy of a model's tree that shares the parts of one stage and replaces all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipegrid.training.errors import CutError
from pipegrid.training.stages.assignment import Assignment, joined
from pipegrid.training.stages.stubs import Foreign, ForeignLayer, ForeignPart, Run, blank
from pipegrid.training.stages.torch_compat import memory_of, tree_leaves
from pipegrid.training.stages.tree import TABLES, copied


def shell_of(model: nn.Module, assignment: Assignment, stage: int, run: Run) -> nn.Module:
    """The model with the parts of ``stage``; own parts are shared with ``model``, which is not changed."""
    shell = _part(model, "", assignment, stage, run)
    _require_no_hidden_parts(model, shell, assignment, stage)
    held = assignment.held(stage)
    if held and held[0] == assignment.layers[0]:
        shell.get_submodule(held[0]).register_forward_pre_hook(_entering(run), with_kwargs=True)
    return shell


def _part(part: nn.Module, path: str, assignment: Assignment, stage: int, run: Run) -> nn.Module:
    """``part`` of the model, shared, replaced or copied: a copy holds parts of both kinds."""
    if path in assignment.stage_of_layer:
        owner = assignment.stage_of_layer[path]
        if owner == stage:
            return copied(part)
        sends = assignment.layers[: assignment.before(stage)][-1:] == (path,)
        return ForeignLayer(path, part, run, earlier=owner < stage, sends=sends)
    owners = assignment.owners(path)
    if not assignment.has_layers(path):
        if owners <= {stage}:
            return part  # without parameters (rotary tables, dropout), or all on this stage
        if stage not in owners:
            return ForeignPart(path, part, run, earlier=max(owners) < stage)
    made = copied(part)
    for key, child in part.named_children():
        made.add_module(key, _part(child, joined(path, key), assignment, stage, run))
    for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        if assignment.stage_of_parameter[joined(path, key)] != stage:
            delattr(made, key)
            made.register_buffer(key, blank(parameter, torch.device("cpu")), persistent=False)
    return made


def _require_no_hidden_parts(model: nn.Module, shell: nn.Module, assignment: Assignment, stage: int) -> None:
    """Raise where a plain attribute of a module holds parameters of other stages, which `Foreign` does not replace."""
    named = list(model.named_parameters(remove_duplicate=False))
    own = {id(parameter) for name, parameter in named if assignment.stage_of_parameter[name] == stage}
    foreign = {id(parameter): name for name, parameter in named if id(parameter) not in own}
    memory = {memory_of(parameter): name for name, parameter in named if id(parameter) not in own}

    def hidden(value: Any) -> str | None:
        if isinstance(value, nn.Module):
            names = [foreign.get(id(parameter)) for parameter in value.parameters()]
            return None if None in names or not names else names[0]
        return memory.get(memory_of(value)) if isinstance(value, torch.Tensor) and id(value) not in own else None

    for path, module in shell.named_modules():
        if isinstance(module, Foreign):
            continue
        for key, value in vars(module).items():
            for name in () if key in TABLES else filter(None, map(hidden, tree_leaves(value))):
                raise CutError(
                    f"{joined(path, key)} is a plain attribute that holds {name}, a parameter of another stage; make "
                    "it a parameter or a submodule"
                )


def _entering(run: Run) -> Any:
    """The first layer of the model, on a stage without the embedding, takes what arrived."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        del layer
        if run.received is None or run.entered:
            return None
        run.entered = True
        if args:
            return (run.hidden(), *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): run.hidden()}

    return hook
