"""Build a model with the parameters of some stages only, and the initial values that one process gives them.

The function that makes the model runs twice (see `runs`). In the second run, all parameters of other stages become
views of one scratch buffer as soon as they are registered or made: initialization writes there, and the generator goes
through the states of one process. So own values are bit for bit those of one process with the same seed, and the memory
is that of the own parameters, of what they are copied from, and of two others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from pipegrid.autograd import is_compiled_in_place
from pipegrid.core.fields import shown
from pipegrid.stages.building.pretrained import files_read_by, loads, misfits, stored_twice
from pipegrid.stages.building.runs import REMEDY, FirstRun, Values
from pipegrid.stages.errors import CheckpointError, CutError
from pipegrid.stages.generators import generators_as_before
from pipegrid.stages.host_state import HostState
from pipegrid.stages.safetensors_files import Stored


def planned(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[Container[str]], nn.Module]]:
    """Run ``factory`` on the meta device; no generator advances, and classes hold what they held before.

    Returns:
        The model of that run, and the function that runs ``factory`` again for the model with the parameters of some
        names; others share memory and have no values. It raises CutError where values cannot be those of one process.
    """
    if not callable(factory):
        raise CutError(f"model is {shown(factory)}; give a torch.nn.Module, or a function that makes one")
    host = HostState(factory, only=type)  # layers may be numbered by a class
    hidden: set[Stored] = set()  # tensors of files that are left out, as stored twice
    try:
        loaded = loads()
        model, plan = _planned_once(factory, hidden)
        if loads() and not loaded:  # the function has imported it, and its files were not watched
            model, plan = _planned_once(factory, hidden)
        behind = plan.behind
        hidden = stored_twice(model, lambda one: {event.stored for event in behind([one]) if event.stored is not None})
        if hidden:
            model, plan = _planned_once(factory, hidden)
    finally:
        host.restore()

    def build(names: Container[str]) -> nn.Module:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        kept = [parameter for name, parameter in parameters.items() if name in names]
        dropped = list(parameters.values())
        values = Values(plan, plan.needed(kept, dropped), plan.behind(dropped))
        shapes = _shapes(model)
        with _registering(values.registered), files_read_by(values.read, hidden), values:
            made = factory()
        if _shapes(made) != shapes:
            raise CutError(f"the function that makes the model makes another model at its second call; {REMEDY}")
        own = {name: each for name, each in made.named_parameters(remove_duplicate=False) if name in names}
        for name, tensor in (own | dict(made.named_buffers())).items():
            values.require_values(name, tensor)
        values.end(made.parameters())
        return made

    return model, build


def whole_of(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A model, or the one that a function makes, on the meta device."""
    return model if isinstance(model, nn.Module) else planned(model)[0]


def require_sizes(model: nn.Module) -> None:
    """Raise where a parameter has no shape before the first forward of its layer."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _require_size(parameter, name)


def require_values(model: nn.Module, names: Container[str]) -> None:
    """Raise where a parameter of ``names`` has no values."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and name in names:
            raise CutError(f"{name} is on the meta device; pass a function that makes the model on a CPU")


def require_not_compiled(model: nn.Module) -> None:
    """Raise for a module whose calls run compiled code of the whole model, which a stage has not."""
    whole = hasattr(model, "_orig_mod")  # torch.compile(model); of a layer it calls what its stage has
    compiled = [name or "the model" for name, module in model.named_modules() if is_compiled_in_place(module)]
    if whole or compiled:
        raise CutError(
            f"{'the model' if whole else compiled[0]} is compiled, and calls code for the whole model; cut it, and "
            "compile the layers of the stage then: compile_layers(stage)"
        )


def _planned_once(factory: Callable[[], nn.Module], hidden: set[Stored]) -> tuple[nn.Module, FirstRun]:
    plan = FirstRun()
    try:
        with generators_as_before(), _registering(plan.registered), files_read_by(plan.read, hidden), plan:
            model = factory()
    except CheckpointError:
        raise
    except (RuntimeError, TypeError) as error:  # what torch raises for values on the meta device
        if shapes := misfits(error):
            raise CutError(f"from_pretrained: {shapes}; ignore_mismatched_sizes=True initializes them anew") from error
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
def _registering(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:

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
