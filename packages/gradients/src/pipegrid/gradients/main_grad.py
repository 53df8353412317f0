"""Gradients that accumulate in a wider type than their parameter's: ``parameter.main_grad`` in place of ``.grad``.

A bfloat16 sum over microbatches loses a contribution that is 2^-9 of the sum before it. A parameter with the attribute
``main_grad`` keeps its sum there, whatever library set it; all reads and writes of gradients go through this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from pipegrid.core.errors import StepArgumentError
from pipegrid.core.fields import checked, instance
from pipegrid.gradients import foreach
from pipegrid.gradients.dtensors import local_of, sharded_like
from pipegrid.gradients.errors import GradientError

Module: TypeAlias = Annotated[torch.nn.Module, instance(torch.nn.Module, "a torch.nn.Module")]
Stages: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module]
Modules: TypeAlias = Mapping[str, Stages] | Stages
"""Stages of this rank, as the step functions take them: of one module, or by module; one each, or several."""


def named_modules(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules with their names; an empty name where they have none."""
    by_name = modules.items() if isinstance(modules, Mapping) else [("", modules)]
    for name, stages in by_name:
        for stage in stages if isinstance(stages, Sequence) else [stages]:
            if not isinstance(stage, torch.nn.Module):
                what = f"modules[{name!r}]" if isinstance(modules, Mapping) else "modules"
                checked(stages, tuple[Module, ...] if isinstance(stages, Sequence) else Module, what, StepArgumentError)
            yield name, stage


def parameters_of(modules: Modules) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every trained parameter once, with the name of the first module that has it."""
    seen: set[int] = set()
    for name, module in named_modules(modules):
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def accumulate_in_main_grad(modules: Modules, *, dtype: torch.dtype = torch.float32) -> list[RemovableHandle]:
    """Let every trained parameter of ``modules`` sum its gradients in ``parameter.main_grad`` from now on.

    A hook moves each gradient out of ``.grad`` as soon as a backward leaves it there. ``main_grad`` is None until the
    first gradient. Parameters must not be replaced afterwards (moving a module in place is fine).

    Returns:
        One handle per parameter; ``remove()`` ends it. What is in ``main_grad`` then stays.

    Raises:
        GradientError: ``dtype`` is narrower than a parameter's, or a parameter keeps a ``main_grad`` already.

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 1).to(torch.bfloat16)
        >>> handles = accumulate_in_main_grad(stage)
        >>> stage(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        >>> stage.weight.main_grad.dtype, stage.weight.grad
        (torch.float32, None)
    """
    parameters = [parameter for _, parameter in parameters_of(modules)]
    for parameter in parameters:
        what = f"a parameter of shape {tuple(parameter.shape)}"
        if torch.promote_types(parameter.dtype, dtype) != dtype:
            raise GradientError(f"{what} is {parameter.dtype}, which {dtype} cannot hold")
        if keeps_main_grad(parameter):
            raise GradientError(f"{what} keeps a main_grad already")
    handles = []
    for parameter in parameters:
        parameter.main_grad = None  # type: ignore[attr-defined]
        parameter.main_grad_dtype = dtype  # type: ignore[attr-defined]
        handles.append(parameter.register_post_accumulate_grad_hook(_move_to_main_grad))  # type: ignore[no-untyped-call]
    return handles


def zero_main_grads(modules: Modules, *, set_to_none: bool = True) -> None:
    """Set each ``main_grad`` to None; to zeros with ``set_to_none=False``, or where another library owns the buffer.

    Those of parameters that were frozen meanwhile too, as ``zero_grad`` does.

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 1)
        >>> handles = accumulate_in_main_grad(stage)
        >>> zero_main_grads(stage)
    """
    for parameter in {parameter for _, module in named_modules(modules) for parameter in module.parameters()}:
        held = accumulated(parameter) if keeps_main_grad(parameter) else None
        if held is not None and set_to_none and not has_foreign_buffer(parameter):
            parameter.main_grad = None  # type: ignore[attr-defined]
        elif held is not None:
            held.zero_()


@contextlib.contextmanager
def fresh_gradients(modules: Modules) -> Iterator[None]:
    """Set the gradients of ``modules`` aside, so that a step and its reduction see only what the step adds.

    What earlier steps left is reduced already; reduced again, it would count once per replica. On leaving, it is
    added to the new gradients, in the tensors that held it; after an error it is put back, without what the failed step
    added. Costs one more copy of gradients that are not None (zeros included: use ``zero_grad(set_to_none=True)``).

    The step functions do this themselves where they reduce; around a step of your own::

        with fresh_gradients(modules):
            runtime.step()
            reduce_gradients(modules, collections, loss_lanes=replicas)

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 1)
        >>> with fresh_gradients(stage):
        ...     stage(torch.ones(2, 4)).sum().backward()
        ...
    """
    with set_aside(parameter for _, parameter in parameters_of(modules)):
        yield


@contextlib.contextmanager
def set_aside(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """`fresh_gradients` of some parameters."""
    perhaps = [each for each in parameters if each.grad is not None or hasattr(each, "main_grad")]
    before = [(parameter, found) for parameter in perhaps if (found := accumulated(parameter)) is not None]
    if not before:
        yield
        return
    with torch.no_grad():
        held = [(parameter, found, take_gradient(parameter, found)) for parameter, found in before]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, tensor, value in held:
                if value is not tensor:
                    tensor.copy_(value)
                replace_accumulated(parameter, tensor)
        raise
    with torch.no_grad():
        pairs = []
        for parameter, tensor, value in held:
            added = value if value is not tensor else accumulated(parameter)
            if added is not None:
                pairs.append((local_of(tensor), local_of(added)))
            replace_accumulated(parameter, tensor)
        foreach.add_([tensor for tensor, _ in pairs], [added for _, added in pairs])


def take_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The value of ``gradient``, which is what `accumulated` gives and the parameter then has no more."""
    if has_foreign_buffer(parameter):
        value = gradient.clone()
        gradient.zero_()
        return value
    replace_accumulated(parameter, None)
    return gradient


