"""The graph of modules, and the one numbering of stages that every package agrees on.

A module of depth ``d`` (its pipeline size) is a chain of ``d`` stages. Stages are numbered through the
modules in topological order, so a stage's number is larger than that of everything it depends on, and a
single chain of ``P`` stages is ``0 .. P-1``.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

from attrs import field, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import Count, Name, Rule, checked, instance, nearest, shown


class ModuleGraphError(ValueError):
    """The modules do not form an acyclic graph of known modules, with a sink.

    Examples:
        >>> ModuleGraph({"a": 1, "b": 1}, {"a": ["b"], "b": ["a"]})
        Traceback (most recent call last):
            ...
        pipegrid.core.graph.ModuleGraphError: the modules form a cycle: a -> b -> a
    """


def _as_pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError
    return value[0], value[1]


_Names = tuple[Name, ...]
_Pairs = tuple[Annotated[Any, Rule(_as_pair, "a pair, where no mapping is given")], ...]


def _as_modules(value: Mapping[str, int] | Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    pairs = value.items() if isinstance(value, Mapping) else checked(value, _Pairs, "modules", ModuleGraphError)
    return tuple(
        (
            checked(name, Name, "the name of a module", ModuleGraphError),
            checked(depth, Count, f"the depth of module {name!r}", ModuleGraphError),
        )
        for name, depth in pairs
    )


def _as_edges(value: Mapping[str, Sequence[str]] | Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        pairs = checked(value, _Pairs, "edges", ModuleGraphError)
        return tuple(checked(pair, _Names, "the modules of an edge", ModuleGraphError) for pair in pairs)
    feeds = {src: checked(fed, _Names, f"what {src!r} feeds", ModuleGraphError) for src, fed in value.items()}
    return tuple((src, dst) for src, dsts in feeds.items() for dst in dsts)


_Skip = Annotated[Edge, instance(Edge, "an Edge(source, destination)")]


def _as_skips(value: Sequence[Edge]) -> tuple[Edge, ...]:
    return tuple(sorted(checked(value, tuple[_Skip, ...], "skips", ModuleGraphError)))


@frozen(slots=False)
class ModuleGraph:
    """Modules with their depths, and which module feeds which.

    Ties in the topological order are broken by the order of declaration, so every rank that declares the same
    graph numbers its stages alike.

    Attributes:
        modules: each name with its depth in stages; a mapping or pairs.
        edges: each name with the modules that it feeds; a mapping, or a sequence of pairs of names.
        skips: more edges between stages of a module, past the stages between them, in global numbers. What a stage
            makes is used by several of the later ones then. An order of computes that suits the graph without them
            suits it with them, since the stages between wait for the same.

    Raises:
        ModuleGraphError: a module that is not declared, a depth that is not positive, an edge given twice,
            a cycle (named module by module), or a skip that passes no stage of its module.

    Examples:
        >>> graph = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})
        >>> [str(edge) for edge in graph.stage_edges]
        ['0>1', '1>2']
        >>> [str(edge) for edge in ModuleGraph({"model": 3}, skips=[Edge(0, 2)]).stage_edges]
        ['0>1', '0>2', '1>2']
    """

    modules: tuple[tuple[str, int], ...] = field(converter=_as_modules)
    edges: tuple[tuple[str, str], ...] = field(converter=_as_edges, default=())
    skips: tuple[Edge, ...] = field(converter=_as_skips, default=())

    def __attrs_post_init__(self) -> None:
        names = [name for name, _ in self.modules]
        if not names:
            raise ModuleGraphError("the graph has no modules; declare at least one")
        for what, declared in (("modules are", names), ("an edge is", self.edges), ("a skip is", self.skips)):
            if len(set(declared)) != len(declared):
                raise ModuleGraphError(f"{what} declared twice in {list(map(str, declared))}")
        for src, dst in self.edges:
            for name in (src, dst):
                if name not in names:
                    unknown = f"{name!r}{nearest(name, names)}; known: {names}"
                    raise ModuleGraphError(f"edge {src!r} -> {dst!r} names the unknown module {unknown}")
        self.order  # noqa: B018 -- computing the order raises for cycles
        for skip in self.skips:
            ends = [self.module_of(stage)[0] for stage in (skip.source, skip.destination)]
            if skip.destination < skip.source + 2 or ends[0] != ends[1]:
                raise ModuleGraphError(f"skip {skip} must lead past a stage, inside of one module of {names}")

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Module names in topological order."""
        rank_of = {name: index for index, (name, _) in enumerate(self.modules)}
        sorter = graphlib.TopologicalSorter({name: [] for name in rank_of})
        for src, dst in self.edges:
            sorter.add(dst, src)
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise ModuleGraphError(f"the modules form a cycle: {' -> '.join(error.args[1])}") from None
        order: list[str] = []
        ready: set[str] = set()
        while sorter.is_active():
            ready.update(sorter.get_ready())
            first = min(ready, key=rank_of.__getitem__)
            ready.remove(first)
            order.append(first)
            sorter.done(first)
        return tuple(order)

    def depth(self, module: str) -> int:
        """Stages of ``module``.

        Raises:
            ModuleGraphError: there is no such module.
        """
        if module not in self._depths:
            unknown = f"{shown(module)}{nearest(module, self._depths)}"
            raise ModuleGraphError(f"there is no module {unknown}; the graph has {list(self._depths)}")
        return self._depths[module]

    @cached_property
    def _depths(self) -> dict[str, int]:
        return dict(self.modules)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets: dict[str, int] = {}
        total = 0
        for name in self.order:
            offsets[name] = total
            total += self._depths[name]
        return offsets

    @property
    def num_stages(self) -> int:
        """Stages of all modules together."""
        return sum(depth for _, depth in self.modules)

    def stage(self, module: str, index: int) -> int:
        """The global number of stage ``index`` of ``module``; negative indices count from its end."""
        depth = self.depth(module)
        if not -depth <= index < depth:
            raise ModuleGraphError(f"module {module!r} has {depth} stages; there is no stage {index}")
        return self._offsets[module] + index % depth

    def module_of(self, stage: int) -> tuple[str, int]:
        """``(module, index in the module)`` of a global stage number."""
        for name in self.order:
            if self._offsets[name] <= stage < self._offsets[name] + self._depths[name]:
                return name, stage - self._offsets[name]
        raise ModuleGraphError(f"there is no stage {stage}; the graph has stages 0..{self.num_stages - 1}")

    def edges_inside(self, module: str) -> tuple[Edge, ...]:
        """The edges between the stages of ``module``, ascending: of its chain, and skips."""
        first, last = self.stage(module, 0), self.stage(module, -1)
        skips = [skip for skip in self.skips if first <= skip.source <= last]
        return tuple(sorted([*(Edge(stage, stage + 1) for stage in range(first, last)), *skips]))

    @cached_property
    def stage_edges(self) -> tuple[Edge, ...]:
        """All edges between stages, inside modules and across them, ascending."""
        inside = [edge for name, _ in self.modules for edge in self.edges_inside(name)]
        across = [Edge(self.stage(src, -1), self.stage(dst, 0)) for src, dst in self.edges]
        return tuple(sorted(inside + across))

    @property
    def sources(self) -> tuple[str, ...]:
        """Modules that nothing feeds, in topological order."""
        fed = {dst for _, dst in self.edges}
        return tuple(name for name in self.order if name not in fed)

    @property
    def sinks(self) -> tuple[str, ...]:
        """Modules that feed nothing, in topological order."""
        feeding = {src for src, _ in self.edges}
        return tuple(name for name in self.order if name not in feeding)

    @cached_property
    def distance_to_sink(self) -> tuple[int, ...]:
        """Number of edges on the longest path from each stage to a sink's last stage.

        This is what a 1F1B warmup counts: a rank that far from the loss has that many microbatches in flight
        before its first gradient can return.
        """
        distance = [0] * self.num_stages
        for edge in sorted(self.stage_edges, key=lambda edge: -edge.source):
            distance[edge.source] = max(distance[edge.source], distance[edge.destination] + 1)
        return tuple(distance)


def chain(num_stages: int, skips: Sequence[Edge] = ()) -> ModuleGraph:
    """The graph of one module named ``model`` with ``num_stages`` stages in a row, and edges that skip stages.

    Examples:
        >>> chain(3).modules
        (('model', 3),)
    """
    return ModuleGraph({"model": checked(num_stages, Count, "num_stages", ModuleGraphError)}, skips=skips)
