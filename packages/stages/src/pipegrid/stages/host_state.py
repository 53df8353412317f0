"""State that code keeps on the host between and beside tensors, saved and set back.

A rank has a process of its own, and with it its own copy of everything that Python shares: class attributes, globals,
objects that layers hold together, generators, iterators. Where a model and its stages run in one process, one after
the other, each gets its copy by `HostState`.

Followed are attributes of modules and of the objects that they hold, the classes of these, and what their functions
name: globals, closures, defaults. Of installed packages, globals and classes are followed only in the files that define
classes of the model. The standard library, torch and numpy keep nothing but generators.
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import pickle
import random
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = {"builtins", "types", "collections", "argparse", "functools", "random"}
_OPAQUE = (sys.stdlib_module_names - _PLAIN - {"__main__"}) | {"torch", "numpy", "pipegrid", "attr"}
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, types.CodeType)
_WRAPS: Any = types.MethodType | staticmethod | classmethod | property | functools.cached_property | functools.partial
_INNER = ("__func__", "__self__", "fget", "func", "args", "keywords", "__wrapped__")  # what these hold
_UNSET = ("__dict__", "__weakref__", "__doc__")
_MISSING: Any = object()
_HEAP = 1 << 9  # of the flags of a class: made by Python code

_Contents = dict[Any, Any] | tuple[Any, ...]
_State = tuple[Callable[[], _Contents], Callable[[Any], None]]  # reads a copy of what an object holds; sets it


class HostState:
    """The state on the host that the code of ``roots``, models or functions that make them, can reach now.

    An iterator that Python cannot copy, such as a running generator function, is replaced by one that gives
    the same values and can be copied. ``only``: save objects of this type alone.
    """

    def __init__(self, *roots: Any, only: type = object) -> None:
        self._seen: dict[int, Any] = {}
        self._saved: list[tuple[_State, _Contents]] = []
        self._copies: dict[int, Any] = {}  # a copy of each iterator
        self._replaced: dict[int, Any] = {}
        models = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
        self._files = {type(module).__module__ for module in models}
        open_ = list(roots)
        while open_:
            value = open_.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen or _is_iterator(value):
                continue
            self._seen[id(value)] = value  # keeps its identity
            for state in self._states(value):
                contents = self._save(state) if isinstance(value, only) else state[0]()
                open_ += () if isinstance(value, Tensor) else _values(contents)
            open_ += self._beside(value)

    def restore(self) -> None:
        """Set everything back."""
        fresh: dict[int, Any] = {}

        def of(value: Any) -> Any:
            if id(value) not in self._copies:
                return value
            return fresh.setdefault(id(value), copied_iterator(self._copies[id(value)]))

        for (_, write), contents in self._saved:
            write(_mapped(of, contents) if self._copies else contents)

    def changed(self) -> bool:
        """Whether anything is not as it was; what holds iterators always is."""
        return bool(self._copies) or any(not _are_same(contents, read()) for (read, _), contents in self._saved)

    def _save(self, state: _State) -> _Contents:
        read, write = state
        contents = read()
        if any(map(_is_iterator, _values(contents))):
            contents = _mapped(self._iterator, contents)
            write(contents)
        self._saved.append((state, contents))
        return contents

    def _iterator(self, value: Any) -> Any:
        """An iterator that can be copied, in place of another one; any other value itself."""
        if not _is_iterator(value):
            return value
        if id(value) not in self._replaced:
            made, again = value, copied_iterator(value)
            if again is None:
                made = itertools.tee(value, 1)[0]
                again = copy.copy(made)
            self._seen[id(value)], self._seen[id(made)] = value, made
            self._replaced[id(value)] = self._replaced[id(made)] = made
            self._copies[id(made)] = again
        return self._replaced[id(value)]

    def _is_followed(self, module: str | None) -> bool:
        """Whether code of a Python module may keep something."""
        if module is None or _is_opaque(module):
            return False
        return module in self._files or module in _PLAIN or not _is_installed(module)

    def _states(self, value: Any) -> Iterator[_State]:
        """The parts of an object that can change."""
        kind = type(value)
        known = _is_opaque(kind.__module__) or self._is_followed(kind.__module__)
        if not known and not isinstance(value, nn.Module):
            return
        for kinds, read, write in _CONTAINERS:
            if isinstance(value, kinds) and getattr(kind, "__getitem__", None) in _GETS:
                yield functools.partial(read, value), functools.partial(write, value)
        if isinstance(value, type):
            if self._is_followed(value.__module__) and value.__flags__ & _HEAP:
                yield lambda: dict(vars(value)), functools.partial(_set_class, value)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                yield functools.partial(_in_cell, cell), functools.partial(_set_cell, cell)
            if self._is_followed(value.__globals__.get("__name__")):
                names, stored = _globals_in(value.__code__)
                yield _names_in(value.__globals__, (names & value.__globals__.keys()) | stored)
                for module in map(value.__globals__.__getitem__, names & value.__globals__.keys()):
                    if isinstance(module, types.ModuleType) and self._is_followed(module.__name__):
                        yield _names_in(vars(module), names & vars(module).keys())
        elif isinstance(value, nn.Module):
            for name in ("_parameters", "_buffers"):
                table = vars(value)[name]
                self._seen[id(table)] = table  # their tensors are the model's and each stage's own
                self._save((functools.partial(dict, table), functools.partial(_set_dict, table)))
        elif hasattr(kind, "cache_clear"):
            yield lambda: (value.cache_info().misses,), functools.partial(_clear_cache, value)
        elif hasattr(kind, "bit_generator"):  # of numpy
            yield (
                lambda: (pickle.dumps(value.bit_generator.state),),
                lambda contents: setattr(value.bit_generator, "state", pickle.loads(contents[0])),  # noqa: S301 -- written here
            )
        elif kind is Tensor and value.layout is torch.strided and not value.is_meta:
            yield lambda: (value.detach().clone(),), functools.partial(_set_tensor, value)
        if not _is_opaque(kind.__module__):
            for name in _slots(kind):
                yield lambda name=name: (getattr(value, name, _MISSING),), functools.partial(_set_slot, value, name)  # type: ignore[misc]

    def _beside(self, value: Any) -> Iterable[Any]:
        """Objects that are reached through one besides those that it can change."""
        kind = type(value)
        if isinstance(value, type):
            return value.__mro__[1:] if self._is_followed(value.__module__) else ()
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, types.FunctionType):
            return (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__dict__)
        if isinstance(value, _WRAPS) or hasattr(kind, "cache_clear"):
            return [getattr(value, name, None) for name in _INNER]
        if isinstance(value, nn.Module) or self._is_followed(kind.__module__):
            has_own = hasattr(value, "__dict__") and not isinstance(value, types.ModuleType)
            return (kind, vars(value)) if has_own else (kind,)
        return ()


def copied_iterator(iterator: Any) -> Any:
    """A copy of an iterator that gives what it has not given; None where Python makes none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, which are to lose their copies
        try:
            return copy.copy(iterator)
        except TypeError:
            return None


