"""Values that cross boundaries and can be handed on: results of parts, and those of the model's own code.

A stage runs all of the model's own code, so it makes by itself what that computes of values that it has. It lacks what
parts on other stages return: these values are handed on. What a part keeps elsewhere, or a random number drawn between
parts, is not; nor is what only a parameter of another stage gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import define, frozen

from pipegrid.core.skips import Uses
from pipegrid.stages.assignment import ELSEWHERE, Assignment
from pipegrid.stages.proof.outline import Outline
from pipegrid.stages.proof.trace import Trace
from pipegrid.stages.proof.traced import Operation, Traced
from pipegrid.stages.skips import Skips, Value

Made = tuple[Traced, Operation]  # A tensor, and the operation that had written it last


@frozen
class Crossings:
    """Values that cross boundaries."""

    skips: Skips  # those that are handed on
    tensors: Mapping[Value, Traced]  # each of them in the trace
    # pairs of a parameter that is handed on, by name, and a stage that it comes to
    parameters: frozenset[tuple[str, int]]
    # pairs of identities, of the operation that made one that cannot be, and of that which uses it
    left: frozenset[tuple[int, int]]

    def coming(self, stage: int) -> int:
        """How many values come to a stage by edges."""
        return sum(stage in one.users for one in self.skips.uses.values())


def crossings_of(forward: Trace, outline: Outline, uses: Iterable[tuple[Traced, Operation, Operation]]) -> Crossings:
    """The ways of the values of ``uses``, each with its maker and its user behind a boundary, to their users."""
    finder = _Finder(forward, outline.assignment, None if outline.encoder is None else outline.encoder[1])
    users: dict[Value, set[int]] = {}
    left = set[tuple[int, int]]()
    for tensor, made, used in uses:
        found = finder.values((tensor, made), finder.stage_of(used))
        if found is None:
            left.add((id(made), id(used)))
            continue
        for value in found:
            users.setdefault(value, set()).add(finder.stage_of(used))
    for name, stage in finder.lacking():
        users.setdefault(Value(name), set()).add(stage)
    tensors = {value: tensor for each in (forward.inside, forward.returned) for tensor, value, _ in each.values()}
    inputs = [pair for uses in forward.parameters.values() for use in uses for pair in use.inputs]
    tensors |= {Value(one.parameter): one for one, _ in inputs if one.parameter}
    skips = _skips(forward, outline, finder, users, tensors)
    parameters = {(value.part, stage) for value, stages in users.items() if value.is_parameter for stage in stages}
    return Crossings(skips, {value: tensors[value] for value in skips.uses}, frozenset(parameters), frozenset(left))


def is_there(forward: Trace, outline: Outline, skips: Skips, tensor: Traced, stage: int) -> bool:
    """Whether a stage has what it needs to make a tensor: by its own parts, or of what is handed on to it."""
    finder = _Finder(forward, outline.assignment, None if outline.encoder is None else outline.encoder[1])
    lacking = finder.values((tensor, tensor.made), stage)
    return lacking is not None and lacking <= skips.there(stage)


def _skips(
    forward: Trace,
    outline: Outline,
    finder: _Finder,
    users: Mapping[Value, set[int]],
    tensors: Mapping[Value, Traced],
) -> Skips:
    assignment = outline.assignment
    held: dict[int, dict[Value, int]] = {}
    found: dict[Value, Uses] = {}
    for value in sorted(users):
        source = finder.source(value)
        for stage in range(source + 1, assignment.num_stages):
            sent = forward.sent.get(assignment.before(stage), ())
            for place, one in enumerate(sent):
                if one is tensors[value]:
                    held.setdefault(stage, {}).setdefault(value, place)
        there = tuple(stage for stage, values in held.items() if value in values)
        found[value] = Uses(source, tuple(sorted(users[value] - {*there})), there)
    # No edges for a value that each of its users has in its hidden states.
    found = {value: one for value, one in found.items() if one.users or _delivers(one, users[value], assignment)}
    kept = {
        stage: {value: place for value, place in values.items() if value in found} for stage, values in held.items()
    }
    parts = {value.part for value in found}
    inside = {part: result for part, result in forward.results_inside.items() if part in parts}
    filled = {part: entries for part, entries in forward.filled.items() if part in parts}
    names = {part: [name for name, first in outline.first_names.items() if first == part] for part in parts}
    return Skips(found, {stage: values for stage, values in kept.items() if values}, inside, filled, names)


def _delivers(uses: Uses, users: set[int], assignment: Assignment) -> bool:
    """Whether a stand-in has to return what arrived before the first layer: only the first layer takes it as it is."""
    return any(stage in users and not assignment.before(stage) for stage in uses.held)


@define(eq=False)
class _Finder:
    """Finds the values that a stage lacks of others, for a tensor that it uses."""

    forward: Trace
    assignment: Assignment
    encoded: int | None

    def source(self, value: Value) -> int:
        """The stage that makes a value, or holds a parameter."""
        if value.is_parameter:
            return min(self.holders(value.part))
        every = [*self.forward.returned.values(), *self.forward.inside.values()]
        made = next(made for _, one, made in every if one == value)
        return self._stage_of_value(value, made)

    def _stage_of_value(self, value: Value, made: Operation) -> int:
        """The stage whose part returns a value; of a module inside of a layer, that of the layer."""
        return self.stage_of(made, "" if value.part in self.forward.results_inside else value.part)

    def stage_of(self, operation: Operation, part: str = "") -> int:
        """The stage on which an operation runs; of the model's own code, the one of the next layer.

        A part whose turn is over on its stage runs on a later one, as the model's own code does.
        """
        layers, stages, part = self.assignment.layers, self.assignment.stage_of_layer, part or operation.part
        first, last = running(operation.passed, self.assignment)
        if part:
            owner = stages[part] if part in stages else min(self.assignment.owners(part))
            if first <= owner <= last:
                return owner
        if operation.passed > len(layers):
            return self.assignment.num_stages - 1
        return stages[layers[max(operation.passed - 1, 0)]]

    def owner_behind(self, operation: Operation) -> int | None:
        """The later stage that holds the part of an operation, where that runs between layers of others."""
        owners = self.assignment.owners(operation.part) if operation.part else set()
        _, last = running(operation.passed, self.assignment)
        return min(owners) if owners and min(owners) > last else None

    def lacking(self) -> Iterator[tuple[str, int]]:
        """The parameters that stages use and an earlier one holds."""
        for name, uses in self.forward.parameters.items():
            for use in uses:
                first, last = running(use.passed, self.assignment)
                holders = self.holders(name)
                if id(use) in self.forward.live and not any(first <= one <= last for one in holders):
                    stage = self.stage_of(use)
                    if ELSEWHERE not in holders and min(holders) < stage:
                        yield name, stage

    def values(self, made: Made, stage: int) -> frozenset[Value] | None:
        """The values that ``stage`` lacks to have a tensor; None: it cannot have it."""
        found, open_, seen = set[Value](), [made], set[tuple[int, int]]()
        while open_:
            tensor, operation = open_.pop()
            if (id(tensor), id(operation)) in seen:
                continue
            seen.add((id(tensor), id(operation)))
            inputs = self._inputs(tensor, operation, stage)
            if inputs is None:
                return None
            if isinstance(inputs, Value):
                found.add(inputs)
            else:
                open_ += inputs
        return frozenset(found)

    def _inputs(self, tensor: Traced, operation: Operation, stage: int) -> Value | list[Made] | None:
        """The value that a tensor is, or the tensors that it is made of; none where the stage has it."""
        if tensor.parameter:
            holders = self.holders(tensor.parameter)
            if stage in holders:
                return []
            return Value(tensor.parameter) if ELSEWHERE not in holders and min(holders) < stage else None
        if operation.part and self.stage_of(operation) == stage:
            return []
        if (owner := self.owner_behind(operation)) is not None:  # it runs again on the stage that holds it
            return list(operation.inputs) if owner == stage else None
        for returned in (self.forward.returned.get(id(tensor)), self.forward.inside.get(id(tensor))):
            if returned is not None and returned[2] is operation:
                return returned[1] if self._stage_of_value(returned[1], operation) != stage else []
        if any(tensor is one for one in self.sent(stage)):
            return []
        if operation.part or not operation.name or operation.draws:
            return None  # kept by a part, given from outside, or drawn anew by each stage
        return list(operation.inputs)

    def sent(self, stage: int) -> list[Traced]:
        """The tensors of the stage before that the model's own code has."""
        before, encoded = self.assignment.before(stage), self.encoded
        at = [before] if before else []
        at += [encoded] if encoded is not None and encoded < before else []
        return [one for boundary in at for one in self.forward.sent.get(boundary, ())]

    def holders(self, parameter: str) -> set[int]:
        """The stages that hold a parameter."""
        for tie in self.assignment.ties:
            if parameter in (tie.name, *tie.names):
                return set(tie.stages)
        return {self.assignment.stage_of_parameter[parameter]}


def running(passed: int, assignment: Assignment) -> tuple[int, int]:
    """The first and the last stage that may run what runs when so many boundaries are passed."""
    layers, stages = assignment.layers, assignment.stage_of_layer
    if passed == 0:
        return 0, stages[layers[0]]
    if passed > len(layers):  # a stage that is not the last ends with its last layer
        return min(stages[layers[-1]] + 1, assignment.num_stages - 1), assignment.num_stages - 1
    return stages[layers[passed - 1]], stages[layers[passed - 1]]
