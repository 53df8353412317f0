"""The header of a written plan: what its table of steps alone does not tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules.errors import FieldPath, PlanError, PlanFieldError
from pipegrid.schedules.plan.plan import Group, Lane
from pipegrid.schedules.plan.words import Word, parse_creation
from pipegrid.transport.edge import Edge

_MODULE_EDGE = re.compile(r'("(?:[^"\\]|\\.)*"|[^">]+)>("(?:[^"\\]|\\.)*"|[^">]+)')


@define
class Header:
    """What the lines of a header say, each once and in any order; ``where`` has the word behind each part of the plan.

    ``num_microbatches``, ``placement`` and ``forward_only`` are None where no line says them.
    """

    num_microbatches: int | None = None
    modules: list[tuple[str, int]] = field(factory=list)
    edges: list[tuple[str, str]] = field(factory=list)
    placement: list[tuple[int, ...]] | None = None
    forward_only: list[int] | None = None
    groups: list[Group] = field(factory=list)
    creation: dict[int, list[Lane | str]] = field(factory=dict)
    where: dict[FieldPath, Word] = field(factory=dict)
    _seen: dict[str, Word] = field(factory=dict)

    def read(self, words: Iterable[Word]) -> None:
        """Read a line."""
        line = list(words)
        if not line:
            return
        key, *values = line
        readers: dict[str, Callable[[Word, list[Word]], None]] = {
            "microbatches": self._read_microbatches,
            "modules": self._read_modules,
            "edges": self._read_edges,
            "placement": self._read_placement,
            "forward_only": self._read_forward_only,
            "group": self._read_group,
            "create": self._read_creation,
        }
        if key.text not in readers:
            raise key.error(f"a position such as '0:' or one of {', '.join(readers)}")
        first = self._seen.setdefault(key.text, key)
        if first is not key and key.text not in ("group", "create"):
            raise key.error(f"no second {key.text!r} line; the first is line {first.line}")
        readers[key.text](key, values)

    def error(self, error: PlanFieldError) -> PlanError:
        """``error``, pointing at the word behind it where the header has one."""
        path = error.path
        while path:
            if path in self.where:
                return self.where[path].error(error.expected)
            path = path[:-1]
        return error

    def _read_microbatches(self, key: Word, values: list[Word]) -> None:
        if len(values) != 1:
            raise (values[1] if values else key.end()).error("one number after 'microbatches'")
        self.num_microbatches = values[0].number("a number of microbatches")
        self.where["num_microbatches",] = values[0]
        if self.num_microbatches < 1:
            raise values[0].error("at least 1 microbatch")

    def _read_modules(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.end().error("modules as name:depth after 'modules'")
        for word in values:
            name, _, depth = word.text.rpartition(":")
            if not name:
                raise word.error("a module as name:depth, such as model:4")
            number = word.within(depth, len(name) + 1)
            self.where["modules", len(self.modules)] = word
            self.where["modules", len(self.modules), "depth"] = number
            self.modules.append((word.name(name), number.number("a depth")))
            if self.modules[-1][1] < 1:
                raise number.error("a depth of at least 1")

    def _read_edges(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.end().error("edges between modules as source>destination after 'edges'")
        for word in values:
            parts = _MODULE_EDGE.fullmatch(word.text)
            if parts is None:
                raise word.error("an edge between modules as source>destination, such as enc>llm")
            self.where["edges", len(self.edges)] = word
            self.edges.append((word.name(parts[1]), word.name(parts[2])))

    def _read_placement(self, key: Word, values: list[Word]) -> None:
        self.placement = []
        for stage, word in enumerate(values):
            self.where["placement", stage] = word
            self.placement.append(self._numbers(word, "a position", "placement", stage))
        self.where["placement", len(values)] = (values[-1] if values else key).end()

    def _read_forward_only(self, key: Word, values: list[Word]) -> None:
        self.where["forward_only",] = key
        self.forward_only = []
        for word in values:
            self.forward_only += self._numbers(word, "a stage", "forward_only")

    def _read_group(self, key: Word, values: list[Word]) -> None:
        if len(values) < 2 or len(values) % 2:
            end = (values[-1] if values else key).end()
            raise end.error("a name and positions after 'group', such as: group bridge 0,3 edges 1>2 tied 0,3")
        number = len(self.groups)
        path = ("groups", number)
        self.where[path] = self.where[*path, "name"] = values[0]
        parts: dict[str, Any] = {"positions": self._numbers(values[1], "a position", *path, "positions")}
        for word, value in zip(values[2::2], values[3::2], strict=True):
            if word.text in parts or word.text not in ("edges", "tied"):
                raise word.error("'edges' or 'tied', once")
            if word.text == "edges":
                parts["edges"] = self._edges(value, *path, "edges")
            else:
                parts["tied"] = self._numbers(value, "a stage", *path, "tied")
        try:
            self.groups.append(Group(values[0].text, **parts))
        except PlanFieldError as error:
            raise self.error(error.inside(*path)) from None

    def _read_creation(self, key: Word, values: list[Word]) -> None:
        if not values:
            raise key.end().error("a position, then groups and lanes after 'create'")
        position = values[0].number("a position")
        if position in self.creation:
            raise values[0].error(f"one 'create' line for position {position}")
        self.where["creation", position] = values[0]
        self.creation[position] = [parse_creation(word.text) for word in values[1:]]

    def _numbers(self, word: Word, what: str, *path: str | int) -> tuple[int, ...]:
        """The numbers in ``word``, each noted as an item of ``path``."""
        self.where[path] = self.where.get(path, word)
        numbers = []
        for part in word.parts():
            numbers.append(part.number(what))
            self.where[*path, numbers[-1]] = part
        return tuple(numbers)

    def _edges(self, word: Word, *path: str | int) -> tuple[Edge, ...]:
        self.where[path] = word
        edges = []
        for part in word.parts():
            edges.append(part.edge())
            self.where[*path, edges[-1]] = part
        return tuple(edges)


def located_graph(modules: Sequence[tuple[str, int]], edges: Sequence[tuple[str, str]]) -> ModuleGraph:
    """The graph of ``modules`` and ``edges``.

    Raises:
        PlanFieldError: the first module or edge that does not fit those before it, and why.
    """
    try:
        return ModuleGraph(modules, edges)
    except ValueError as error:
        refusal = error
    for number in range(len(modules)):
        if not _is_graph(modules[: number + 1], ()):
            raise PlanFieldError(
                str(refusal), path=("modules", number), expected=f"a module that fits ({refusal})"
            ) from None
    for number in range(len(edges)):
        if not _is_graph(modules, edges[: number + 1]):
            raise PlanFieldError(
                str(refusal), path=("edges", number), expected=f"an edge that fits ({refusal})"
            ) from None
    raise PlanFieldError(str(refusal), path=("modules",), expected="at least one module") from None


def _is_graph(modules: Sequence[tuple[str, int]], edges: Sequence[tuple[str, str]]) -> bool:
    try:
        ModuleGraph(modules, edges)
    except ValueError:
        return False
    return True
