"""The second run of a function that makes a model: own parameters have the values of one process.

The parameters that own ones come from have memory of their own, and what own ones come from is read from files. All
others are views of one scratch buffer, and no value computed from one may reach a tensor that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.stages.building.origins import REMEDY, Event, Events, FirstRun
from pipegrid.stages.errors import CutError
from pipegrid.stages.safetensors_files import Stored
from pipegrid.stages.torch_compat import (
    called_on_meta,
    extent_of,
    is_random,
    makes_memory,
    memory_of,
    name_of,
    nan_like,
    reads_shapes_only,
    tensors_in,
    tree_map_only,
    written_by,
)


class Scratch:
    """Memory of ``nbytes`` on each device, which all tensors of other stages share."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers: dict[torch.device, Tensor] = {}
        self._memory: set[Any] = set()
        self._touched = 0

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of the memory."""
        return memory_of(tensor) in self._memory

    def view(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A view with the shape, strides and dtype of ``tensor``."""
        if device not in self._buffers:
            self._buffers[device] = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
            self._memory.add(memory_of(self._buffers[device]))
        whole = self._buffers[device][: extent_of(tensor)].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride())

    def touch(self, written: Iterable[Tensor]) -> None:
        """Note what is written to; until then the memory has no pages."""
        self._touched = max([self._touched, *(extent_of(tensor) for tensor in written if self.has(tensor))])

    def fill(self) -> None:
        """Fill what was written to with NaN, whatever the dtype."""
        for buffer in self._buffers.values():
            buffer[: self._touched].fill_(255)


class Values(Events):  # type: ignore[no-untyped-call]
    """The second run: the events ``needed`` get the values of one process; ``others`` are behind other parameters."""

    def __init__(self, plan: FirstRun, needed: set[Event], others: set[Event]) -> None:
        super().__init__()
        self._plan, self._needed, self._others = plan, needed, others - needed
        self._known: dict[Any, Event] = {}
        self._scratch = Scratch(plan.nbytes)
        self._mixed: dict[Any, str] = {}  # memory with values made of scratch, by the operation

    def read(self, stored: Stored) -> Tensor:
        """A tensor of a file; it has values where own parameters come from it."""
        event = Event(0, "", (stored.shape,), stored=stored)
        if event not in self._needed:
            return self._scratch.view(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), torch.device("cpu"))
        tensor = stored.read()
        self._known[memory_of(tensor)] = event
        return tensor

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that a module registers in place of ``parameter``."""
        if self._scratch.has(parameter):
            return parameter
        if parameter in self._same:
            return self._same[parameter]  # type: ignore[no-any-return]
        event = self._known.get(memory_of(parameter))
        if event is None:
            event = self._known[memory_of(parameter)] = self.registration(parameter)
            if event not in self._plan.parameters[event.parameter : event.parameter + 1]:
                self._require_equal_run()
        if event in self._needed or parameter.is_meta or (event.name and event not in self._others):
            return parameter
        return self._replace(parameter, self._scratch.view(parameter, parameter.device))

    def require_values(self, name: str, tensor: Tensor) -> None:
        """Raise unless ``tensor``, which the rank keeps, has the values of one process."""
        why = "a parameter of another stage" if self._scratch.has(tensor) else self._mixed.get(memory_of(tensor))
        if why is not None:
            raise CutError(
                f"the initial values of {name} come from {why}, in a way that pipeline_stage does not see; {REMEDY}"
            )

    def end(self, parameters: Iterable[nn.Parameter]) -> None:
        """Require that both runs were equal; those of ``parameters`` that have no values become NaN without memory."""
        self._require_equal_run()
        for parameter in parameters:
            if self._scratch.has(parameter):
                parameter.data = nan_like(parameter, parameter.device)
        self._scratch.fill()

    def _require_equal_run(self) -> None:
        was, now = ([each.shapes[0] for each in run.parameters] for run in (self._plan, self))
        for number, (before, after) in enumerate(zip_longest(was, now)):
            if before != after:
                raise CutError(
                    f"the function that makes the model runs otherwise at its second call: parameter {number} had the "
                    f"shape {before}, and has {after}; {REMEDY}"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        known = [tensor for tensor in given if self._scratch.has(tensor) or memory_of(tensor) in self._known]
        if not known:
            return func(*args, **kwargs)
        result = None
        if makes_memory(func):
            try:
                results = called_on_meta(func, args, kwargs)
            except RuntimeError:  # it has no shape without values
                results = result = func(*args, **kwargs)
            event = self.operation(func, tensors_in(results))
            if event in self._others:
                if is_random(func) and result is None:
                    func(*args, **kwargs)  # the generator advances
                device = torch.device(kwargs.get("device") or known[0].device)
                return tree_map_only(Tensor, lambda tensor: self._scratch.view(tensor, device), results)
            result = func(*args, **kwargs) if result is None else result
            written = tensors_in(result)
            self._known |= {memory_of(tensor): event for tensor in written}
        else:
            written = written_by(func, args, kwargs)
            self._scratch.touch(written)
            result = func(*self._apart(args, written), **self._apart(kwargs, written))
        garbage = any(self._scratch.has(tensor) or memory_of(tensor) in self._mixed for tensor in known)
        if garbage and not reads_shapes_only(func):
            self._mixed |= {
                memory_of(tensor): f"{name_of(func)} of a parameter of another stage"
                for tensor in written
                if not self._scratch.has(tensor)
            }
        return result

    def _apart(self, given: Any, written: Sequence[Tensor]) -> Any:
        """Arguments of an operation that writes to the scratch buffer: what it reads there lies elsewhere."""
        if not any(self._scratch.has(tensor) for tensor in written):
            return given
        kept = {id(tensor) for tensor in written}

        def apart(tensor: Tensor) -> Tensor:
            return tensor.clone() if id(tensor) not in kept and self._scratch.has(tensor) else tensor

        return tree_map_only(Tensor, apart, given)
