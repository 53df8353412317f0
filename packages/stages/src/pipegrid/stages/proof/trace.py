"""One forward of a whole model, traced: which operation made each tensor, from what, and when it was used."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import random
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.func import functional_call

from pipegrid.stages.assignment import joined
from pipegrid.stages.errors import CutError
from pipegrid.stages.generators import generators_as_before, seed_host
from pipegrid.stages.host_state import HostState
from pipegrid.stages.proof.outline import Outline
from pipegrid.stages.proof.traced import OVERWRITING, Cell, Lists, Operation, Traced, read, traced_in
from pipegrid.stages.skips import Value, place_in
from pipegrid.stages.torch_compat import (
    TorchDispatchMode,
    by_places,
    is_random,
    mappings_of,
    name_of,
    named_leaves,
    num_forward_hooks,
    on_meta,
    reads_shapes_only,
    tensors_in,
    tree_leaves,
    tree_map,
    tree_map_only,
    without_modes,
    written_by,
)

_TORCH, _HERE, _LIBRARY = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__, os.__file__))
_SITE = os.sep + "site-packages" + os.sep


@frozen(eq=False)
class ModelCall:
    """A call of the whole model, to be traced."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    hidden: Mapping[str, Tensor] = field(factory=dict)  # for the result of the embedding; their shapes are read
    loss: Callable[[Any], Any] | None = None  # of what the forward returns, traced as well
    unlike: bool = False  # the host reads other numbers in place of values that are not there
    skips: AbstractSet[Value] = frozenset()  # values that stages have of others


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on what is behind traced tensors, and notes which values cross boundaries."""

    def __init__(
        self, call: ModelCall, *, compared: bool = False, first: int = 0, skips: AbstractSet[Value] = frozenset()
    ) -> None:
        """Trace ``call`` from the boundary ``first``, where a stage begins; ``skips``: the values that stages have."""
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = tensors_in((tuple(call.args), dict(call.kwargs)))
        self.device, self.running = tensors[0].device if tensors else torch.device("cpu"), False
        self.order: list[int] = []  # the layers in the order in which they returned, by number
        self.passed = 0  # boundaries passed: 1 since the first layer began, ``i + 2`` since layer ``i`` returned
        self.sent: dict[int, list[Traced]] = {}  # per boundary, the tensors that a stage sends there
        self.dicts: set[int] = set()  # the boundaries at which it sends a dict
        self.crossing: list[Traced] = []  # tensors that were used behind a boundary that was passed after their making
        self.parameters: dict[str, list[Operation]] = {}  # the uses of each parameter
        self.guesses: list[Operation] = []  # by which the model's own code reads what the batch does not determine
        self.draws: list[Operation] = []  # operations by which the host read a random number
        self.result: Any = None  # what the forward returned
        self.writes = False  # an operation wrote in place to what another part has made, or to the batch
        self.split: list[Operation] = []  # operations that wrote in place to what is sent twice at one boundary
        self.encoder: tuple[type, str] | None = None  # where it returned a dict: its type, the key of its output
        # where asked for, the operations without values behind the first boundary, with digests of known inputs
        self.behind: list[tuple[Operation, tuple[int, ...]]] | None = [] if compared else None
        self.parts: list[str] = []  # the layers and parts that run now
        self.operations: list[Operation] = []  # those that have no values, in their order
        self.applied: list[Operation] = []  # calls of functions with a backward of their own, with arguments
        self.ends: dict[int, list[str]] = {}  # per boundary, what the sent tensors were made of (see `reference`)
        self.results: dict[int, Any] = {}  # per boundary, stand-ins for what is sent, which may be written to later
        self.reads: Counter[str] = Counter()  # how many numbers the host has read of values that are not there, by part
        self.host_drew = ""  # where the model's own code drew from Python's or numpy's generator behind the first layer
        # what parts and layers have returned, by identity: the tensor, the value, the operation that wrote it
        self.returned: dict[int, tuple[Traced, Value, Operation]] = {}
        # the same of modules inside of layers with hooks, by which the model's own code takes their results
        self.inside: dict[int, tuple[Traced, Value, Operation]] = {}
        self.results_inside: dict[str, Any] = {}  # by their names, what they return in the first call, without tensors
        self.filled: dict[str, dict[str, dict[Any, Any]]] = {}  # what layers put into mappings among their arguments
        self.skipped: dict[Value, str] = {}  # of the values of ``skips`` that this model has, what each was made of
        self.given: dict[Value, Traced] = {}  # stand-ins for them, which stages have in their place
        self._skips, self._calls = skips, Counter[str]()
        self._unlike, self._first = call.unlike, first
        self._count = 0
        self._digests: dict[object, str] = {}
        self._drawn: dict[int, tuple[Any, int, tuple[str, ...]]] = {}  # per generator: itself, its state, draws of it
        self._seeded = _state_of(None)
        self._host = _host_generators()
        self._outer: list[Any] = []  # states of Python's and numpy's generators outside of the parts that run
        self._given, self._state = Operation("", "", "", 0), Operation("", "", "", 0)
        self._cells: dict[int, Cell] = {}  # by storage
        self._outside: dict[int, tuple[Tensor, Traced]] = {}

    @cached_property
    def live(self) -> set[int]:
        """The identities of the operations that the result depends on."""
        ends = traced_in(self.result)
        return _behind([one for end in ends for one in (end.origin, end.cell.written)] + self.guesses)

    def behind_of(self, ends: Sequence[Traced], first: int) -> list[Operation]:
        """The operations without values behind ``ends`` that ran at boundary ``first`` or later, in their order."""
        found = _behind([one for end in ends for one in (end.origin, end.cell.written)])
        return [one for one in self.operations if id(one) in found and one.passed >= first]

    def read_by_host(self, tensor: Traced, name: str) -> None:
        """Note a read of ``tensor`` that is no operator of torch."""
        operation = self._operation(name)
        self._use(tensor, operation)
        if tensor.cell.placed:
            self.guess(operation)

    def _operation(self, name: str) -> Operation:
        self._count += 1
        return Operation(name, self.parts[-1] if self.parts else "", _line(), self.passed, number=self._count)

    # ---- What tensors are made of

    def reference(self, tensor: Traced) -> str:
        """A text for a tensor: its values, its place among those sent, its name, or the signature of its makers."""
        written = tensor.cell.written
        if tensor.cell.known and not tensor.behind.is_meta:
            return self._digest(tensor)
        if tensor.arrived is not None:
            base, since = tensor.arrived[0], tensor.arrived[1].number
        else:
            base = tensor.parameter or f"{tensor.origin.signature or 'given'}.{tensor.nth}"
            since = tensor.origin.number
        return f"{base}@{written.signature}" if written.number > since else base

    def _digest(self, tensor: Traced) -> str:
        inner = tensor.behind
        view = (id(tensor.cell), tensor.cell.written.number, inner.shape, inner.stride(), inner.storage_offset())
        key = (*view, inner.dtype) if inner.layout is torch.strided else (id(tensor), tensor.cell.written.number)
        if key not in self._digests:
            with without_modes():
                self._digests[key] = f"{inner.dtype} {tuple(inner.shape)} {_digest(inner)}"
        return self._digests[key]

    def _sign(self, operation: Operation, func: Any, given: Any, *, shapes_only: bool = False) -> None:
        """Give an operation its signature and its text; ``given`` are its arguments."""
        signed: list[str] = []
        written: list[str] = []
        for place, leaf in named_leaves(given):
            if isinstance(leaf, Traced):
                signed.append(f"{place} {leaf.dtype} {tuple(leaf.shape)}" if shapes_only else self.reference(leaf))
                written.append(_shown(leaf))
            elif isinstance(leaf, torch.Generator):
                signed.append(self._drawn_from(leaf, operation.name))
                written.append(f"generator after {len(self._drawn[id(leaf)][2]) - 1} draws")
            elif leaf is not None:
                signed.append(f"{place} {leaf}")
                written.append(str(leaf))
        if func is not None and is_random(func) and not any("generator" in one for one in written):
            state = _state_of(None)
            if state != self._seeded:  # the forward itself has seeded it
                signed.append(self._drawn_from(None, operation.name))
                written.append(f"seeded generator after {len(self._drawn[id(None)][2]) - 1} draws")
        text = f"{operation.name}({'; '.join(signed)})"
        operation.signature = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        operation.text = f"{operation.name.removeprefix('aten.').partition('.')[0]}({', '.join(written)})"

    def _drawn_from(self, generator: torch.Generator | None, name: str) -> str:
        """The state of a generator: on shapes, draws do not advance it."""
        state = _state_of(generator)
        _, known, draws = self._drawn.get(id(generator), (generator, state, ()))
        draws = draws if known == state else ()
        self._drawn[id(generator)] = generator, state, (*draws, name)
        return f"{state} {draws}"

    def apply(self, function: type, given: Any) -> None:
        """Note a call of a function that has a backward of its own; ``given``: its arguments that are no tensors."""
        operation = self._operation(function.__name__)
        self._sign(operation, None, given)
        self.applied.append(operation)

    def _number(self, dtype: torch.dtype) -> Any:
        """A number for the host in place of a value that is not there; the same in the same part at each run.

        A number that no code has by itself, so that it shows where a part keeps it and another one takes it.
        """
        part = self.parts[-1] if self.parts else ""
        self.reads[part] += 1
        if dtype is torch.bool:
            return not self._unlike
        if not (dtype.is_floating_point or dtype.is_complex):
            return 2 if self._unlike else 1
        odd = zlib.crc32(f"{part} {self.reads[part]}".encode()) % 65521 / 2**20
        return (1e4 if self._unlike else 1.0) * (1 + odd)

    # ---- Values

    def outside(self, value: Any, *, parameter: str = "", state: bool = False) -> Any:
        """The traced tensor for one from outside: a ``parameter`` has no values, a model writes to ``state`` freely."""
        if isinstance(value, Traced) and value.owner is not self:
            if not value.cell.known:
                raise CutError("the model keeps a tensor of an earlier forward that the batch did not determine")
            value = value.behind
        if not isinstance(value, Tensor) or isinstance(value, Traced):
            return value
        if id(value) not in self._outside:
            inner = on_meta(value.detach()) if parameter or value.is_meta else value.detach().clone()
            origin = self._state if state else self._given
            cell = self._cell(inner, Cell(not inner.is_meta, bool(parameter), origin))
            made = Traced.of(self, inner, cell, origin, parameter=parameter)
            self._outside[id(value)] = value, made
        return self._outside[id(value)][1]

    def placed(self, value: Tensor, *, known: bool = False) -> Traced:
        """A tensor that one stage has made, with the shape of ``value``; with its values where these are ``known``."""
        with without_modes():
            inner = value.behind if isinstance(value, Traced) else value.detach()
            inner = inner.detach().clone() if known else on_meta(inner)
        return Traced.of(self, inner, self._cell(inner, Cell(known, True, self._given)), self._given, placed=True)

    def _cell(self, inner: Tensor, new: Cell) -> Cell:
        """The cell of the storage of ``inner``, which is ``new`` if it has none."""
        storage = inner.untyped_storage()
        cell = self._cells.setdefault(id(storage), new)
        if not any(one is storage for one in cell.storages):
            cell.storages.append(storage)  # which keeps its identity
        return cell

    # ---- Operations

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on values where the batch determines all of them, else on shapes."""
        args, kwargs = tree_map(self.outside, args), tree_map(self.outside, kwargs or {})
        inputs = traced_in((args, kwargs))
        targets = traced_in(written_by(func, args, kwargs))
        whole = func in OVERWRITING and targets[0].behind.nbytes == targets[0].behind.untyped_storage().nbytes()
        replaced = targets if whole else []
        inputs = [one for one in inputs if not any(one is other for other in replaced)]
        random = is_random(func)
        known = not random and all(one.cell.known for one in inputs)
        inputs = [] if reads_shapes_only(func) else inputs
        drawn = random or any(one.cell.drawn for one in inputs)
        drawn = drawn and all(one.cell.known or one.cell.drawn for one in inputs)
        placed = random or bool(self.parts) or any(one.cell.placed for one in inputs)
        operation = self._operation(str(func))
        operation.draws = random
        for one in inputs:
            self._use(one, operation)
        if self.behind is not None and operation.passed and not known:
            digests = tuple(_digest(one.behind) for one in inputs if one.cell.known)
            self.behind.append((operation, digests))
        if not known:
            self._sign(operation, func, (args, kwargs), shapes_only=reads_shapes_only(func))
            self.operations.append(operation)
        for one in () if known else targets:
            self._forget(one)
        for one in replaced if known else ():
            self._hold(one)
        outs = self._run(func, args, kwargs, operation, known=known)
        if placed and known and not tensors_in(outs):
            self.guess(operation)
        for one in targets:
            # A write for which a stage needs memory of its own, or of which it has not all that this changes:
            made = one.cell.written
            self.writes |= made is self._given or (made is not self._state and made.part != operation.part)
            self.split += [operation] if one.cell.twice else []
            one.cell.known, one.cell.placed, one.cell.drawn = known, placed, drawn
            one.cell.written, one.cell.through = operation, one
        results = tree_map(lambda out: self._made(out, targets, operation, placed=placed, drawn=drawn), outs)
        for nth, one in enumerate(traced_in(results)):
            one.nth = nth if one.origin is operation else one.nth
        return results

    def _use(self, tensor: Traced, operation: Operation) -> None:
        operation.after += [tensor.origin, tensor.cell.written]
        if not tensor.cell.known:
            operation.inputs.append((tensor, tensor.made))
        if tensor.parameter:
            self.parameters.setdefault(tensor.parameter, []).append(operation)
        elif tensor.cell.placed and operation.passed > tensor.made.passed:
            if not tensor.uses:
                self.crossing.append(tensor)
            tensor.uses.append((tensor.made, operation))

    def _run(self, func: Any, args: Any, kwargs: Any, operation: Operation, *, known: bool) -> Any:
        if known:
            made = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            # What memory happened to hold is no value of the batch.
            return made.zero_() if name_of(func).startswith(("empty", "new_empty")) and not made.is_meta else made
        drawn = all(one.cell.drawn for one in traced_in((args, kwargs)))
        args = by_places(func, args, lambda mask: mask.behind if mask.cell.known else None)
        args, kwargs = tree_map(self._shape, args), tree_map(self._shape, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        answer = read(func, args, self._number)
        if answer is NotImplemented:
            return func(*args, **kwargs)
        self.guess(operation)
        if drawn and not self.parts and not isinstance(answer, Tensor):
            self.draws.append(operation)
        return answer

    def guess(self, operation: Operation) -> None:
        """Note that the model's own code reads a value that the batch does not determine, or that one stage has."""
        if not self.parts:
            self.guesses.append(operation)

    def _forget(self, tensor: Traced) -> None:
        """Drop the values behind a tensor; it goes on sharing its cell."""
        if not tensor.behind.is_meta:
            tensor.behind = on_meta(tensor.behind)
            self._cell(tensor.behind, tensor.cell)

    def _hold(self, tensor: Traced) -> None:
        """Give a tensor memory for values that replace all of those that it has not."""
        if tensor.behind.is_meta:
            like = tensor.behind
            tensor.behind = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
            self._cell(tensor.behind, tensor.cell)

    def _shape(self, value: Any) -> Any:
        if not isinstance(value, Traced):
            return value
        if not value.cell.known:
            self._forget(value)
        return on_meta(value.behind)

    def _made(self, out: Any, targets: Sequence[Traced], operation: Operation, *, placed: bool, drawn: bool) -> Any:
        if not isinstance(out, Tensor):
            return out
        for one in targets:
            if out is one.behind:
                return one
        cell = self._cell(out, Cell(not out.is_meta, placed, operation, drawn=drawn))
        return Traced.of(self, out, cell, operation, placed=placed)

    # ---- Parts and boundaries

    def begin(self, name: str) -> None:
        """A part or a layer begins. Python's and numpy's generators are in it as at each run of it."""
        self._note_draws()
        self.parts.append(name)
        self._outer.append(_host_generators())
        seed_host(zlib.crc32(name.encode()))

    def end(self, result: Any, besides: Sequence[tuple[str, Any]] = ()) -> None:
        """The part returns ``result``, and leaves ``besides`` in its arguments: tensors, each with its place."""
        name = self.parts.pop()
        python, numpy = self._outer.pop()
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy.random"].set_state(pickle.loads(numpy))  # noqa: S301 -- written here
        self._returns(name, result, self.returned, besides)

    def _returns(
        self,
        name: str,
        result: Any,
        noted: dict[int, tuple[Traced, Value, Operation]],
        besides: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Note in ``noted`` what a part returns, and give stand-ins for it in place of what is handed on."""
        call = self._calls[name]
        self._calls[name] += 1
        for place, leaf in [*named_leaves(result), *besides]:
            if isinstance(leaf, Traced) and leaf.owner is self and not leaf.cell.known:
                value = Value(name, call, place)
                noted.setdefault(id(leaf), (leaf, value, leaf.made))
                if value in self._skips:
                    self.skipped[value] = self.reference(leaf)
                    self.given[value] = self._stand_in(leaf)
                    leaf.arrived = f"skips {value}", leaf.cell.written

    def _note_draws(self) -> None:
        if self.parts:  # a part inside of a layer, such as an embedding that it shares
            return
        state = _host_generators()
        if self.passed > 1 and not self.host_drew and state != self._host:
            self.host_drew = _line()
        self._host = state

    def watch_layer(self, stack: ExitStack, layer: nn.Module, name: str, number: int, *, ends: bool) -> None:
        """Watch a layer, which begins or ends at a boundary."""
        before: list[Any] = []  # what is in mappings that it is given, so that identities stay

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0 and not self.order:
                self.pass_boundary(args[0] if args else next(iter(kwargs.values())))
            self.passed = max(self.passed, number + 1)  # a stage of the decoder does not run the encoder
            before[:] = [entry for mapping in mappings_of(args, kwargs).values() for entry in mapping.values()]
            self.begin(name)

        def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            besides: list[tuple[str, Any]] = []
            for argument, mapping in mappings_of(args, kwargs).items():
                for key, entry in mapping.items():
                    if not any(entry is one for one in before) and tensors_in(entry):
                        besides += [(place_in(argument, key) + below, leaf) for below, leaf in named_leaves(entry)]
                        entries = self.filled.setdefault(name, {}).setdefault(argument, {})
                        entries.setdefault(key, tree_map_only(Tensor, _nothing, entry))
            self.end(result, besides)
            self.order.append(number)
            if ends:
                self.pass_boundary(result)

        def inside(path: str, module: nn.Module, _: Any, result: Any) -> None:
            if num_forward_hooks(module) > 1:  # also hooks that the model's own code has put there
                self._returns(path, result, self.inside)
                self.results_inside.setdefault(path, tree_map_only(Tensor, _nothing, result))

        stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
        stack.enter_context(layer.register_forward_hook(end, with_kwargs=True))
        for path, module in layer.named_modules(prefix=name):
            if module is not layer:
                stack.enter_context(module.register_forward_hook(partial(inside, path)))

    def end_encoder(self, result: Any) -> None:
        """The encoder returned ``result``, the first of which a stage sends."""
        if isinstance(result, Mapping):
            self.encoder = type(result), next(iter(result))
        self.pass_boundary(result[0])

    def pass_boundary(self, sent: Any) -> None:
        """A stage may end here, and sends ``sent``."""
        if isinstance(sent, Mapping):
            self.dicts.add(self.passed)
        self.sent[self.passed] = tensors = traced_in(sent)
        for number, one in enumerate(tensors):
            one.cell.twice |= any(one.cell is other.cell for other in tensors[:number])
        self.results[self.passed] = self.stand_ins(sent)
        self.ends[self.passed] = [self.reference(one) for one in tensors]
        for place, one in enumerate(tensors) if self.passed >= self._first else ():
            if one.arrived is None or one.arrived[1] is not one.cell.written or one.arrived[0].startswith("sent "):
                one.arrived = f"sent {self.passed}.{place}", one.cell.written
        self._note_draws()
        self.passed += 1

    def stand_ins(self, sent: Any) -> Any:
        """Stand-ins on a stage for tensors of others: values that the batch determines, else shapes."""
        made: dict[int, Traced] = {}  # what is sent twice stays one
        return tree_map_only(Tensor, lambda one: made.setdefault(id(one), self._stand_in(one)), sent)

    def _stand_in(self, value: Tensor) -> Traced:
        return self.placed(value, known=isinstance(value, Traced) and value.cell.known)


def _behind(operations: list[Operation]) -> set[int]:
    """The identities of ``operations``, and of all that they depend on."""
    found = set(map(id, operations))
    while operations:
        new = [one for one in operations.pop().after if id(one) not in found]
        found.update(map(id, new))
        operations += new
    return found


def _inner(value: Any) -> Any:
    return value.behind if isinstance(value, Traced) else value


def _nothing(tensor: Tensor) -> Tensor:
    """In place of a tensor that nothing uses."""
    with without_modes():
        return torch.full((), math.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)


def _shown(tensor: Traced) -> str:
    if tensor.parameter:
        return tensor.parameter
    if tensor.cell.known and tensor.numel() == 1:
        with without_modes():
            return str(tensor.behind.item())
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _state_of(generator: torch.Generator | None) -> int:
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return zlib.crc32(state.numpy().tobytes())


def _host_generators() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.get_state())


@contextmanager
def _noting_functions(mode: Trace) -> Iterator[None]:
    """Tell ``mode`` of each call of a ``torch.autograd.Function``, for which torch has no mode."""
    function: Any = torch.autograd.Function
    original = vars(function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        mode.apply(cls, [one for one in tree_leaves((args, kwargs)) if isinstance(one, (bool, int, float, str))])
        return original.__func__(cls, *args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


def _digest(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return zlib.crc32(repr(tensor).encode())
    tensor = tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())]  # of expanded ones
    data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return zlib.crc32(data, hash(tensor.shape) & 0xFFFFFFFF)


def _line() -> str:
    """The innermost line of code that is neither torch's nor Python's."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_back is not None and not _is_models(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """The line of the model's code at which an error was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_models(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside of its code"


def _is_models(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE)) and (_SITE in file or not file.startswith(_LIBRARY))


def trace(outline: Outline, call: ModelCall, *, compared: bool = False) -> Trace:
    """Run a model once, without gradients; ``compared``: fill `Trace.behind`."""
    mode = Trace(call, compared=compared, first=first_of(outline, call.skips), skips=call.skips)

    def forward(given: Any) -> Any:
        given[1].update({name: mode.placed(one) for name, one in call.hidden.items()})
        return functional_call(outline.model, own, *given, tie_weights=False)

    with ExitStack() as stack:
        own = tensors_of(mode, outline.model, outline.first_names)
        watch(mode, stack, outline, outline.model)
        run(mode, forward, call, call.loss)
    return mode


def traces(outline: Outline, call: ModelCall, host: HostState, first: Trace | None = None) -> list[Trace]:
    """Traces of the whole model: one, ``first`` if it has run; two where it has left something on the host."""
    runs = [first or trace(outline, call)]  # what a later layer leaves there, an earlier one reads in the next forward
    return [*runs, trace(outline, call)] if host.changed() else runs


def first_of(outline: Outline, skips: AbstractSet[Value]) -> int:
    """The first boundary at which what is sent has a name of its own, in place of what it is made of.

    Where values are handed on it is behind the first layer: before that the model's own code makes what is sent of the
    embedding, and a stage to which that is handed on makes it again, as the tensor that it uses behind the first layer.
    """
    return int(bool(skips) and outline.assignment.num_stages > 1)


def tensors_of(mode: Trace, model: nn.Module, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The traced tensors of a model, by name; those of ``parameters`` have no values."""
    made = {}
    for path, module in model.named_modules():  # each once: `functional_call` leaves what is given twice in its place
        own = module.named_parameters("", recurse=False, remove_duplicate=False)
        for key, one in (*own, *module.named_buffers("", recurse=False)):
            name = joined(path, key)
            made[name] = mode.outside(one, parameter=parameters.get(name, ""), state=True)
    return made


def watch(mode: Trace, stack: ExitStack, outline: Outline, model: nn.Module) -> None:
    """Until the end of ``stack``, note the parts and boundaries of ``model``, the outline's or a stage's."""
    encoder = outline.encoder
    for number, name in enumerate(outline.assignment.layers):
        last_of_encoder = encoder is not None and number == encoder[1] - 1
        mode.watch_layer(stack, model.get_submodule(name), name, number, ends=not last_of_encoder)
    for name in outline.parts:
        part = model.get_submodule(name)
        stack.enter_context(part.register_forward_pre_hook(lambda _, __, name=name: mode.begin(name)))
        stack.enter_context(part.register_forward_hook(lambda _, __, result: mode.end(result)))
    if encoder is not None:
        hook = model.get_submodule(encoder[0]).register_forward_hook
        stack.enter_context(hook(lambda _, __, result: mode.end_encoder(result)))


def run(mode: Trace, forward: Callable[[Any], Any], call: ModelCall, loss: Callable[[Any], Any] | None) -> None:
    """Trace ``forward`` of the arguments of ``call``, and ``loss`` of what it returns."""
    given = tree_map(mode.outside, (tuple(call.args), dict(call.kwargs)))
    with generators_as_before(), torch.no_grad(), Lists(), _noting_functions(mode), mode:
        mode.running = True
        try:
            result = forward(given)
            mode.result = result if loss is None else loss(result)
        finally:
            mode.running = False  # its tensors take part in nothing more
