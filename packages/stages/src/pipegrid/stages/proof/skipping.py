"""Values that cross boundaries and can be handed on: results of parts, and those of the model's own code.

A stage runs all of the model's own code, so it makes by itself what that computes of values that it has. It lacks what
parts on other stages return: these values are handed on. What a part keeps elsewhere, or a random number drawn between
parts, is not; nor is what only a parameter of another stage gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from attrs import frozen

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
    parameters: frozenset[tuple[str, int]]  # those handed on, by name, each with a stage that it comes to
    left: frozenset[tuple[int, int]]  # ids of makers and users of values that cannot be handed on

    def coming(self, stage: int) -> int:
        """How many values come to a stage by edges."""
        return sum(stage in one.users for one in self.skips.uses.values())


def crossing(forward: Trace, outline: Outline) -> Iterator[tuple[Traced, Operation, Operation, int]]:
    """The uses of values behind boundaries where they are not sent: tensor, maker, user, and one such boundary."""
    first, encoded = outline.assignment.layers[0], None if outline.encoder is None else outline.encoder[1]
    for tensor in forward.crossing:
        for made, used in tensor.uses:
            if id(used) not in forward.live:
                continue
            for boundary in range(made.passed, used.passed):
                at = [boundary] if encoded is None or boundary <= encoded else [boundary, encoded]
                at = [where for where in at if made.passed <= where]  # else it has been written to since
                sent = any(tensor is one for where in at for one in forward.sent[where])
                if not sent or (boundary == 0 and used.part != first):
                    yield tensor, made, used, boundary


def crossings_of(forward: Trace, outline: Outline, boundaries: AbstractSet[int]) -> Crossings:
    """The ways of the values that cross ``boundaries``, and are not sent there, to their users."""
    assignment, finder = outline.assignment, _Finder(forward, outline)
    users: dict[Value, set[int]] = {}
    left = set[tuple[int, int]]()
    for tensor, made, used, boundary in crossing(forward, outline):
        if boundary not in boundaries:
            continue
        lacking = finder.values((tensor, made), finder.stage_of(used))
        if lacking is None:
            left.add((id(made), id(used)))
        for value in lacking or ():
            users.setdefault(value, set()).add(finder.stage_of(used))
    for name, uses in elsewhere(forward, assignment).items():
        holders = holders_of(name, assignment)
        for stage in {finder.stage_of(use) for use, _ in uses}:
            if ELSEWHERE not in holders and min(holders) < stage:
                users.setdefault(Value(name), set()).add(stage)
    tensors = {value: tensor for each in (forward.inside, forward.returned) for tensor, value, _ in each.values()}
    inputs = [pair for uses in forward.parameters.values() for use in uses for pair in use.inputs]
    tensors |= {Value(one.parameter): one for one, _ in inputs if one.parameter}
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
        # No edges for a value that each of its users has in its hidden states; but only the first layer takes what
        # arrived before it as it is, and elsewhere a stand-in returns it.
        if users[value] - {*there} or any(stage in users[value] and not assignment.before(stage) for stage in there):
            found[value] = Uses(source, tuple(sorted(users[value] - {*there})), there)
    kept = {at: {value: place for value, place in values.items() if value in found} for at, values in held.items()}
    parts = {value.part for value in found}
    skips = Skips(
        found,
        {stage: values for stage, values in kept.items() if values},
        {part: result for part, result in forward.results_inside.items() if part in parts},
        {part: entries for part, entries in forward.filled.items() if part in parts},
        {part: [name for name, first in outline.first_names.items() if first == part] for part in parts},
    )
    parameters = {(value.part, stage) for value, stages in users.items() if value.is_parameter for stage in stages}
    return Crossings(skips, {value: tensors[value] for value in found}, frozenset(parameters), frozenset(left))


def is_there(forward: Trace, outline: Outline, skips: Skips, tensor: Traced, stage: int) -> bool:
    """Whether a stage has what it needs to make a tensor: by its own parts, or of what is handed on to it."""
    lacking = _Finder(forward, outline).values((tensor, tensor.made), stage)
    return lacking is not None and lacking <= skips.there(stage)


class _Finder:
    """Finds the values that a stage lacks of others, for a tensor that it uses."""

    def __init__(self, forward: Trace, outline: Outline) -> None:
        self.forward, self.assignment = forward, outline.assignment
        self.encoded = None if outline.encoder is None else outline.encoder[1]

    def source(self, value: Value) -> int:
        """The stage that makes a value, or holds a parameter."""
        if value.is_parameter:
            return min(holders_of(value.part, self.assignment))
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
        stages, part = self.assignment.stage_of_layer, part or operation.part
        first, last = running(operation.passed, self.assignment)
        if part:
            owner = stages[part] if part in stages else min(self.assignment.owners(part))
            if first <= owner <= last:
                return owner
        return last

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
            holders = holders_of(tensor.parameter, self.assignment)
            if stage in holders:
                return []
            return Value(tensor.parameter) if ELSEWHERE not in holders and min(holders) < stage else None
        if operation.part and self.stage_of(operation) == stage:
            return []
        owner = min(self.assignment.owners(operation.part), default=-1) if operation.part else -1
        if owner > running(operation.passed, self.assignment)[1]:  # it runs again on the later stage that holds it
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


def running(passed: int, assignment: Assignment) -> tuple[int, int]:
    """The first and the last stage that may run what runs when so many boundaries are passed."""
    layers, stages = assignment.layers, assignment.stage_of_layer
    if passed == 0:
        return 0, stages[layers[0]]
    if passed > len(layers):  # a stage that is not the last ends with its last layer
        return min(stages[layers[-1]] + 1, assignment.num_stages - 1), assignment.num_stages - 1
    return stages[layers[passed - 1]], stages[layers[passed - 1]]


def elsewhere(forward: Trace, assignment: Assignment) -> dict[str, list[tuple[Operation, int]]]:
    """The parameters that are used where no stage that runs then holds them: the uses, each with the first of these."""
    found: dict[str, list[tuple[Operation, int]]] = {}
    for name, uses in forward.parameters.items():
        for use in uses:
            first, last = running(use.passed, assignment)
            if id(use) in forward.live and not any(first <= one <= last for one in holders_of(name, assignment)):
                found.setdefault(name, []).append((use, first))
    return found


def holders_of(parameter: str, assignment: Assignment) -> set[int]:
    """The stages that hold a parameter."""
    tied = next((tie.stages for tie in assignment.ties if parameter in (tie.name, *tie.names)), None)
    return {assignment.stage_of_parameter[parameter]} if tied is None else set(tied)
