"""Which values that cross boundaries can be handed on: what parts return, and what the model's code makes of that.

A stage runs all of the model's own code, so it makes by itself what that computes of values that it has. It lacks what
parts on other stages return: these values are handed on. What a part keeps elsewhere, or a random number drawn between
parts, is not; nor is what only a parameter of another stage gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import define, frozen

from pipegrid.core.skips import Uses
from pipegrid.stages.assignment import Assignment
from pipegrid.stages.proof.outline import Outline
from pipegrid.stages.proof.trace import Trace
from pipegrid.stages.proof.traced import Operation, Traced
from pipegrid.stages.skips import Skips, Value

Made = tuple[Traced, Operation]
"""A tensor, and the operation that had written it last."""


@frozen
class Crossings:
    """Values that cross boundaries.

    Attributes:
        skips: those that are handed on.
        left: pairs of identities, of the operation that made one that cannot be, and of that which uses it.
    """

    skips: Skips
    left: frozenset[tuple[int, int]]


def crossings_of(forward: Trace, outline: Outline, uses: Iterable[tuple[Traced, Operation, Operation]]) -> Crossings:
    """How the values of ``uses``, each with its maker and its user behind a boundary, come to their users."""
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
    return Crossings(_skips(forward, outline.assignment, finder, users), frozenset(left))


def _skips(forward: Trace, assignment: Assignment, finder: _Finder, users: Mapping[Value, set[int]]) -> Skips:
    tensors = {value: tensor for tensor, value, _ in forward.returned.values()}
    held: dict[int, dict[Value, int]] = {}
    found: dict[Value, Uses] = {}
    for value in sorted(users):
        source = finder.owner(value.part)
        for stage in range(source + 1, assignment.num_stages):
            sent = forward.sent.get(assignment.before(stage), ())
            for place, one in enumerate(sent):
                if one is tensors[value]:
                    held.setdefault(stage, {}).setdefault(value, place)
        there = tuple(stage for stage, values in held.items() if value in values)
        found[value] = Uses(source, tuple(sorted(users[value] - {*there})), there)
    # A stage that has a value anyway, of which nobody needs more, takes no part.
    found = {value: one for value, one in found.items() if one.users or _delivers(one, users[value], assignment)}
    kept = {
        stage: {value: place for value, place in values.items() if value in found} for stage, values in held.items()
    }
    return Skips(found, {stage: values for stage, values in kept.items() if values})


def _delivers(uses: Uses, users: set[int], assignment: Assignment) -> bool:
    """Whether a stand-in has to return what arrived before the first layer: only the first layer takes it as it is."""
    return any(stage in users and not assignment.before(stage) for stage in uses.held)


@define(eq=False)
class _Finder:
    """Finds the values that a stage lacks of others, for a tensor that it uses."""

    forward: Trace
    assignment: Assignment
    encoded: int | None

    def owner(self, part: str) -> int:
        """The stage of a layer or of a part."""
        stages = self.assignment.stage_of_layer
        return stages[part] if part in stages else min(self.assignment.owners(part))

    def stage_of(self, operation: Operation) -> int:
        """The stage on which an operation runs; of the model's own code, the one of the next layer."""
        if operation.part:
            return self.owner(operation.part)
        layers, stages = self.assignment.layers, self.assignment.stage_of_layer
        if operation.passed > len(layers):
            return self.assignment.num_stages - 1
        return stages[layers[max(operation.passed - 1, 0)]]

    def values(self, made: Made, stage: int) -> frozenset[Value] | None:
        """What ``stage`` lacks to have a tensor; None: it cannot have it."""
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
        """Of one tensor: the value that it is, or what it is made of, nothing where the stage has it."""
        if tensor.parameter:
            return [] if stage in set(self._holders(tensor.parameter)) else None
        if operation.part and self.owner(operation.part) == stage:
            return []
        returned = self.forward.returned.get(id(tensor))
        if returned is not None and returned[2] is operation:
            return returned[1] if self.owner(returned[1].part) != stage else []
        if any(tensor is one for one in self.sent(stage)):
            return []
        if operation.part or not operation.name or operation.draws:
            return None  # kept by a part, given from outside, or drawn anew by each stage
        return list(operation.inputs)

    def sent(self, stage: int) -> list[Traced]:
        """What the model's own code has of what the stage before has sent."""
        before, encoded = self.assignment.before(stage), self.encoded
        at = [before] if before else []
        at += [encoded] if encoded is not None and encoded < before else []
        return [one for boundary in at for one in self.forward.sent.get(boundary, ())]

    def _holders(self, parameter: str) -> Iterator[int]:
        yield self.assignment.stage_of_parameter[parameter]
        for tie in self.assignment.ties:
            if parameter in (tie.name, *tie.names):
                yield from tie.stages
