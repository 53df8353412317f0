"""One forward of a whole model, traced: which operation made each tensor, from what, and when it was used."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipegrid.training.errors import CutError
from pipegrid.training.generators import generators_as_before
from pipegrid.training.stages.proof.outline import Outline
from pipegrid.training.stages.proof.traced import (
    OVERWRITING,
    Cell,
    Lists,
    Operation,
    Traced,
    by_places,
    read,
    traced_in,
)
from pipegrid.training.stages.torch_compat import (
    TorchDispatchMode,
    is_random,
    on_meta,
    reads_shapes_only,
    tensors_in,
    tree_map,
    written_by,
)

_TORCH, _HERE, _LIBRARY = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__, os.__file__))
_SITE = os.sep + "site-packages" + os.sep


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on what is behind traced tensors, and notes which values cross boundaries.

    Attributes:
        order: the layers in the order in which they returned, by number.
        passed: number of boundaries passed: 1 since the first layer began, ``i + 2`` since layer ``i`` returned.
        sent: per boundary, the tensors that a stage sends there.
        dicts: the boundaries at which it sends a dict.
        crossing: tensors that were used behind a boundary that was passed after their making.
        parameters: the uses of each parameter.
        guesses: operations outside of layers and parts by which the host read what the batch does not determine.
        draws: those by which it read a random number.
        result: what the forward returned.
        writes: an operation wrote in place to what another part has made, or to the batch.
        split: operations that wrote in place to what is sent twice at one boundary.
        encoder: where the encoder returned a dict, its type and the key of the encoder's output.
        behind: where asked for, the operations behind the first boundary that have no values, each with digests of
            those inputs that the batch determines.
        parts: the layers and parts that run now.
    """

    def __init__(self, device: torch.device, *, compared: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.running = device, False
        self.order: list[int] = []
        self.passed = 0
        self.sent: dict[int, list[Traced]] = {}
        self.dicts: set[int] = set()
        self.crossing: list[Traced] = []
        self.parameters: dict[str, list[Operation]] = {}
        self.guesses: list[Operation] = []
        self.draws: list[Operation] = []
        self.result: Any = None
        self.writes = False
        self.split: list[Operation] = []
        self.encoder: tuple[type, str] | None = None
        self.behind: list[tuple[Operation, tuple[int, ...]]] | None = [] if compared else None
        self.parts: list[str] = []
        self._given, self._state = Operation("", "", "", 0), Operation("", "", "", 0)
        self._cells: dict[int, Cell] = {}  # by storage
        self._outside: dict[int, tuple[Tensor, Traced]] = {}

    @cached_property
    def live(self) -> set[int]:
        """The identities of the operations that the result depends on."""
        ends = traced_in(self.result)
        open_ = [one for end in ends for one in (end.origin, end.cell.written)] + self.guesses
        found = set(map(id, open_))
        while open_:
            new = [one for one in open_.pop().after if id(one) not in found]
            found.update(map(id, new))
            open_ += new
        return found

    def read_by_host(self, tensor: Traced, name: str) -> None:
        """Note a read of ``tensor`` that is no operator of torch."""
        operation = self._operation(name)
        self._use(tensor, operation)
        if tensor.cell.placed:
            self.guess(operation)

    def _operation(self, name: str) -> Operation:
        return Operation(name, self.parts[-1] if self.parts else "", _line(), self.passed)

    # ---- Values

    def outside(self, value: Any, *, parameter: str = "", state: bool = False) -> Any:
        """The traced tensor for one from outside: a parameter has no values, others are copied.

        ``state``: a parameter or buffer, to which a model writes where it will.
        """
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

    def placed(self, value: Tensor) -> Traced:
        """A tensor with the shape of ``value`` that one stage has made."""
        inner = on_meta(value.detach())
        return Traced.of(self, inner, self._cell(inner, Cell(False, True, self._given)), self._given, placed=True)

    def _cell(self, inner: Tensor, new: Cell) -> Cell:
        """The cell of the storage of ``inner``, which is ``new`` if it has none."""
        storage = inner.untyped_storage()
        cell = self._cells.setdefault(id(storage), new)
        if not any(one is storage for one in cell.storages):
            cell.storages.append(storage)  # which keeps its identity
        return cell

    # ---- Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on values where the batch determines all of them, else on shapes."""
        del types
        args, kwargs = tree_map(self.outside, args), tree_map(self.outside, kwargs or {})
        inputs = traced_in((args, kwargs))
        targets = traced_in(written_by(func, args, kwargs))
        replaced = targets if func in OVERWRITING and _covers_storage(targets[0]) else []
        inputs = [one for one in inputs if not any(one is other for other in replaced)]
        random = is_random(func)
        known = not random and all(one.cell.known for one in inputs)
        inputs = [] if reads_shapes_only(func) else inputs
        drawn = random or any(one.cell.drawn for one in inputs)
        drawn = drawn and all(one.cell.known or one.cell.drawn for one in inputs)
        placed = random or bool(self.parts) or any(one.cell.placed for one in inputs)
        operation = self._operation(str(func))
        for one in inputs:
            self._use(one, operation)
        if self.behind is not None and operation.passed and not known:
            digests = tuple(_digest(one.behind) for one in inputs if one.cell.known)
            self.behind.append((operation, digests))
        for one in () if known else targets:
            self._forget(one)
        outs = self._run(func, args, kwargs, operation, known=known)
        if placed and known and not tensors_in(outs):
            self.guess(operation)
        for one in targets:
            self._write(one.cell, operation)
            one.cell.known, one.cell.placed, one.cell.drawn = known, placed, drawn
            one.cell.written, one.cell.through = operation, one
        return tree_map(lambda out: self._made(out, targets, operation, placed=placed, drawn=drawn), outs)

    def _use(self, tensor: Traced, operation: Operation) -> None:
        operation.after += [tensor.origin, tensor.cell.written]
        if tensor.parameter:
            self.parameters.setdefault(tensor.parameter, []).append(operation)
        elif tensor.cell.placed and operation.passed > tensor.made.passed:
            if not tensor.uses:
                self.crossing.append(tensor)
            tensor.uses.append((tensor.made, operation))

    def _write(self, cell: Cell, operation: Operation) -> None:
        """Note a write in place, where a stage needs memory of its own for it, or has not all that it changes."""
        made = cell.written
        self.writes |= made is self._given or (made is not self._state and made.part != operation.part)
        if cell.twice:
            self.split.append(operation)

    def _run(self, func: Any, args: Any, kwargs: Any, operation: Operation, *, known: bool) -> Any:
        if known:
            return func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        drawn = all(one.cell.drawn for one in traced_in((args, kwargs)))
        args = by_places(func, args, lambda mask: mask.behind if mask.cell.known else None)
        args, kwargs = tree_map(self._shape, args), tree_map(self._shape, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        answer = read(func, args)
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

    def _shape(self, value: Any) -> Any:
        """What is behind a tensor, without values."""
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

    def watch_part(self, stack: ExitStack, part: nn.Module, name: str) -> None:
        """Until the end of ``stack``, note when ``part`` begins and returns."""

        def end(*_: Any) -> None:
            self.parts.pop()

        stack.enter_context(part.register_forward_pre_hook(lambda _, __: self.parts.append(name)))
        stack.enter_context(part.register_forward_hook(end))

    def watch_layer(self, stack: ExitStack, layer: nn.Module, name: str, number: int, *, ends: bool) -> None:
        """The same of a layer, which begins or ends at a boundary."""

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0 and not self.order:
                self.pass_boundary(args[0] if args else next(iter(kwargs.values())))
            self.parts.append(name)

        def end(_: nn.Module, __: Any, result: Any) -> None:
            self.parts.pop()
            self.order.append(number)
            if ends:
                self.pass_boundary(result)

        stack.enter_context(layer.register_forward_pre_hook(begin, with_kwargs=True))
        stack.enter_context(layer.register_forward_hook(end))

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
        self.passed += 1


def _inner(value: Any) -> Any:
    return value.behind if isinstance(value, Traced) else value


def _digest(tensor: Tensor) -> int:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return zlib.crc32(data, hash(tensor.shape) & 0xFFFFFFFF)


def _covers_storage(tensor: Traced) -> bool:
    return tensor.behind.nbytes == tensor.behind.untyped_storage().nbytes()


def _line() -> str:
    """The innermost line of code that is neither torch's nor Python's."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)) and (_SITE in file or not file.startswith(_LIBRARY)):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def trace(
    outline: Outline,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hidden: Mapping[str, Tensor] = MappingProxyType({}),
    loss: Callable[[Any], Any] | None = None,
    compared: bool = False,
) -> Trace:
    """Run a model once, without gradients.

    Args:
        outline: of the model.
        args: positional arguments of its forward.
        kwargs: those by name.
        hidden: more of these, which stand for the result of the embedding; their shapes are read.
        loss: a function of what the forward returns, traced as well.
        compared: fill `Trace.behind`.
    """
    model, encoder = outline.model, outline.encoder
    tensors = tensors_in((tuple(args), dict(kwargs)))
    mode = Trace(tensors[0].device if tensors else torch.device("cpu"), compared=compared)
    parameters, buffers = (each(remove_duplicate=False) for each in (model.named_parameters, model.named_buffers))
    own = {name: mode.outside(one, parameter=name, state=True) for name, one in parameters}
    own |= {name: mode.outside(one, state=True) for name, one in buffers}
    with ExitStack() as stack:
        for number, name in enumerate(outline.assignment.layers):
            last_of_encoder = encoder is not None and number == encoder[1] - 1
            mode.watch_layer(stack, model.get_submodule(name), name, number, ends=not last_of_encoder)
        for name in outline.parts:
            mode.watch_part(stack, model.get_submodule(name), name)
        if encoder is not None:
            hook = model.get_submodule(encoder[0]).register_forward_hook
            stack.enter_context(hook(lambda _, __, result: mode.end_encoder(result)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(generators_as_before())
        given = tree_map(mode.outside, (tuple(args), dict(kwargs)))
        given[1].update({name: mode.placed(one) for name, one in hidden.items()})
        with Lists(), mode:
            mode.running = True
            try:
                result = functional_call(model, own, *given)
                mode.result = result if loss is None else loss(result)
            finally:
                mode.running = False  # its tensors take part in nothing more
    return mode
