"""A copy of a model's tree that shares the parts of one stage and replaces all others.

So the model's own forward runs on every stage. The layer before the stage returns what arrived. Layers before that one,
and earlier parts such as the embedding, return NaN in the shape of their results, from which tables (masks, positions,
rotary) are made; the first later part ends the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, ClassVar

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from pipegrid.stages.assignment import Assignment, is_container, joined
from pipegrid.stages.errors import CutError
from pipegrid.stages.skips import Skips
from pipegrid.stages.torch_compat import (
    TABLES,
    Shapes,
    children_of,
    copied,
    memory_of,
    meta_copy,
    nan_like,
    num_forward_hooks,
    on_meta,
    tensors_in,
    tree_leaves,
    tree_map_only,
)


class Leave(Exception):  # noqa: N818 -- no error: the own part is done
    """Ends the forward of a stage after its last part."""


@frozen
class Needs:
    """The facts of a call that the stages need, from the trace of the whole model."""

    absent: tuple[str, ...] = ()  # places in the model's output of what the last stage cannot make
    writes: bool = True  # in place to what parts return, or to the batch; also where no trace has shown it
    dicts: frozenset[int] | None = None  # the stages that receive a dict; None where no trace has shown it
    encoder: tuple[type, str] | None = None  # where it returns a dict: its type, and the key of its output
    longer: bool = False  # the model's own code puts other tokens beside those of the ids, as prompt tuning does
    skips: Skips | None = None  # the values that stages hand on past others; None where there are none
    full: frozenset[int] = frozenset()  # stages behind the first whose code differs without `PIXELS`
    beside: frozenset[str] = frozenset()  # parts that run beside layers of other stages, which use them


@define(eq=False)
class StageRun:
    """The forward that is running on a stage."""

    received: Any = None  # what the last layer of the stage before returned; None on the first
    entered: bool = False  # the first part after the embedding has run
    left: Any = None  # what the last own layer returned
    encoded: Any = None  # the encoder's output, of a model that has one
    # where the model writes in place, what the stage replaces has memory of its own, and what it sends is kept from it
    needs: Needs = field(factory=Needs)
    device: torch.device | None = None  # of the stage, in a forward
    real: Collection[str] = ()  # the parts of other stages that run here, as their parameters came with a microbatch
    given: Collection[str] = ()  # the parts of other stages whose results came

    def stand_in(self, like: Tensor) -> Tensor:
        """NaN in place of ``like``, in the dtype of the hidden states: a ghost does not know that of FSDP2."""
        hidden = like if self.received is None else first_tensor(self.received)
        device = self.device if hidden.is_meta and self.device is not None else hidden.device
        made = nan_like(like.to(hidden.dtype) if like.is_meta and like.is_floating_point() else like, device)
        return made.clone() if self.needs.writes else made

    def shaped(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """What ``part`` returns, without values: by shapes, or where its code reads numbers (image sizes), by both."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- as torch documents for subclasses
            try:
                return part(*tree_map_only(Tensor, on_meta, args), **tree_map_only(Tensor, on_meta, kwargs))
            except RuntimeError:
                args, kwargs = tree_map_only(Tensor, without_floats, (args, kwargs))
                with Shapes(self.device):
                    return part(*args, **kwargs)

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Hook of the first layer of the model: on a stage without the embedding, it takes what arrived."""
        if self.received is None or self.entered:
            return None
        self.entered = True
        if args:
            return (self.received, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.received}

    def pass_on(self, _layer: nn.Module, _args: Any, result: Any) -> None:
        """Hook of the last own layer, of a stage that ends with the encoder."""
        self.left = result

    def leave(self, _layer: nn.Module, _args: Any, result: Any) -> Any:
        """Hook of the last own layer: what is sent is kept from the model's own code, which runs on to its end here."""
        self.left = result
        return tree_map_only(Tensor, lambda one: one.detach().clone(), result) if self.needs.writes else None

    def encode(self, _encoder: nn.Module, _args: Any, result: Any) -> None:
        """Hook of the encoder."""
        self.encoded = result[0].clone() if self.needs.writes else result[0]


def without_floats(tensor: Tensor) -> Tensor:
    """A tensor on the meta device, or one of numbers as it is."""
    return on_meta(tensor) if tensor.is_floating_point() else tensor


