"""The assignment of a model's layers and parameters to stages, and of these to ranks. The same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from attrs import frozen
from torch import nn

from pipegrid.layout import LayerType, LayoutError, PipelineParallelLayerLayout
from pipegrid.plans import PlanError, stage_places
from pipegrid.stages.errors import CutError
from pipegrid.stages.names import ONLY, Names, find_names, layers_of
from pipegrid.stages.torch_compat import extent_of, memory_of
from pipegrid.topology import HyperCommGrid

ELSEWHERE = -1  # the stage of parameters that another module of the job has
_ENDS = (LayerType.embedding, LayerType.loss)


@frozen
class Tie:
    """A parameter with several names, on several stages.

    Attributes:
        name: the first of its names in the whole model.
        stages: the stages that hold it, ascending.
        names: its name on each of them.

    Examples:
        >>> Tie("embed.weight", stages=(0, 3), names=("embed.weight", "head.weight")).stages
        (0, 3)
    """

    name: str
    stages: tuple[int, ...]
    names: tuple[str, ...]


def names_of_ties(ties: Iterable[Tie], stage: int) -> dict[str, str]:
    """The name of each tied parameter in the whole model, by its name on ``stage``."""
    return {own: tie.name for tie in ties for at, own in zip(tie.stages, tie.names, strict=True) if at == stage}


@frozen
class Assignment:
    """A model over stages.

    Attributes:
        num_stages: how many there are.
        lists: the layers of each list, in the order of their run.
        stage_of_layer: by the layer's name.
        stage_of_parameter: by name; a tied parameter has several names.
        ties: parameters on several stages.

    Examples:
        >>> from torch import nn
        >>> layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        >>> assigned = assign(nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": layers}), "Et|tL", Names("layers"))
        >>> assigned.stage_of_layer
        {'layers.0': 0, 'layers.1': 1}
    """

    num_stages: int
    lists: tuple[tuple[str, ...], ...]
    stage_of_layer: Mapping[str, int]
    stage_of_parameter: Mapping[str, int]
    ties: tuple[Tie, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers, in the order of their run."""
        return tuple(layer for layers in self.lists for layer in layers)

    def held(self, stage: int) -> tuple[str, ...]:
        """The layers of a stage."""
        return tuple(layer for layer in self.layers if self.stage_of_layer[layer] == stage)

    def before(self, stage: int) -> int:
        """Number of layers on earlier stages."""
        return sum(number < stage for number in self.stage_of_layer.values())

    def has_layers(self, path: str) -> bool:
        """Whether the part ``path`` of the model, "" is all of it, has layers in it."""
        return not path or any(within(layer, [path]) for layer in self.layers)

    def owners(self, path: str) -> set[int]:
        """The stages with parameters of the part ``path``; none of all of the model, which is ""."""
        return {stage for name, stage in self.stage_of_parameter.items() if within(name, [path])}

    def parameters(self, stage: int) -> tuple[str, ...]:
        """The names of a stage's parameters in the whole model."""
        return tuple(name for name, number in self.stage_of_parameter.items() if number == stage)


def as_layout(layout: str | PipelineParallelLayerLayout) -> PipelineParallelLayerLayout:
    """A layout of one stage per pp rank, where the layout is a string."""
    if isinstance(layout, PipelineParallelLayerLayout):
        return layout
    stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout) if isinstance(layout, str) else 1
    return PipelineParallelLayerLayout(layout, stages)  # which raises for what is no layout


def assign(model: nn.Module, layout: str | PipelineParallelLayerLayout, names: Names | None) -> Assignment:
    """The stage of each layer, by the layout, and of each parameter beside them: with the first, last or next layer.

    ``names``: None where the model has those of Hugging Face.

    Examples:
        >>> from torch import nn
        >>> layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        >>> model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": layers})
        >>> assign(model, "Et|tL", Names("layers")).stage_of_parameter
        {'embed.weight': 0, 'layers.0.weight': 0, 'layers.1.weight': 1}
    """
    layout = as_layout(layout)
    names = find_names(model, names, sum(kind not in _ENDS for kind in layout.flatten_layout))
    lists = {kind: layers_of(model, path) for kind, path in names.layers.items()}
    kinds = _kinds(layout, lists)
    try:
        ends = {kind: 1 for kind in _ENDS if kind in layout.flatten_layout}
        layout.validate_counts({kind: len(layers) for kind, layers in kinds.items()} | ends)
    except LayoutError as error:
        raise CutError(f"{type(model).__name__} and its layout do not fit: {error}") from error
    stage_of_layer: dict[str, int] = {}
    for kind, layers in kinds.items():
        stages = [stage for stage, held in enumerate(layout.stages) for layer in held if layer == kind]
        stage_of_layer |= dict(zip(layers, stages, strict=True))
    ordered = [layer for layers in kinds.values() for layer in layers]
    for earlier, later in pairwise(ordered):
        if stage_of_layer[earlier] > stage_of_layer[later]:
            raise CutError(
                f"layout {layout.short_text()} has {later} on an earlier stage than {earlier}; layers run in the order "
                f"{', '.join(kinds)}"
            )
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    stage_of_parameter = _stages_of(parameters, names, tuple(kinds.values()), stage_of_layer, layout)
    return Assignment(
        len(layout.stages), tuple(kinds.values()), stage_of_layer, stage_of_parameter, _ties(model, stage_of_parameter)
    )


def pp_size(grid: HyperCommGrid) -> int:
    """The number of pipeline ranks of a grid; 1 where it has no dim ``pp``."""
    return grid.dim_size("pp") if "pp" in grid.dim_names else 1


