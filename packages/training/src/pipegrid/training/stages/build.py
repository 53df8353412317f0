"""Build a model with the parameters of some stages only, and the initial values that one process gives them.

The function that makes the model runs twice. The first run counts parameters in the order of their registration, on the
meta device. In the second, the parameters of other stages become views of one scratch buffer as soon as they are
registered: initialization writes there, and the generator goes through the states of one process. So own values are bit
for bit those of one process with the same seed, and the memory is that of the own parameters and two others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipegrid.topology.fields import shown
from pipegrid.training.errors import CutError


def planned(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``factory`` makes, with all parameters on the meta device; no generator advances."""
    return _counted(factory)[0]


def build(factory: Callable[[], nn.Module], wanted: Callable[[nn.Module], set[str]]) -> nn.Module:
    """The model that ``factory`` makes; parameters outside of ``wanted(model)`` share memory and have no values.

    ``wanted`` returns names of parameters; its argument is the model with all parameters on the meta device.
    """
    plan, registered = _counted(factory)
    names = wanted(plan)
    kept = {id(parameter) for name, parameter in plan.named_parameters(remove_duplicate=False) if name in names}
    keep = iter([id(parameter) in kept for parameter in registered])
    scratch = _Scratch(max((parameter.nbytes for parameter in registered), default=0))

    def chosen(parameter: nn.Parameter) -> nn.Parameter:
        own = next(keep)
        return parameter if own or scratch.has(parameter) else _like(parameter, scratch.view(parameter))

    with _registering(chosen):
        return factory()


def _counted(factory: Callable[[], nn.Module]) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model on the meta device, and its parameters in the order of registration."""
    registered: list[nn.Parameter] = []

    def counted(parameter: nn.Parameter) -> nn.Parameter:
        registered.append(parameter if parameter.is_meta else _like(parameter, parameter.detach().to("meta")))
        return registered[-1]

    if not callable(factory):
        raise CutError(f"model is {shown(factory)}; give a torch.nn.Module, or a function that makes one")
    with torch.random.fork_rng(devices=[]), _registering(counted):
        model = factory()
    if not isinstance(model, nn.Module):
        raise CutError(f"the function that makes the model returned {shown(model)}; it must return a torch.nn.Module")
    return model, registered


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, parameter.requires_grad)


class _Scratch:
    """Memory that all foreign parameters of a device share."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers: dict[torch.device, Tensor] = {}

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter, registered again under another name, is a view already."""
        buffer = self._buffers.get(parameter.device)
        return buffer is not None and parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def view(self, parameter: nn.Parameter) -> Tensor:
        """A view with the shape and dtype of ``parameter``."""
        if parameter.device not in self._buffers:
            self._buffers[parameter.device] = torch.empty(self._nbytes, dtype=torch.uint8, device=parameter.device)
        buffer = self._buffers[parameter.device]
        return buffer[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)


@contextmanager
def _registering(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Every parameter that a module registers is replaced."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        return None if parameter is None else replace(parameter)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # its result is used
    try:
        yield
    finally:
        handle.remove()