def replace_accumulated(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Make ``gradient`` itself what `accumulated` gives."""
    if keeps_main_grad(parameter):
        parameter.main_grad = gradient  # type: ignore[attr-defined]
    else:
        parameter.grad = gradient


def keeps_main_grad(parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter's gradients are summed in ``main_grad``."""
    return hasattr(parameter, "main_grad")


def has_foreign_buffer(parameter: torch.nn.Parameter) -> bool:
    """Whether ``main_grad`` is another library's buffer: written, never replaced, and by no hook of ours."""
    return keeps_main_grad(parameter) and not hasattr(parameter, "main_grad_dtype")


def accumulated(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The sum that the backwards have left: ``main_grad`` where the parameter keeps one, else ``grad``."""
    found: Any = getattr(parameter, "main_grad", ...)
    if found is ...:
        return parameter.grad
    return found if isinstance(found, torch.Tensor) else None


def accumulation_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """The type of `accumulated`, also where there is none yet: all replicas must agree on it."""
    if not keeps_main_grad(parameter):
        return parameter.dtype
    held = accumulated(parameter)
    return held.dtype if held is not None else getattr(parameter, "main_grad_dtype", torch.float32)


def set_accumulated(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Put ``value`` in the place of `accumulated`: into its storage where there is one, else a copy of it."""
    if (held := accumulated(parameter)) is not None:
        local_of(held).copy_(local_of(value))
        return
    value = sharded_like(parameter, value)
    if keeps_main_grad(parameter):
        parameter.main_grad = value.to(accumulation_dtype(parameter), copy=True)  # type: ignore[attr-defined]
    else:
        parameter.grad = value.to(parameter.dtype, copy=True)


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add one microbatch's gradient, made outside of autograd's own accumulation (deferred or split backwards)."""
    if (held := accumulated(parameter)) is None:
        set_accumulated(parameter, gradient)
    else:
        held.add_(gradient)


@torch.no_grad()
def _move_to_main_grad(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if isinstance(parameter, torch.nn.Parameter) and gradient is not None:
        add_gradient(parameter, gradient)
        parameter.grad = None
