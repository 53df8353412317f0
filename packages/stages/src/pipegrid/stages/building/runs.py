"""The two runs of a function that makes a model: what its parameters come from, and the values of one process.

Both see the same parameters registered, in one order, the same tensors read from files of weights, and the same
operations make parameters of others; these are the events. In the first run (`FirstRun`) parameters are on the meta
device, and every tensor made of them has the events behind it: a copied layer, a resized embedding, a cast weight.

In the second (`Values`) the parameters that own ones come from have memory of their own, and what own ones come from is
read from files. All others are views of one scratch buffer, and no value computed from one may reach a tensor that is
kept.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from pipegrid.stages.errors import CutError
from pipegrid.stages.safetensors_files import Stored
from pipegrid.stages.torch_compat import (
    TorchDispatchMode,
    WeakTensorKeyDictionary,
    called_on_meta,
    extent_of,
    is_random,
    makes_memory,
    memory_of,
    name_of,
    nan_like,
    on_meta,
    reads_shapes_only,
    stays,
    tensors_in,
    tree_map_only,
    written_by,
)

REMEDY = "make the model in full and cut that, pipeline_stage(make(), ...)"


@frozen
class Event:
    """A parameter registered, a tensor read from a file, or an operation on tensors made of these.

    What runs between two registrations may differ between the runs, since initialization is another one on the meta
    device; so an operation is known by its place after a registration.
    """

    parameter: int  # registrations before it; 0 for what is read
    name: str  # of the operation; empty for a registration and for what is read
    shapes: tuple[tuple[int, ...], ...]  # of its results
    index: int = 0  # among the equal ones after the same registration
    stored: Stored | None = None  # what is read


class Events(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The events of one run, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters: list[Event] = []
        self._counts: Counter[Event] = Counter()
        self._same = WeakTensorKeyDictionary()  # what was registered in place of a parameter

    def registration(self, parameter: Tensor) -> Event:
        """A module registers ``parameter``, which no event has made."""
        self.parameters.append(Event(len(self.parameters), "", (tuple(parameter.shape),)))
        self._counts.clear()
        return self.parameters[-1]

    def operation(self, func: Any, results: Sequence[Tensor]) -> Event:
        """``func`` makes ``results`` of tensors with events."""
        first = Event(len(self.parameters), name_of(func), tuple(tuple(each.shape) for each in results))
        self._counts[first] += 1
        return evolve(first, index=self._counts[first] - 1)

    def _replace(self, parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
        """A parameter with other values, and all attributes of ``parameter``, registered in its place from now on."""
        self._same[parameter] = made = nn.Parameter(values, parameter.requires_grad)
        made.__dict__.update(vars(parameter))
        return made


class FirstRun(Events):  # type: ignore[no-untyped-call]
    """The first run: no parameter has values."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0  # of the largest tensor
        self._origins: dict[Any, frozenset[Event]] = {}  # of memory on the meta device
        self._replaced: dict[Any, frozenset[Event]] = {}  # of memory that was a parameter's until its registration
        self._always: set[Event] = set()
        self._read: set[Any] = set()  # memory of what is read

    def read(self, stored: Stored) -> Tensor:
        """A tensor on the meta device in place of one of a file."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        self._read.add(memory_of(tensor))
        self._origins[memory_of(tensor)] = frozenset([Event(0, "", (stored.shape,), stored=stored)])
        self.nbytes = max(self.nbytes, stored.nbytes)
        return tensor

    def registered(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that a module registers in place of ``parameter``."""
        if parameter in self._same:
            return self._same[parameter]  # type: ignore[no-any-return]
        key = memory_of(parameter)
        origin = self._origins.get(key) or self._replaced.get(key)
        if origin is None:
            event = self.registration(parameter)
            origin = frozenset([event])
            self.nbytes = max(self.nbytes, extent_of(parameter))
        if parameter.is_meta:
            self._origins[key] = origin
            return parameter
        self._replaced[key] = origin
        made = self._replace(parameter, on_meta(parameter))
        self._origins[memory_of(made)] = origin
        return made

    def needed(self, kept: Sequence[Tensor], dropped: Sequence[Tensor]) -> set[Event]:
        """The events behind ``kept``, and behind all that is alive and none of ``dropped``."""
        final = {memory_of(tensor) for tensor in (*kept, *dropped)}
        alive = [origin for key, origin in self._origins.items() if key not in final and not key.expired()]
        if alive:  # perhaps in a cycle of what the function has dropped
            gc.collect()
            alive = [origin for key, origin in self._origins.items() if key not in final and not key.expired()]
        return self._always.union(*alive, *self._of(kept))

    def behind(self, parameters: Sequence[Tensor]) -> set[Event]:
        """The events behind ``parameters``."""
        return set[Event]().union(*self._of(parameters))

    def _of(self, tensors: Sequence[Tensor]) -> list[frozenset[Event]]:
        found = (self._origins.get(memory_of(tensor)) for tensor in tensors)
        return [origin for origin in found if origin is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._of(tensors_in((args, kwargs)))
        if not known:
            return func(*args, **kwargs)
        if stays(func, args, kwargs, torch.device("cpu")) and memory_of(args[0]) in self._read:
            return args[0].detach()
        try:
            result = _among_meta(func, args, kwargs)
        except RuntimeError as error:
            raise CutError(
                f"the function that makes the model reads values of parameters ({name_of(func)}), which not every rank "
                f"has; {REMEDY}"
            ) from error
        behind = frozenset[Event]() if reads_shapes_only(func) else frozenset[Event]().union(*known)
        if makes_memory(func):
            if is_random(func):
                self._always |= behind  # how far the generator advances may depend on values
            results = tensors_in(result)
            event = self.operation(func, results)
            self.nbytes = max([self.nbytes, *map(extent_of, results)])
            self._origins |= {memory_of(tensor): behind | {event} for tensor in results}
        for tensor in written_by(func, args, kwargs):
            before = self._origins.get(memory_of(tensor))
            if before is not None:
                self._origins[memory_of(tensor)] = before | behind
        return result


def _among_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on tensors with and without values; its result has none."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if any(not tensor.is_meta for tensor in written_by(func, args, kwargs)):
            raise
        return called_on_meta(func, args, kwargs)


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
            except RuntimeError:
                results = None  # it has no shape without values
            if results is None:
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
