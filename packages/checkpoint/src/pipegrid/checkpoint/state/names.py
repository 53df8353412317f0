"""Names of the whole model for the tensors of this rank's stages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import Attribute, field, frozen
from torch import Tensor, nn

from pipegrid.checkpoint.stored.plain import dtype_name
from pipegrid.core.fields import checked_arguments, shown
from pipegrid.stages.assignment import Tie, names_of_ties
from pipegrid.stages.errors import CheckpointError
from pipegrid.stages.stage import Stage
from pipegrid.topology.world import resolve_rank

# Modules that only wrap another one: their part of a name is not one of the model's.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


@frozen
class Held:
    """A tensor of the model on a rank."""

    module: str
    name: str
    stage: int
    tied: bool  # on several stages: a tied parameter, or a buffer of a cut model, such as one of the model itself
    parameter: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return f"model/{self.module}/{self.name}"


def stages_of(held: Iterable[Held]) -> tuple[tuple[str, int], ...]:
    """The stages of a rank."""
    return tuple(dict.fromkeys((one.module, one.stage) for one in held))


@frozen
class TensorPlace:
    """The place of a stored tensor of the model on this rank: ``leaf`` of the submodule ``owner``."""

    held: Held  # its description for other ranks
    owner: nn.Module
    leaf: str
    aliases: tuple[str, ...] = ()  # its other names on this stage

    def tensor(self) -> Tensor:
        """The tensor as it is now."""
        found: Tensor = getattr(self.owner, self.leaf)
        return found


@checked_arguments(CheckpointError, kinds=True)
def whole_names(stage: nn.Module, *, layers: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The whole model's names of a hand-written stage's parameters and buffers, from the global ids of its layers.

    ``whole_names(stage, layers={"blocks": [4, 5]})`` gives ``blocks.0.weight`` the name ``blocks.4.weight``. The ids
    are those of the layout: ``layout.get_layer_id_list(...)``.

    Raises:
        CheckpointError: a list has another number of layers.

    Examples:
        >>> from torch import nn
        >>> stage = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4, bias=False)])})
        >>> whole_names(stage, layers={"blocks": [4]})
        {'blocks.0.weight': 'blocks.4.weight'}
    """
    for path, ids in layers.items():
        held = len(list(stage.get_submodule(path).children()))
        if held != len(ids):
            raise CheckpointError(f"{path} has {held} layers, and {len(ids)} global ids: {list(ids)}")

    def whole(name: str) -> str:
        for path, ids in layers.items():
            if name.startswith(f"{path}."):
                number, _, rest = name.removeprefix(f"{path}.").partition(".")
                own = [key for key, _ in stage.get_submodule(path).named_children()]
                return f"{path}.{ids[own.index(number)]}.{rest}"
        return name

    tensors = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    return {bare_name(name): whole(bare_name(name)) for name, _ in tensors}


def numbered(module: str, stages: Any, grids: Mapping[str, Any] | None) -> dict[int, nn.Module]:
    """The stages of a module on this rank, by number."""
    if isinstance(stages, Mapping):
        return dict(stages)
    listed = [stages] if isinstance(stages, nn.Module) else list(stages)
    numbers: list[Any] = [getattr(stage, "number", None) for stage in listed]
    if all(isinstance(number, int) for number in numbers):
        return dict(zip(numbers, listed, strict=True))
    if len(listed) == 1 and grids is not None and module in grids:
        return {grids[module].coords(resolve_rank()).get("pp", 0): listed[0]}
    raise CheckpointError(
        f"module {module!r} has {len(listed)} stages on this rank without numbers; pass {{0: ..., 3: ...}}"
    )


def slots_of(
    module: str, number: int, stage: nn.Module, names: Mapping[str, str] | None, ties: Sequence[Tie]
) -> list[TensorPlace]:
    """The slots of a stage's stored tensors: parameters once, and buffers that are part of its ``state_dict``."""
    saved = {bare_name(name) for name in stage.state_dict()}  # a hook of FSDP2 shards the parameters again, here
    extra = sorted(name for name in saved if name.endswith("_extra_state"))
    if extra:
        raise CheckpointError(
            f"module {module!r} stage {number} has {extra[0]} in its state_dict, and a checkpoint would lose it; make "
            "it a buffer"
        )
    tied = names_of_ties(ties, number)
    by_id: dict[int, list[tuple[str, nn.Module, str, Tensor, bool]]] = {}
    for found in _tensors(stage):
        if found[0] in saved:
            by_id.setdefault(id(found[3]), []).append(found)
    made: dict[str, TensorPlace] = {}
    for places in by_id.values():
        whole = [name if names is None else names.get(name, name) for name, *_ in places]
        declared = next((name for name in whole if name in tied), None)
        name = whole[0] if declared is None else tied[declared]
        _, owner, leaf, tensor, parameter = places[0]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        tied_here = declared is not None or (not parameter and isinstance(stage, Stage))
        held = Held(module, name, number, tied_here, parameter, shape, dtype)
        if name in made:
            raise CheckpointError(f"module {module!r} stage {number} has two tensors with the name {name!r}")
        made[name] = TensorPlace(held, owner, leaf, tuple(other for other in whole if other != name))
    return list(made.values())