def places_on(layout: PipelineParallelLayerLayout, grid: HyperCommGrid, schedule: str | None) -> tuple[int, ...]:
    """The pp rank of each stage of ``layout`` under ``schedule``; None: one stage on each rank.

    Raises CutError for other than pp x chunks stages, with the schedule's chunks; PlanError for no schedule's name.
    """
    pp, count = pp_size(grid), len(layout.stages)
    chunks, rest = divmod(count, pp)
    places = tuple(range(pp))
    if schedule is not None:
        try:
            places = stage_places(schedule, pp, chunks if chunks and not rest else None)
        except PlanError:  # another number of chunks than the schedule's, or no schedule
            places = stage_places(schedule, pp)
    if len(places) != count:
        by = "one stage on each rank" if schedule is None else f"the places of {schedule}"
        raise CutError(
            f"layout {layout.short_text()} has {count} stages, and {len(places)} are needed: {by} of pp {pp} is "
            f"{places}{'; name the schedule of several stages on a rank, schedule=...' if schedule is None else ''}"
        )
    return places


def _kinds(layout: PipelineParallelLayerLayout, lists: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
    """The lists of layers by the layout's kinds; the only list has the only kind."""
    if set(lists) != {ONLY}:
        return lists
    found = [kind for kind in dict.fromkeys(layout.flatten_layout) if kind not in _ENDS]
    if len(found) > 1:
        raise CutError(
            f"layout {layout.short_text()} has layers of the kinds {', '.join(map(str, found))}, and the model has one "
            "list of layers; give names=Names(layers={kind: list, ...})"
        )
    return {found[0] if found else LayerType.decoder: lists[ONLY]}


def _stages_of(
    parameters: Iterable[str],
    names: Names,
    lists: tuple[tuple[str, ...], ...],
    stage_of_layer: Mapping[str, int],
    layout: PipelineParallelLayerLayout,
) -> dict[str, int]:
    """The stage of each parameter; ``parameters`` in the order of registration."""
    paths = tuple(names.layers.values())
    first = next((stage for stage, held in enumerate(layout.stages) if LayerType.embedding in held), 0)
    last = next((stage for stage, held in enumerate(layout.stages) if LayerType.loss in held), len(layout.stages) - 1)

    def beside(name: str, passed: int) -> int:
        """The stage of a parameter outside of the layers, registered after ``passed`` lists."""
        if within(name, names.embedding):
            passed = next((i for i, path in enumerate(paths) if within(name, [_parent(path)])), 0)
        elif within(name, names.head):
            passed = next((i + 1 for i, path in enumerate(paths) if within(name, [_parent(path)])), len(paths))
        elif any(within(path, [_parent(name)]) or not _parent(name) for path in paths):
            raise CutError(f"{name} is beside the layers; name it in Names(embedding=...) or Names(head=...)")
        if passed in (0, len(lists)):
            return last if passed else first
        # Between two lists: with the last layer of the one beside it, unless it is to run before the next.
        ends = within(name, [_parent(paths[passed - 1])]) and not within(name, names.embedding)
        return stage_of_layer[lists[passed - 1][-1] if ends else lists[passed][0]]

    passed, found = 0, {}
    for name in parameters:
        layer = next((layer for layer in stage_of_layer if within(name, [layer])), None)
        if within(name, names.elsewhere):
            found[name] = ELSEWHERE
        elif layer is None:
            found[name] = beside(name, passed)
        else:
            found[name] = stage_of_layer[layer]
            passed = next(i for i, layers in enumerate(lists) if layer in layers) + 1
    return found


def is_container(part: nn.Module) -> bool:
    """Whether the model's own code runs what is in ``part``, which has no forward."""
    return isinstance(part, (nn.ModuleList, nn.ModuleDict))


def joined(path: str, key: str) -> str:
    """The name of a child of the part ``path``."""
    return f"{path}.{key}" if path else key


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def within(name: str, parts: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``parts``, or inside of one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def require_no_shared_memory(model: nn.Module, assignment: Assignment, stages: Iterable[int]) -> None:
    """Raise where two parameters of several stages, one of them in ``stages``, are one memory and no tied parameter."""
    owned: dict[object, list[tuple[int, int, int, str]]] = {}
    own = set(stages)
    for name, parameter in model.named_parameters():
        owner = assignment.stage_of_parameter[name]
        begin = int(parameter.storage_offset()) * parameter.element_size()
        end = begin + extent_of(parameter)
        for at, from_, to, other in owned.get(memory_of(parameter), ()):
            if at != owner and own & {at, owner} and from_ < end and begin < to:
                raise CutError(
                    f"{name} on stage {owner} and {other} on stage {at} are two parameters with one memory, which "
                    "stages do not share; make them one parameter (a.weight = b.weight), which tie_stage_parameters "
                    "knows"
                )
        owned.setdefault(memory_of(parameter), []).append((owner, begin, end, name))


def _ties(model: nn.Module, stage_of_parameter: Mapping[str, int]) -> tuple[Tie, ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ties = []
    for aliases in names.values():
        by_stage = {stage_of_parameter[alias]: alias for alias in reversed(aliases)}  # of a stage's names the first
        by_stage.pop(ELSEWHERE, None)
        if len(by_stage) > 1:
            stages = tuple(sorted(by_stage))
            ties.append(Tie(aliases[0], stages, tuple(by_stage[stage] for stage in stages)))
    return tuple(ties)
