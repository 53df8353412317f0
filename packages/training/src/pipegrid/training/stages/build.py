"""Build a model with the parameters of some stages only, and the initial values that one process gives them.

The function that makes the model runs twice (see `origins`). The first run finds, on the meta device, which tensors the
own parameters get their values from. In the second, all other parameters become views of one scratch buffer as soon as
they are registered or made: initialization writes there, and the generator goes through the states of one process. So
own values are bit for bit those of one process with the same seed, and the memory is that of the own parameters, of
what they are copied from, and of two others.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from pipegrid.topology.fields import shown
from pipegrid.training.errors import CutError
from pipegrid.training.stages.origins import REMEDY, Plan, Values


def planned(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``factory`` makes, with all parameters on the meta device; no generator advances."""
    return _plan(factory)[0]


def build(factory: Callable[[], nn.Module], wanted: Callable[[nn.Module], set[str]]) -> nn.Module:
    """The model that ``factory`` makes; parameters outside of ``wanted(model)`` share memory and have no values.

    ``wanted`` returns names of parameters; its argument is the model with all parameters on the meta device.

    Raises:
        CutError: the initial values cannot be those of one process.
    """
    model, plan = _plan(factory)
    names = wanted(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = [parameter for name, parameter in parameters.items() if name in names]
    values = Values(plan, plan.needed(kept, list(parameters.values())), plan.behind(list(parameters.values())))
    shapes = _shapes(model)
    with _registering(values.registered), values:
        made = factory()
    if _shapes(made) != shapes:
        raise CutError(f"the function that makes the model makes another model at its second call; {REMEDY}")
    own = {name: each for name, each in made.named_parameters(remove_duplicate=False) if name in names}
    for name, tensor in (own | dict(made.named_buffers())).items():
        values.require_values(name, tensor)
    values.end()
    return made


def require_sizes(model: nn.Module) -> None:
    """Raise where a parameter has no shape before the first forward of its layer."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _require_size(parameter, name)


def _plan(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Plan]:
    """The model on the meta device, and what its parameters come from."""
    if not callable(factory):
        raise CutError(f"model is {shown(factory)}; give a torch.nn.Module, or a function that makes one")
    plan = Plan()
    try:
        with _generators_as_before(), _registering(plan.registered), plan:
            model = factory()
    except (RuntimeError, TypeError) as error:  # what torch raises for values on the meta device
        raise CutError(
            f"the function that makes the model fails where parameters have no values, {type(error).__name__}: "
            f"{error}; if it does not fail alone, {REMEDY}"
        ) from error
    if not isinstance(model, nn.Module):
        raise CutError(f"the function that makes the model returned {shown(model)}; it must return a torch.nn.Module")
    return model, plan


def _shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and first name of each parameter, by name."""
    first: dict[int, str] = {}
    return {
        name: (tuple(parameter.shape), first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _require_size(parameter: nn.Parameter, name: str) -> None:
    if is_lazy(parameter):
        raise CutError(
            f"{name} is a lazy parameter, which has no shape before a forward; give its layer its sizes (nn.Linear in "
            "place of nn.LazyLinear), or run one forward of the model and cut it then"
        )


@contextmanager
def _generators_as_before() -> Iterator[None]:
    """The generators of torch, Python and numpy are at the end as they were."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_cuda else []):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


@contextmanager
def _registering(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Every parameter that a module registers is replaced."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        _require_size(parameter, f"{type(module).__name__}.{name}")
        return replace(parameter)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # its result is used
    try:
        yield
    finally:
        handle.remove()