def _tensors(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor, bool]]:
    for path, owner in stage.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield bare_name(prefix + leaf), owner, leaf, parameter, True
        for leaf, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield bare_name(prefix + leaf), owner, leaf, buffer, False


def identities(state: TrainingState) -> list[tuple[Any, ...]]:
    """Identities of what holds the tensors of a state, which show a replaced one; buffers may be anew every step."""
    return [
        (module, number, name, id(owner), id(tensor) if parameter else None)
        for module, held in state.stages.items()
        for number, stage in numbered(module, held, state.grids).items()
        for name, owner, _, tensor, parameter in _tensors(stage)
    ]


def bare_name(name: str) -> str:
    """The name of a tensor without the modules that only wrap another one."""
    return _WRAPPERS.sub("", name)


@frozen(eq=False, kw_only=True)
class TrainingState:
    """The state of this rank in a checkpoint, by reference: read by a save, filled by a load.

    Attributes:
        stages: by module name the stage modules on this rank: a list of stages of `pipeline_stage` (or of any modules
            with a ``number``), or modules by stage number. Names are those of the ``state_dict``, which for stages of
            `pipeline_stage` are the whole model's.
        optimizers: over parameters of these stages.
        scaler: of the loss, with ``state_dict`` and ``load_state_dict``.
        data: the data position, the same on every rank: plain data, or a reader with ``state_dict`` and
            ``load_state_dict``.
        names: by hand-written stage module the whole model's name of each tensor; see `whole_names`.
        ties: by module, parameters on several stages; those of stages of `pipeline_stage` are known.
        plan: of the step; its text is stored.
        grids: of the modules.
        layout: of the layers: text, or text by module.
        generators: of this rank beside those of the process, by name. In another layout each gets a seed made of its
            own and the step.

    Examples:
        >>> import torch
        >>> stage = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        >>> state = TrainingState(stages={"model": {0: stage}}, optimizers=[optimizer])
    """

    stages: Mapping[str, Any] = field()
    optimizers: Sequence[Any] = field(default=())
    scaler: Any = None
    data: Any = None
    names: Mapping[nn.Module, Mapping[str, str]] = field(factory=dict)
    ties: Mapping[str, Sequence[Tie]] = field(factory=dict)
    plan: Any = None
    grids: Mapping[str, Any] | None = None
    layout: Any = None
    generators: Mapping[str, torch.Generator] = field(factory=dict)

    @stages.validator
    def _named(self, _: Attribute[Any], stages: Any) -> None:
        if not isinstance(stages, Mapping) or any(held is None for held in stages.values()):
            raise CheckpointError(f'stages is {shown(stages)}; it must be a dict by module, {{"language": [stage]}}')

    @optimizers.validator
    def _listed(self, _: Attribute[Any], optimizers: Any) -> None:
        if not isinstance(optimizers, Sequence):
            raise CheckpointError(f"optimizers is {shown(optimizers)}; it must be a list of optimizers")

    def slots(self) -> list[TensorPlace]:
        """The slots of all stored tensors, stage by stage."""
        found: list[TensorPlace] = []
        for module, held in self.stages.items():
            if "/" in module:
                raise CheckpointError(f"a module is called {module!r}; names have no '/'")
            for number, stage in numbered(module, held, self.grids).items():
                ties = self.ties.get(module, getattr(stage, "ties", ()))
                found.extend(slots_of(module, number, stage, self.names.get(stage), ties))
        return found


class StateTensors:
    """The tensors of the model that a state has, as read from its modules at one time."""

    def __init__(self, state: TrainingState) -> None:
        self._slots = state.slots()
        self.held = tuple(slot.held for slot in self._slots)  # each of them, for other ranks
        tensors = [(slot.held, slot.tensor()) for slot in self._slots]
        self.owners = {id(tensor): (held.module, held.name) for held, tensor in tensors if held.parameter}
        devices = (tensor.device for _, tensor in tensors)
        # of the rank: that of its first tensor off the CPU, else the CPU
        self.device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        self._identities = identities(state)

    def are_of(self, state: TrainingState) -> bool:
        """Whether ``state`` has the modules and parameters that were read; another one may have the name of each."""
        return identities(state) == self._identities

    def now(self) -> dict[str, Tensor]:
        """The tensors as they are now, by key."""
        return {slot.held.key: slot.tensor() for slot in self._slots}

    @torch.no_grad()
    def spread(self) -> None:
        """Give what `now` has of a key to the other stages of this rank that have it."""
        now = self.now()
        for slot in self._slots:
            if (own := slot.tensor()) is not now[slot.held.key]:
                own.copy_(now[slot.held.key])


def known_state(state: Any) -> TrainingState:
    """``state`` where it is a `TrainingState`, not a model."""
    if not isinstance(state, TrainingState):
        raise CheckpointError(f"state is {shown(state)}; it must be a TrainingState")
    return state