def first_tensor(value: Any) -> Tensor:
    """The hidden states of what a layer returned: a tensor, or the first in a tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    found = next(iter(tensors_in(value)), None)
    if found is None:
        raise CutError(
            f"a layer returns a {type(value).__name__} without tensors that stages could send; it must be a tensor, or "
            "a tuple, list or dict that has tensors"
        )
    return found


class Ghost(Tensor):
    """A parameter or buffer of another stage, on the meta device: its shape and dtype, and the device of this stage.

    What a model makes by these alone (``zeros_like``, ``new_zeros``, ``to(weight)``) is on the device of the stage. Its
    values are NaN if it belongs to an earlier stage; of a later stage, a use of them fails as with every tensor on the
    meta device.
    """

    run: StageRun
    earlier: bool
    _is_param: bool
    _DEVICE: ClassVar = {getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")}

    @staticmethod
    def of(tensor: Tensor, run: StageRun, *, earlier: bool) -> Ghost:
        """The ghost of a tensor on the meta device."""
        made = Tensor._make_subclass(Ghost, tensor.detach(), tensor.requires_grad)  # noqa: SLF001 -- as nn.Parameter does
        made.run, made.earlier = run, earlier
        made._is_param = isinstance(tensor, nn.Parameter)  # noqa: SLF001 -- what isinstance(made, nn.Parameter) reads
        return made

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take a stand-in on the device of the stage where the shape decides; else run on the meta device."""
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- as torch documents for subclasses
            first = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
            device = first.run.device
            by_shape = func in cls._DEVICE or name == "get_device" or name.endswith("_like") or name.startswith("new_")
            like = name in ("to", "type_as") and not isinstance(args[0], cls)
            if device is not None and (by_shape or like or first.earlier):
                args, kwargs = tree_map_only(cls, lambda one: nan_like(one, device), (args, kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        made: Ghost = memo.setdefault(id(self), Ghost.of(self, copy.deepcopy(self.run, memo), earlier=self.earlier))
        return made


def _ghost_of(part: nn.Module, run: StageRun, *, earlier: bool) -> nn.Module:
    made = meta_copy(part, buffers=True)
    ghosts: dict[int, tuple[Ghost, Tensor]] = {}  # what is in two places stays one
    for module in made.modules():
        tables: Sequence[dict[str, Any]] = module._parameters, module._buffers  # noqa: SLF001 -- keep their keys
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    table[key], _ = ghosts.setdefault(id(tensor), (Ghost.of(tensor, run, earlier=earlier), tensor))
    return made


class Placeholder(nn.Module):
    """A part on another stage: no parameters; attributes are those of the part, with ghosts of its tensors."""

    def __init__(self, name: str, part: nn.Module, run: StageRun, *, earlier: bool) -> None:
        super().__init__()
        # No submodule: it has no place among the stage's parameters.
        self.__dict__["ghost"] = _ghost_of(part, run, earlier=earlier)
        self.name, self.run, self.earlier, self.training = name, run, earlier, part.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "ghost" not in self.__dict__:
                raise
            return getattr(self.__dict__["ghost"], name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """In a forward, what the model's own code asks of the part; a stage has none of these."""
        running: nn.Module = self if self.run.device is None else self.__dict__["ghost"]
        return nn.Module.named_parameters(running, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Placeholder:
        """``to(dtype)`` and its like: the ghost takes the dtype, and stays on the meta device."""
        part: nn.Module = self.__dict__["ghost"]
        dtype = next((tensor.dtype for tensor in part.parameters() if tensor.is_floating_point()), None)
        if dtype is not None:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- as torch documents for subclasses
                part.to(fn(torch.empty(0, dtype=dtype)).dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class LayerPlaceholder(Placeholder):
    """A layer on another stage; ``sends``: it is the last before this stage."""

    def __init__(self, name: str, part: nn.Module, run: StageRun, *, earlier: bool, sends: bool) -> None:
        super().__init__(name, part, run, earlier=earlier)
        self.sends = sends

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stage before has sent, or a stand-in of it; a later layer ends the forward."""
        if self.earlier:
            self.run.entered = True
            for part, module in vars(self).get("inside", {}).items():
                if part not in self.run.given:
                    continue
                if num_forward_hooks(module) < 2:  # one hands on what came
                    raise CutError(
                        f"the model takes by a hook what {part} returns, and it put its hooks on this stage in an "
                        "earlier call that needed none there; make a step the first call of the stages"
                    )
                module()
            return self.run.received if self.sends else tree_map_only(Tensor, self.run.stand_in, self.run.received)
        if self.run.left is None:  # a stage of the embedding alone
            self.run.left = args[0] if args else next(iter(kwargs.values()))
        raise Leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, without what torch does around it: most layers of a model are on another stage."""
        hooked = self._forward_pre_hooks or self._forward_hooks
        return super().__call__(*args, **kwargs) if hooked else self.forward(*args, **kwargs)


class PartPlaceholder(Placeholder):
    """A part beside the layers on another stage; ``own``: the same module, which the stage has under another name."""

    def __init__(
        self, name: str, part: nn.Module, run: StageRun, *, earlier: bool, own: nn.Module | None = None
    ) -> None:
        super().__init__(name, part, run, earlier=earlier)
        self.__dict__["own"] = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN in the shape of the part's result; a later part ends the forward."""
        if not self.earlier:
            own = self.__dict__["own"]
            if self.run.left is None and own is not None:
                return own(*args, **kwargs)
            if self.run.left is not None:
                raise Leave
            if self.name not in self.run.needs.beside:
                raise CutError(f"{self.name} runs before the layers; name it in Names(embedding=...)")
        elif self.name in self.run.real:
            return self.__dict__["ghost"](*args, **kwargs)
        elif self.run.entered and not (self.name in self.run.given or self.name in self.run.needs.beside):
            raise CutError(f"{self.name} runs after the layers; name it in Names(head=...)")
        with torch.no_grad():
            made = self.run.shaped(self.__dict__["ghost"], args, kwargs)
        return tree_map_only(Tensor, self.run.stand_in, made)


class ParametersPlaceholder(PartPlaceholder):
    """A list or dict of parameters on another stage, of which the model's own code takes entries."""

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__["ghost"][key]

    def __len__(self) -> int:
        return len(self.__dict__["ghost"])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["ghost"])

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__["ghost"]


def with_buffers_apart(model: nn.Module, assignment: Assignment) -> nn.Module:
    """The model with copies of the buffers that are in no stage alone, for a further stage of a rank.

    A model's own code, which runs on each stage, may write to them (a counter of forwards). Parameters and parts of
    stages are shared with ``model``, which is not changed.
    """
    parts: dict[int, nn.Module] = {}
    buffers: dict[int, Tensor] = {}  # what is in two places stays one

    def apart(part: nn.Module, path: str) -> nn.Module:
        in_a_stage = path in assignment.stage_of_layer or (assignment.owners(path) and not assignment.has_layers(path))
        if (in_a_stage and not is_container(part)) or next(part.buffers(), None) is None:
            return part
        if id(part) not in parts:
            made = parts[id(part)] = copied(part)
            for key, child in children_of(part):
                made.add_module(key, apart(child, joined(path, key)))
            for key, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
                setattr(made, key, buffers.setdefault(id(buffer), buffer.clone()))
        return parts[id(part)]

    return apart(model, "")


def skeleton_of(model: nn.Module, assignment: Assignment, stage: int, run: StageRun) -> nn.Module:
    """The model with the parts of ``stage``; own parts are shared with ``model``, which is not changed."""
    aliases = model.named_modules(remove_duplicate=False)
    own = {part for path, part in aliases if assignment.owners(path) == {stage} and not assignment.has_layers(path)}
    skeleton = _part(model, "", assignment, stage, run, own)
    _require_no_hidden_parts(model, skeleton, assignment, stage)
    held = assignment.held(stage)
    if held and held[0] == assignment.layers[0]:
        skeleton.get_submodule(held[0]).register_forward_pre_hook(run.enter, with_kwargs=True)
    return skeleton


def _part(
    part: nn.Module, path: str, assignment: Assignment, stage: int, run: StageRun, own: Container[nn.Module]
) -> nn.Module:
    """``part`` of the model, shared, replaced or copied: a copy holds parts of both kinds.

    ``own``: the parts beside the layers that are all on the stage, under one of their names.
    """
    if path in assignment.stage_of_layer:
        owner = assignment.stage_of_layer[path]
        if owner == stage:
            return copied(part)
        sends = assignment.layers[: assignment.before(stage)][-1:] == (path,)
        return LayerPlaceholder(path, part, run, earlier=owner < stage, sends=sends)
    owners = assignment.owners(path)
    if not assignment.has_layers(path):
        if owners <= {stage}:
            return part  # without parameters (rotary tables, dropout), or all on this stage
        if stage not in owners and not is_container(part):
            earlier = max(owners) < stage
            kind = ParametersPlaceholder if isinstance(part, nn.ParameterList | nn.ParameterDict) else PartPlaceholder
            return kind(path, part, run, earlier=earlier, own=part if not earlier and part in own else None)
    made = copied(part)
    for key, child in children_of(part):
        made.add_module(key, _part(child, joined(path, key), assignment, stage, run, own))
    for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
        if assignment.stage_of_parameter[joined(path, key)] != stage:
            delattr(made, key)
            made.register_buffer(key, nan_like(parameter, torch.device("cpu")), persistent=False)
    return made


def _require_no_hidden_parts(model: nn.Module, skeleton: nn.Module, assignment: Assignment, stage: int) -> None:
    """Raise where a plain attribute of a module holds parameters of other stages, which stay there."""
    named = list(model.named_parameters(remove_duplicate=False))
    own = {id(parameter) for name, parameter in named if assignment.stage_of_parameter[name] == stage}
    elsewhere = {id(parameter): name for name, parameter in named if id(parameter) not in own}
    memory = {memory_of(parameter): name for name, parameter in named if id(parameter) not in own}

    def hidden(value: Any) -> str | None:
        if isinstance(value, nn.Module):
            names = [elsewhere.get(id(parameter)) for parameter in value.parameters()]
            return None if None in names or not names else names[0]
        return memory.get(memory_of(value)) if isinstance(value, torch.Tensor) and id(value) not in own else None

    for path, module in skeleton.named_modules():
        if isinstance(module, Placeholder):
            continue
        for key, value in vars(module).items():
            for name in () if key in TABLES else filter(None, map(hidden, tree_leaves(value))):
                raise CutError(
                    f"{joined(path, key)} is a plain attribute that holds {name}, a parameter of another stage; make "
                    "it a parameter or a submodule"
                )
