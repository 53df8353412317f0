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
from attrs import define, field
from torch import Tensor, nn
from torch.func import functional_call

from pipegrid.training.errors import CutError
from pipegrid.training.generators import generators_as_before
from pipegrid.training.stages.proof.operators import (
    OVERWRITING,
    Lists,
    by_places,
    is_random,
    read,
)
from pipegrid.training.stages.proof.traced import Cell, Operation, Traced, traced_in
from pipegrid.training.stages.torch_compat import (
    TorchDispatchMode,
    on_meta,
    reads_shapes_only,
    tensors_in,
    tree_map,
    written_by,
)

_TORCH, _HERE, _LIBRARY = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__, os.__file__))
_SITE = os.sep + "site-packages" + os.sep


@define(eq=False, slots=False)
class Forward:
    """What a traced forward has shown.

    Attributes:
        order: the layers in the order in which they returned, by number.
        passed: number of boundaries passed: 1 since the first layer began, ``i + 2`` since layer ``i`` returned.
        sent: per boundary, the tensors that a stage sends there.
        crossing: tensors that were used behind a boundary that was passed after their making.
        parameters: the uses of each parameter.
        guesses: operations outside of layers and parts by which the host read what the batch does not determine.
        result: what the forward returned.
        behind: where asked for, the operations behind the first boundary that have no values, each with digests of
            those inputs that the batch determines.
    """

    order: list[int] = field(factory=list)
    passed: int = 0
    sent: dict[int, list[Traced]] = field(factory=dict)
    crossing: list[Traced] = field(factory=list)
    parameters: dict[str, list[Operation]] = field(factory=dict)
    guesses: list[Operation] = field(factory=list)
    result: Any = None
    behind: list[tuple[Operation, tuple[int, ...]]] | None = None

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


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on what is behind traced tensors, and notes which values cross boundaries."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.forward, self.running = device, Forward(), False
        self.parts: list[str] = []  # which run now
        self._given = Operation("", "", "", 0)
        self._cells: dict[int, Cell] = {}  # by storage
        self._outside: dict[int, tuple[Tensor, Traced]] = {}

    def read_by_host(self, tensor: Traced, name: str) -> None:
        """Note a read of ``tensor`` that is no operator of torch."""
        operation = Operation(name, self.parts[-1] if self.parts else "", _line(), self.forward.passed)
        self._use(tensor, operation)
        if tensor.cell.placed:
            self.guess(operation)

    def stop(self) -> None:
        """End the trace: its tensors take part in nothing more."""
        self.running = False

    # ---- Values

    def outside(self, value: Any, *, parameter: str = "") -> Any:
        """The traced tensor for one from outside: a parameter has no values, others are copied."""
        if isinstance(value, Traced) and value.owner is not self:
            if not value.cell.known or value.cell.placed:
                raise CutError("the model keeps a tensor of an earlier forward that the batch did not determine")
            value = value.behind
        if not isinstance(value, Tensor) or isinstance(value, Traced):
            return value
        if id(value) not in self._outside:
            inner = on_meta(value.detach()) if parameter or value.is_meta else value.detach().clone()
            cell = self._cell(inner, Cell(not inner.is_meta, bool(parameter), self._given))
            made = Traced.of(self, inner, cell, self._given, parameter=parameter)
            self._outside[id(value)] = value, made
        return self._outside[id(value)][1]

    def placed(self, value: Tensor) -> Traced:
        """A tensor with the shape of ``value`` that one stage has made."""
        inner = on_meta(value.detach())
        return Traced.of(self, inner, self._cell(inner, Cell(False, True, self._given)), self._given)

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
        placed = random or bool(self.parts) or any(one.cell.placed for one in inputs)
        operation = Operation(str(func), self.parts[-1] if self.parts else "", _line(), self.forward.passed)
        for one in inputs:
            self._use(one, operation)
        if self.forward.behind is not None and operation.passed and not known:
            digests = tuple(_digest(one.behind) for one in inputs if one.cell.known)
            self.forward.behind.append((operation, digests))
        for one in () if known else targets:
            self._forget(one)
        outs = self._run(func, args, kwargs, operation, known=known)
        if placed and known and not tensors_in(outs):
            self.guess(operation)
        for one in targets:
            one.cell.known, one.cell.placed = known, placed
            one.cell.written = operation
        return tree_map(lambda out: self._made(out, targets, operation, placed=placed), outs)

    def _use(self, tensor: Traced, operation: Operation) -> None:
        operation.after += [tensor.origin, tensor.cell.written]
        if tensor.parameter:
            self.forward.parameters.setdefault(tensor.parameter, []).append(operation)
        elif tensor.cell.placed and operation.passed > tensor.made.passed:
            if not tensor.uses:
                self.forward.crossing.append(tensor)
            tensor.uses.append((tensor.made, operation))

    def _run(self, func: Any, args: Any, kwargs: Any, operation: Operation, *, known: bool) -> Any:
        if known:
            return func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        args = by_places(func, args, lambda mask: mask.behind if mask.cell.known else None)
        args, kwargs = tree_map(self._shape, args), tree_map(self._shape, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        answer = read(func, args)
        if answer is NotImplemented:
            return func(*args, **kwargs)
        self.guess(operation)
        return answer

    def guess(self, operation: Operation) -> None:
        """Note that the model's own code reads a value that the batch does not determine, or that one stage has."""
        if not self.parts:
            self.forward.guesses.append(operation)

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

    def _made(self, out: Any, targets: Sequence[Traced], operation: Operation, *, placed: bool) -> Any:
        if not isinstance(out, Tensor):
            return out
        for one in targets:
            if out is one.behind:
                return one
        cell = self._cell(out, Cell(not out.is_meta, placed, operation))
        return Traced.of(self, out, cell, operation)

    # ---- Parts and boundaries

    def end_part(self) -> None:
        """The part that began last has returned."""
        self.parts.pop()

    def pass_boundary(self, sent: Any) -> None:
        """A stage may end here, and sends ``sent``."""
        self.forward.sent[self.forward.passed] = traced_in(sent)
        self.forward.passed += 1


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
    model: nn.Module,
    *,
    layers: Sequence[str],
    parts: Sequence[str],
    encoder: tuple[str, int] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hidden: Mapping[str, Tensor] = MappingProxyType({}),
    loss: Callable[[Any], Any] | None = None,
    compared: bool = False,
) -> Forward:
    """Run ``model`` once, without gradients.

    Args:
        model: the whole model, made by `meta_copy`.
        layers: the dotted names of its layers, in the order in which they should run.
        parts: the dotted names of its other parts that belong to one stage.
        encoder: the dotted name of the encoder and its number of layers, of a model that has a decoder as well.
        args: positional arguments of its forward.
        kwargs: those by name.
        hidden: more of these, which stand for the result of the embedding; their shapes are read.
        loss: a function of what the forward returns, traced as well.
        compared: fill `Forward.behind`.
    """
    tensors = tensors_in((tuple(args), dict(kwargs)))
    mode = Trace(tensors[0].device if tensors else torch.device("cpu"))
    mode.forward.behind = [] if compared else None
    own = {name: mode.outside(one, parameter=name) for name, one in model.named_parameters(remove_duplicate=False)}
    own |= {name: mode.outside(one) for name, one in model.named_buffers(remove_duplicate=False)}
    with ExitStack() as stack:
        for number, name in enumerate(layers):
            last_of_encoder = encoder is not None and number == encoder[1] - 1
            _watch_layer(mode, stack, model.get_submodule(name), name, number, ends=not last_of_encoder)
        for name in parts:
            _watch_part(mode, stack, model.get_submodule(name), name)
        if encoder is not None:
            ended = model.get_submodule(encoder[0]).register_forward_hook(
                lambda _, __, result: mode.pass_boundary(result[0])
            )
            stack.callback(ended.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(generators_as_before())
        given = tree_map(mode.outside, (tuple(args), dict(kwargs)))
        given[1].update({name: mode.placed(one) for name, one in hidden.items()})
        with Lists(), mode:
            mode.running = True
            stack.callback(mode.stop)
            result = functional_call(model, own, *given)
            mode.forward.result = result if loss is None else loss(result)
    return mode.forward


def _watch_part(mode: Trace, stack: ExitStack, part: nn.Module, name: str) -> None:
    stack.callback(part.register_forward_pre_hook(lambda _, __: mode.parts.append(name)).remove)
    stack.callback(part.register_forward_hook(lambda *_: mode.end_part()).remove)


def _watch_layer(mode: Trace, stack: ExitStack, layer: nn.Module, name: str, number: int, *, ends: bool) -> None:
    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number == 0 and not mode.forward.order:
            mode.pass_boundary(args[0] if args else next(iter(kwargs.values())))
        mode.parts.append(name)

    def end(_: nn.Module, __: Any, result: Any) -> None:
        mode.parts.pop()
        mode.forward.order.append(number)
        if ends:
            mode.pass_boundary(result)

    stack.callback(layer.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(layer.register_forward_hook(end).remove)
