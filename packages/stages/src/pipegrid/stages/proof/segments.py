"""Each stage of a cut on shapes, as it is built on a rank, against its segment of the whole model's trace.

The two are the same where all that leaves a stage is made by the same operations, with the same numbers, names and
generators, of the same parameters, of what has arrived and of values of the batch. So what layers tell each other
through Python, or ask of the model, is found by what it changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

from attrs import evolve
from torch import Tensor, nn
from torch.func import functional_call

from pipegrid.core.skips import values_by_edge
from pipegrid.stages.assignment import joined
from pipegrid.stages.calls import accepted_by, by_name
from pipegrid.stages.flow import StageFlow
from pipegrid.stages.host_state import HostState
from pipegrid.stages.proof.outline import Outline
from pipegrid.stages.proof.trace import ModelCall, Trace, first_of, line_of, run, tensors_of, traces, watch
from pipegrid.stages.proof.traced import Operation, traced_in
from pipegrid.stages.skeleton import Needs, Placeholder, StageRun, skeleton_of, without_floats
from pipegrid.stages.skips import SkipCarrier, Skips, Value
from pipegrid.stages.torch_compat import named_leaves, tree_map_only

_NOTHING = Operation("", "", "", 0)
_HOST = "what layers share through Python, or ask of the model, is not sent between stages"


def difference(outline: Outline, call: ModelCall, runs: Sequence[Trace], host: HostState, needs: Needs) -> str:
    """The first difference of a stage from ``runs``, traces of the whole model, in words; "" where there is none.

    Where layers read numbers that are not there, all is run again with others in their place. ``host``: before it.
    """
    found = _first_difference(outline, call, runs, host, needs)
    if found or not any(runs[0].reads.values()):
        return found
    host.restore()
    unlike = evolve(call, unlike=True)
    try:
        runs = traces(outline, unlike, host)
    except Exception:  # noqa: BLE001 -- numbers that no forward has: the model's code may raise anything, and proves nothing
        return ""
    return _first_difference(outline, unlike, runs, host, needs)


def _first_difference(outline: Outline, call: ModelCall, runs: Sequence[Trace], host: HostState, needs: Needs) -> str:
    for number in range(1 if call.hidden else 0, outline.assignment.num_stages):
        host.restore()
        stage = _Stage(outline, number, needs)
        for whole in () if stage.flow.empty else runs:
            try:
                found = stage.traced(whole, call)
            except Exception as error:  # noqa: BLE001 -- the model's code may raise anything
                text = next(iter(str(error).splitlines()), "")
                said = f"{type(error).__name__}: {text} ({line_of(error)})"
                return f"stage {number} ends with {said}, and the model does not; {_HOST}"
            if text := stage.difference(whole, found):
                return text
    return ""


class _Run(StageRun):
    """A forward of a stage without values, whose stand-ins are those of a trace."""

    placed: Callable[[Tensor], Tensor]

    def stand_in(self, like: Tensor) -> Tensor:
        """A tensor that another stage makes, in place of NaN."""
        return self.placed(super().stand_in(like))

    def shaped(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """What ``part`` returns: a trace has the values of the batch beside shapes."""
        args, kwargs = tree_map_only(Tensor, without_floats, (args, kwargs))
        return part(*args, **kwargs)


class _Stage(nn.Module):
    """A stage without values; its forward is `StageFlow.run`."""

    def __init__(self, outline: Outline, number: int, needs: Needs) -> None:
        super().__init__()
        assignment = outline.assignment
        self.outline, self.number, self.absent = outline, number, needs.absent
        # Copies are no operations of the model: a trace has a tensor of its own for all that arrives or stands in.
        self.running = _Run(needs=evolve(needs, writes=False))
        self.whole = skeleton_of(outline.model, assignment, number, self.running)
        self.flow = StageFlow(self.whole, assignment, number)
        self.last = number == assignment.num_stages - 1
        self.skips = needs.skips or Skips({})
        self.carrier = SkipCarrier(self.whole, number, range(assignment.num_stages))
        self.given: dict[Value, Any] = {}
        edges = values_by_edge(self.skips.uses, range(assignment.num_stages))
        self.came = {edge: values for edge, values in edges.items() if edge.destination == number}
        self.running.real, self.running.given = self.carrier.real, self.carrier.given
        self.carrier.prepare(self.skips)  # its hooks come before those of a trace
        # Tensors of other stages, which a trace shows by their names as well:
        self.ghosts = [
            (table, key, one, joined(path, key))
            for part in self.whole.modules()
            if isinstance(part, Placeholder)
            for path, inner in part.ghost.named_modules(prefix=part.name)
            for table in (inner._parameters, inner._buffers)  # noqa: SLF001 -- the tensors take part in no forward of a stage
            for key, one in table.items()
            if one is not None
        ]

    def forward(self, received: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stage as a rank does."""
        if self.skips.uses:
            self.carrier.arrived = {edge: [self._given(one) for one in values] for edge, values in self.came.items()}
            self.carrier.begin(self.skips, received, copies=False)
        return self.flow.run(self.running, received, args, kwargs)

    def _given(self, value: Value) -> Any:
        """The tensor that came in place of a value; a parameter is known by its name wherever it is."""
        if not value.is_parameter:
            return self.given[value]
        table, key, _ = self.carrier.place_of(value.part)
        return table[key]

    def traced(self, whole: Trace, call: ModelCall) -> Trace:
        """The trace of a forward, of what the trace of the whole model has sent to the stage."""
        before, encoders = self.flow.before, self.flow.encoders
        first = min(before, encoders or before)  # what the encoder has sent, each stage behind it has
        first = max(first, first_of(self.outline, call.skips))
        there = frozenset(self.skips.there(self.number))
        mode = Trace(call, first=first, skips=there)
        names = self.outline.first_names
        own = {f"whole.{name}": one for name, one in tensors_of(mode, self.whole, names).items()}
        for table, key, one, name in self.ghosts:
            table[key] = mode.outside(one, parameter=names.get(name, name))
        received: Any = None
        if self.number:
            received = whole.results[before]
            if encoders and before > encoders:
                received = received, whole.results[encoders]
            received = mode.stand_ins(received)
            if first > before:  # it has no name there, and is what it is made of
                for one, made_of in zip(traced_in(received), whole.ends[before], strict=True):
                    one.arrived = made_of, one.cell.written
        if encoders and before >= encoders:  # the encoder does not run
            mode.passed = encoders
            mode.pass_boundary(received if before == encoders else received[1])
        self.running.placed = mode.placed
        self.given = {value: mode.stand_ins(one) for value, one in whole.given.items()}

        def forward(given: Any) -> Any:
            args, kwargs = given
            if self.number:
                args, kwargs = (), by_name(accepted_by(self.whole), args, kwargs)
            random.seed(self.number)  # a rank has a state of its own
            return functional_call(self, own, (received, args, kwargs), tie_weights=False)

        with ExitStack() as stack:
            watch(mode, stack, self.outline, self.whole)
            run(mode, forward, call, call.loss if self.last else None)
        return mode

    def difference(self, whole: Trace, found: Trace) -> str:
        """The first difference of the stage from the whole model, in words."""
        runs, first, after = (whole, found), self.flow.before + (self.number > 0), self.flow.after
        for boundary in range(first, after + 1):
            if whole.ends[boundary] != found.ends.get(boundary):
                return self._named(runs, whole.sent[boundary], found.sent.get(boundary, []))
        for value, uses in self.skips.uses.items():
            own = uses.source == self.number and not value.is_parameter
            if own and whole.skipped.get(value) != found.skipped.get(value):
                return self._named(runs, [whole.given[value]], [], f"{value}, which it hands on")
        least, most = first if self.number else 0, math.inf if self.last else after
        applied = [[one for one in run.applied if least <= one.passed <= most] for run in runs]
        for ours, theirs in zip_longest(*applied, fillvalue=_NOTHING):
            if ours.signature != theirs.signature:
                return self._text(ours, theirs)
        if not self.last:
            return ""
        results = [dict(self._leaves(run)) for run in runs]
        for place in results[0]:
            if results[0][place] != results[1].get(place):
                return self._named(runs, traced_in(whole.result), traced_in(found.result), place)
        return ""

    def _leaves(self, run: Trace) -> Iterator[tuple[str, Any]]:
        for place, leaf in named_leaves(run.result):
            if place in self.absent:
                continue
            if isinstance(leaf, Tensor):
                yield place, run.reference(run.outside(leaf))
            elif isinstance(leaf, (bool, int, float, str)):
                yield place, leaf

    def _named(self, runs: tuple[Trace, Trace], ours: Sequence[Any], theirs: Sequence[Any], at: str = "") -> str:
        """The first operations that differ, of those that make ``ours`` and ``theirs``."""
        first = self.flow.before + 1 if self.number else 0
        whole, found = runs
        pairs = zip_longest(whole.behind_of(ours, first), found.behind_of(theirs, first), fillvalue=_NOTHING)
        for one, other in pairs:
            if one.signature != other.signature:
                return self._text(one, other)
        return f"stage {self.number} has another value in {at or 'what it sends'} than the model; {_HOST}"

    def _text(self, ours: Operation, theirs: Operation) -> str:
        def said(one: Operation) -> str:
            return f"{one.text} in {one.part or 'the model'} ({one.line})" if one.text else "nothing more"

        other = " of other values" if ours.text == theirs.text else ""
        return f"stage {self.number} computes {said(theirs)}{other} where the model computes {said(ours)}; {_HOST}"
