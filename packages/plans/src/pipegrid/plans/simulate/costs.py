"""The costs of a plan: time per stage and kind, messages per edge, memory per stage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from attrs import evolve, fields, frozen

from pipegrid.core.edge import Edge
from pipegrid.core.fields import (
    Amount,
    Count,
    Rule,
    checked_arguments,
    checked_fields,
    instance,
    nearest,
    number,
    shown,
)
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan import load_json, parse_edge

if TYPE_CHECKING:
    from pipegrid.plans.plan import Plan


class CostsError(ValueError):
    """Costs that are negative, not numbers, or missing for a stage or an edge.

    Examples:
        >>> Costs(F=-1.0)
        Traceback (most recent call last):
            ...
        pipegrid.plans.simulate.costs.CostsError: Costs.F is -1.0; it must be a finite number of at least 0, or one
            for each stage
    """


class OtherCutError(CostsError):
    """Costs per edge for other edges than those of the model as it is cut here."""


# Rules: a number, one for each stage, one for each edge


def _share(value: Any) -> float:
    share = number().convert(value)
    if share > 1:
        raise ValueError
    return float(share)


def _rate(value: Any) -> float:
    return value if isinstance(value, float) and value == math.inf else float(number(above=0.0).convert(value))


def _one_of(names: tuple[str, ...]) -> Rule:
    return Rule(lambda value: names[names.index(value)], f"one of {', '.join(names)}", names)


def _per_stage(one: Rule) -> Rule:
    def convert(value: Any) -> Any:
        try:
            entries = tuple(value)
        except TypeError:
            return one.convert(value)
        if not entries or isinstance(value, str | bytes | Mapping | AbstractSet):
            raise ValueError
        return tuple([one.convert(entry) for entry in entries])

    return Rule(convert, f"{one.text}, or one for each stage")


def _per_edge(one: Rule) -> Rule:
    def convert(value: Any) -> Any:
        try:
            pairs = sorted(value.items() if isinstance(value, Mapping) else value)
        except TypeError:
            return one.convert(value)
        if not pairs or not all(isinstance(pair, tuple) and isinstance(pair[0], Edge) for pair in pairs):
            raise ValueError
        return tuple([(edge, one.convert(cost)) for edge, cost in pairs])

    return Rule(convert, f"{one.text}, or a dict with one for each Edge")


_RATE = Rule(_rate, "a number above 0 (infinite: free)")
_SHARE = Rule(_share, "a share from 0 to 1")
Share: TypeAlias = Annotated[float, _SHARE]
"""A part of a whole."""
PerStage: TypeAlias = Annotated[float | Sequence[float], _per_stage(number())]
"""One number for every stage, or one per stage."""
PerEdge: TypeAlias = Annotated[float | Mapping[Edge, float] | Sequence[tuple[Edge, float]], _per_edge(number())]
"""One number for every edge, or one per edge."""
PerSlice: TypeAlias = tuple[Annotated[float, number(above=0.0)], ...]

PER_STAGE = (
    *("F", "I", "W", "B", "REDUCE", "COLLECTIVE", "activation", "input_release"),
    *("UNSHARD", "REDUCE_GRAD", "parameters", "hidden"),
)
PER_EDGE = ("latency", "bandwidth", "message")
_SHARES = ("F", "I", "W", "B", "activation", "UNSHARD", "REDUCE_GRAD", "parameters", "hidden")
"""Costs of which a stage has its share of the model."""
StageCost: TypeAlias = Annotated[str, _one_of(PER_STAGE)]
EdgeCost: TypeAlias = Annotated[str, _one_of((*PER_EDGE, "kept"))]


@frozen(field_transformer=checked_fields(CostsError))
class Costs:
    """Times in any one unit (seconds, or multiples of a forward); numbers for all stages or one per stage.

    A message arrives ``latency + message / bandwidth`` after both ends are posted; its lane is busy for the second
    term. Of a plan with slices, all costs are of whole microbatches, and divided among their slices.

    Attributes:
        F: a forward.
        I: the half of a backward that gives the gradients of inputs.
        W: the half that gives the gradients of weights.
        B: a whole backward; by default ``I + W``.
        latency: of a message along an edge.
        bandwidth: bytes per unit of time along an edge; infinite is free.
        message: bytes of an activation along an edge, and of its gradient.
        REDUCE: a ``REDUCE``.
        COLLECTIVE: a ``COLLECTIVE``.
        overhead: what every action, compute or communication, costs its position in addition.
        activation: memory of one microbatch of a stage from its forward on; by default 1/n of a microbatch, where its
            position has n stages.
        input_release: the share of it, from 0 to 1, that ``I`` releases; ``W`` releases the rest.
        kept: memory of a payload that skips stages, beside activations, while a position keeps it (`Simulation.live`).
        UNSHARD: gathering the parameters of a stage, beside computes.
        REDUCE_GRAD: reduce-scattering its gradients, beside computes.
        parameters: memory of the gathered parameters (in bytes, say), and of their gradients until they are reduced.
        offload_bandwidth: memory of activations copied to the host in a unit of time, and as much back at the same
            time.
        hidden: what a pair saves of the sum of its two computes, as each hides the other's exchanges, at most the
            shorter of them; where they are of two stages, half of what both save.
        slice_lengths: of the slices in any unit (tokens, say), by which ``W``, activations and messages are divided;
            by default equal.
        slice_times: of the slices, by which ``F``, ``B`` and ``I`` are divided; later ones take longer for causal
            attention (`pipegrid.search.slice_times`); by default equal.

    Raises:
        CostsError: a number that is negative or not finite, by its name.

    Examples:
        >>> costs = Costs(F=0.010, I=0.011, W=[0.007, 0.009], latency=0.0005)  # seconds; two stages
        >>> simulate(one_f_one_b(2, 4), costs).makespan
        0.14899999999999997
    """

    F: PerStage = 1.0
    I: PerStage = 1.0
    W: PerStage = 1.0
    B: PerStage | None = None
    latency: PerEdge = 0.0
    bandwidth: Annotated[float | Mapping[Edge, float] | Sequence[tuple[Edge, float]], _per_edge(_RATE)] = math.inf
    message: PerEdge = 0.0
    REDUCE: PerStage = 0.0
    COLLECTIVE: PerStage = 0.0
    overhead: Amount = 0.0
    activation: PerStage | None = None
    input_release: Annotated[float | Sequence[float], _per_stage(_SHARE)] = 0.0
    kept: PerEdge = 0.0
    UNSHARD: PerStage = 0.0
    REDUCE_GRAD: PerStage = 0.0
    parameters: PerStage = 0.0
    offload_bandwidth: Annotated[float, _RATE] = math.inf
    hidden: PerStage = 0.0
    slice_lengths: PerSlice = ()
    slice_times: PerSlice = ()

    @property
    def stages(self) -> int | None:
        """For how many stages numbers are given; None where one number serves them all."""
        lengths = {len(value) for name in PER_STAGE if isinstance(value := getattr(self, name), tuple)}
        if len(lengths) > 1:
            raise CostsError(f"costs are given for {sorted(lengths)} stages; give all of them for the same stages")
        return lengths.pop() if lengths else None

    @checked_arguments(CostsError)
    def per_stage(self, name: StageCost, num_stages: Count) -> list[float]:
        """The cost ``name`` (``"F"``, ``"B"``, ``"activation"``, ...) of each of ``num_stages`` stages."""
        value = getattr(self, name)
        if name == "B" and value is None:
            halves = zip(self.per_stage("I", num_stages), self.per_stage("W", num_stages), strict=True)
            return [i + w for i, w in halves]
        if value is None:
            raise CostsError(f"{name} is not given: each stage counts its share of its position")
        if not isinstance(value, tuple):
            return [float(value)] * num_stages
        if len(value) != num_stages:
            raise CostsError(f"{name} is given for {len(value)} stages; the plan has {num_stages}")
        return [float(entry) for entry in value]

    @checked_arguments(CostsError)
    def per_edge(self, name: EdgeCost, edges: Iterable[Edge]) -> dict[Edge, float]:
        """The cost ``name`` (``"latency"``, ``"bandwidth"``, ``"message"`` or ``"kept"``) of each of ``edges``."""
        edges = tuple(edges)
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return dict.fromkeys(edges, float(value))
        known = dict(value)
        missing = [str(edge) for edge in edges if edge not in known]
        if missing:
            raise CostsError(f"{name} has no number for edge {', '.join(missing)}; give one for each edge")
        return {edge: float(known[edge]) for edge in edges}

    def travel(self, edges: Iterable[Edge]) -> dict[Edge, tuple[float, float]]:
        """Per edge, the time for which a message occupies its lane, and the latency after that."""
        edges = tuple(edges)
        latency, bandwidth, message = (self.per_edge(name, edges) for name in PER_EDGE)
        return {edge: (message[edge] / bandwidth[edge], latency[edge]) for edge in edges}

    def per_slice(self, name: str, num_slices: int) -> tuple[float, ...]:
        """The share of a microbatch (``"slice_lengths"`` or ``"slice_times"``) of each of ``num_slices`` slices."""
        value: tuple[float, ...] = getattr(self, name)
        if not value or num_slices == 1:
            return (1.0 / num_slices,) * num_slices
        if len(value) != num_slices:
            raise CostsError(f"{name} is given for {len(value)} slices; the plan has {num_slices}")
        whole = math.fsum(value)
        return tuple(entry / whole for entry in value)

    @checked_arguments(CostsError)
    def cut_into(
        self,
        num_stages: Count,
        *,
        slices: Count,
        beside: tuple[Count, ...] | None = None,
        edges: Iterable[Edge] | None = None,
    ) -> Costs:
        """The same model cut into ``num_stages`` stages, of equal share or of 1/n each for n in ``beside``.

        A number is the cost of one of ``slices`` equal slices (one per position, say); numbers per stage are of
        consecutive slices. Costs per edge cannot be cut: they must be for the ``edges`` of the result (by default those
        of a chain).

        Raises:
            OtherCutError: latency, bandwidth or message is given for other edges.
            CostsError: a number that is not an integer of at least 1.
        """
        wanted = {Edge(stage, stage + 1) for stage in range(num_stages - 1)} if edges is None else set(edges)
        for name in (*PER_EDGE, "kept"):
            value = getattr(self, name)
            given = {edge for edge, _ in value} if isinstance(value, tuple) else wanted
            if given != wanted and (name != "kept" or given - wanted):
                what = f"a model cut anew has other edges ({_listed(wanted)}) than those given ({_listed(given)})"
                raise OtherCutError(f"{name} is given per edge; {what}: give one number, or one for each of them")

        uneven = beside is not None and len(set(beside)) > 1
        weights = [1 / number for number in beside] if beside is not None and uneven else [1.0] * num_stages
        shares = [weight / math.fsum(weights) for weight in weights]

        def cut(value: Any) -> Any:
            if not value or (not uneven and num_stages == (len(value) if isinstance(value, tuple) else slices)):
                return value
            if isinstance(value, tuple):
                return _resampled(value, shares)
            return tuple(value * slices * share for share in shares) if uneven else value * slices / num_stages

        amounts = {name: cut(getattr(self, name)) for name in _SHARES}
        share = self.input_release
        if isinstance(share, tuple) and len(share) != num_stages:  # the mean of what a stage covers
            sums = zip(_resampled(share, shares), shares, strict=True)
            amounts["input_release"] = tuple(min(1.0, total / (len(share) * part)) for total, part in sums)
        return evolve(self, **amounts)


def activation_sizes(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """Per stage, the memory of one microbatch: as ``costs`` say, by default its share of a position."""
    if costs.activation is None:
        return tuple(1.0 / beside for beside in plan.stages_beside)
    return tuple(costs.per_stage("activation", plan.num_stages))


def with_slack(limit: float) -> float:
    """A memory limit with a billionth to spare: sums of measured sizes, added and released, are not exact."""
    return limit + 1e-9 * max(1.0, limit)


GivenCosts: TypeAlias = Annotated[Costs, instance(Costs, "Costs(F=..., I=..., W=...)")]
"""Costs, where a dict is a common mistake."""


def _listed(edges: Iterable[Edge]) -> str:
    first = sorted(edges)
    return ", ".join(map(str, first[:8])) + (f" and {len(first) - 8} more" if len(first) > 8 else "") or "none"


def _resampled(values: Sequence[float], shares: Sequence[float]) -> tuple[float, ...]:
    """``values``, each spread evenly over its equal slice of a line, summed over slices of ``shares`` instead."""
    sums = []
    ends = [math.fsum(shares[:index]) * len(values) for index in range(len(shares) + 1)]
    for first, last in pairwise(ends):
        total = 0.0
        for at in range(math.floor(first), min(math.ceil(last), len(values))):
            total += values[at] * (min(last, at + 1) - max(first, at))
        sums.append(total)
    return tuple(sums)


def costs_to_json(costs: Costs) -> str:
    """``costs`` as JSON: the fields that differ from the default, edges as ``"0>1"``."""
    data: dict[str, Any] = {}
    for attribute in fields(Costs):
        value = getattr(costs, attribute.name)
        if isinstance(value, tuple) and value and isinstance(value[0], tuple):
            value = {str(edge): number for edge, number in value}
        if value != attribute.default:
            data[attribute.name] = value
    return json.dumps(data)


def costs_from_json(text: str) -> Costs:
    """Read `Costs` from a JSON object with its fields as keys, all optional.

    A number is for every stage or edge, a list has one for each stage, ``{"0>1": 0.5}`` one for each edge.

    Raises:
        CostsError: not a JSON object, an unknown key, or a value that is not a cost.

    Examples:
        >>> costs_from_json(costs_to_json(Costs(F=[1.0, 2.0]))).F
        (1.0, 2.0)
    """
    names = [attribute.name for attribute in fields(Costs)]

    def per_edge(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {parse_edge("".join(name.split())): cost for name, cost in value.items()}

    try:
        data = load_json(text, finite=False)  # a bandwidth may be infinite
        if not isinstance(data, dict):
            raise CostsError(f'costs are {shown(data)}; they must be a JSON object such as {{"F": 1.0}}')
        if unknown := sorted(data.keys() - names):
            near = nearest(unknown[0], names)
            raise CostsError(f"{unknown[0]!r} is not a cost{near}; the costs are {', '.join(names)}")
        return Costs(**{name: per_edge(value) for name, value in data.items()})
    except PlanError as error:
        raise CostsError(f"costs cannot be read: {error}") from None