def _is_iterator(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and not hasattr(value, "__dict__") and kind.__module__ in ("builtins", "itertools")


def _is_opaque(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _OPAQUE


def _is_installed(module: str) -> bool:
    """Whether it is of a distribution: beside its package lies the metadata of what an installer has put there."""
    top = sys.modules.get(module.partition(".")[0])
    places = [*getattr(top, "__path__", ())] or [getattr(top, "__file__", None)]
    return any(_has_metadata(Path(place).parent) for place in places if place)


@functools.lru_cache(4096)
def _has_metadata(folder: Path) -> bool:
    return next(folder.glob("*.dist-info"), None) is not None


def _values(contents: _Contents) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _mapped(function: Callable[[Any], Any], contents: _Contents) -> _Contents:
    if isinstance(contents, dict):
        return {key: function(value) for key, value in contents.items()}
    return tuple(map(function, contents))


def _are_same(contents: _Contents, now: _Contents) -> bool:
    if isinstance(contents, dict) and isinstance(now, dict) and contents.keys() != now.keys():
        return False
    if len(contents) != len(now):
        return False
    return all(map(_is_same, _values(contents), _values(now)))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and type(one) is type(other) is Tensor:
        return torch.equal(one, other)
    return type(one) is type(other) and isinstance(one, _ATOMS) and (one == other or repr(one) == repr(other))  # of NaN


@functools.lru_cache(4096)
def _globals_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """A function's globals and attributes, whose names may be those of a Python module; the globals that it sets."""
    names = set(code.co_names)
    stored = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_names, inner_stored = _globals_in(inner)
            names |= inner_names
            stored |= inner_stored
    return frozenset(names), frozenset(stored)


def _names_in(namespace: dict[str, Any], names: Collection[str]) -> _State:
    """The values of ``names`` in a Python module."""
    return lambda: {name: namespace.get(name, _MISSING) for name in names}, functools.partial(_set_names, namespace)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (name for name in ([slots] if isinstance(slots, str) else slots) if name not in _UNSET)


# ---- Writes


def _set_dict(target: dict[Any, Any], contents: dict[Any, Any]) -> None:
    for key in [key for key in target if key not in contents]:
        del target[key]
    for key, value in contents.items():
        if key not in target or target[key] is not value:
            target[key] = value
    if list(target) != list(contents):
        target.clear()
        target.update(contents)


def _set_list(target: list[Any] | bytearray, contents: tuple[Any, ...]) -> None:
    target[:] = contents  # a bytearray whose memory others share cannot be cleared


def _set_collected(target: Any, contents: tuple[Any, ...]) -> None:
    target.clear()
    (target.update if isinstance(target, set) else target.extend)(contents)


def _set_class(kind: type, contents: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in contents]:
        type.__delattr__(kind, name)
    for name, value in contents.items():
        if vars(kind).get(name, _MISSING) is not value and name not in _UNSET:
            type.__setattr__(kind, name, value)


def _set_names(namespace: dict[str, Any], contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        if value is _MISSING:
            namespace.pop(name, None)
        elif namespace.get(name, _MISSING) is not value:
            namespace[name] = value


def _in_cell(cell: types.CellType) -> tuple[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return (_MISSING,)


def _set_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    if contents[0] is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = contents[0]


def _set_slot(value: Any, name: str, contents: tuple[Any]) -> None:
    if contents[0] is not _MISSING:
        object.__setattr__(value, name, contents[0])
    elif hasattr(value, name):
        object.__delattr__(value, name)


def _set_tensor(tensor: Tensor, contents: tuple[Tensor]) -> None:
    if not torch.equal(tensor, contents[0]):
        tensor.data.copy_(contents[0])  # no write for autograd: a backward finds what its own forward has left


def _clear_cache(function: Any, contents: tuple[int]) -> None:
    if function.cache_info().misses != contents[0]:
        function.cache_clear()


_GETS = (None, dict.__getitem__, OrderedDict.__getitem__, list.__getitem__, bytearray.__getitem__, deque.__getitem__)
"""Of classes that give what they hold, and make nothing."""
_CONTAINERS: tuple[tuple[Any, Callable[[Any], _Contents], Callable[[Any, Any], None]], ...] = (
    (dict, dict, _set_dict),
    ((list, bytearray), tuple, _set_list),
    ((set, deque), tuple, _set_collected),
    (
        torch.Generator,
        lambda one: (one.get_state().numpy().tobytes(),),
        lambda one, contents: one.set_state(torch.frombuffer(bytearray(contents[0]), dtype=torch.uint8)),
    ),
    (
        random.Random,
        lambda one: (pickle.dumps(one.getstate()),),
        lambda one, contents: one.setstate(pickle.loads(contents[0])),  # noqa: S301 -- written here
    ),
)
