"""Costs and memory of a model's layers as exact integers, from numbers per kind or per layer.

Floating-point sums depend on their order, and so would the choice between two layouts. Every finite float is a whole
multiple of some power of two, so costs are scaled to integers once, and every later comparison is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Rational, Real
from typing import Any, TypeGuard

import attrs

from pipegrid.core.fields import checked, shown
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.grammar import LayerType, LayoutGrammar
from pipegrid.layout.parser import parse

Ratio = tuple[int, int]
"""A number exactly: numerator and denominator."""

_LARGEST = 10**100  # keeps every sum in the range of a float


@attrs.frozen
class LayerMemory:
    """Memory of one layer on one rank, in any unit.

    Attributes:
        fixed: weights, gradients, optimizer state.
        per_microbatch: activations, per microbatch in flight.

    Examples:
        >>> times = {"embedding": 0.3, "decoder": [1.0] * 8, "loss": 1.1}
        >>> memory = dict.fromkeys(times, LayerMemory(fixed=6, per_microbatch=0.5))
        >>> str(balance(times, 4, memory=memory, limit=30).layout)
        'Ett|tt|t*3|tL'
    """

    fixed: float = 0
    per_microbatch: float = 0

    def __attrs_post_init__(self) -> None:
        _amount("LayerMemory.fixed", self.fixed)
        _amount("LayerMemory.per_microbatch", self.per_microbatch)


Costs = Mapping[str, float | Sequence[float]] | Sequence[float]
"""One number per kind of layer, or a number per layer of each kind; or a number per layer of the model."""

Memories = Mapping[str, float | LayerMemory | Sequence[float | LayerMemory]] | Sequence[float | LayerMemory]
"""Memory in the forms of `Costs`; a plain number is memory per microbatch in flight."""


@attrs.frozen
class ExactMemory:
    """Memory of each layer and limit of each rank, as integers: ``integer / unit`` is the caller's number."""

    fixed: Sequence[int]
    moving: Sequence[int]
    limits: Sequence[int] | None
    unit: int


@attrs.frozen
class Profile:
    """The layers of a model with their costs, as integers: ``integer / unit`` is the caller's number."""

    kinds: Sequence[str]
    cost: Sequence[int]
    unit: int
    memory: ExactMemory | None


def read_profile(
    kinds: Sequence[str],
    costs: Costs,
    memory: Memories | None,
    limit: float | Sequence[float] | None,
    *,
    pp: int,
    grammar: LayoutGrammar,
) -> Profile:
    """Costs, memory and limit of ``pp`` ranks in exact form, one per layer of ``kinds``."""
    numbers = _per_layer(costs, kinds, "costs", grammar)
    ratios = [_amount(f"cost of layer {i} ({kinds[i]!s})", number) for i, number in enumerate(numbers)]
    cost, unit = _exact(ratios)
    if memory is None:
        if limit is not None:
            raise LayoutError("a limit needs the memory of each layer; pass memory as well")
        return Profile(kinds, cost, unit, None)
    fixed, moving = _memories(_per_layer(memory, kinds, "memory", grammar), kinds)
    limits: list[Ratio] = []
    if _is_sequence(limit):
        each = enumerate(_one_each(limit, pp, "limit", "pp ranks"))
        limits = [_amount(f"limit of pp rank {rank}", one) for rank, one in each]
    elif limit is not None:
        limits = [_amount("limit", limit)] * pp
    sizes, memory_unit = _exact([*fixed, *moving, *limits])
    n = len(kinds)
    return Profile(kinds, cost, unit, ExactMemory(sizes[:n], sizes[n : 2 * n], sizes[2 * n :] or None, memory_unit))


def model_layers(costs: Costs, layers: str | Sequence[str] | None, grammar: LayoutGrammar) -> tuple[str, ...]:
    """The kinds of all layers in model order: from ``layers``, else from ``costs``, as `balance` says."""
    if isinstance(layers, str):
        kinds, *more = parse(layers, grammar)
        if more:
            raise LayoutError(f"layers {layers!r:.80} must be one stage; remove the '|'")
    elif layers is not None:
        checked(layers, Iterable[Any], "layers", LayoutError)
        kinds = tuple(grammar.kind(kind, where=f"layer {index}: ") for index, kind in enumerate(layers))
    elif isinstance(costs, Mapping):
        kinds = tuple(
            grammar.kind(kind, where="costs: ")
            for kind, values in costs.items()
            for _ in range(len(values) if _is_sequence(values) else 1)
        )
    elif _is_sequence(costs):
        kinds = (LayerType.decoder,) * len(costs)
    else:
        raise LayoutError(f"costs must be a mapping from kinds of layer or a list of numbers, got {costs!r:.80}")
    if not kinds:
        raise LayoutError(f"the model has no layers: costs are {costs!r:.60} and layers {layers!r:.60}")
    return kinds


def _per_layer(
    values: Mapping[str, object] | Sequence[object], kinds: Sequence[str], what: str, grammar: LayoutGrammar
) -> list[object]:
    """One value for each layer of the model, whose ``kinds`` are in model order; ``what`` begins error texts."""
    if not isinstance(values, Mapping):
        return _one_each(values, len(kinds), what, "layers")
    named = {grammar.kind(kind, where=f"{what}: "): value for kind, value in values.items()}
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    if missing := [str(kind) for kind in counts if kind not in named]:
        raise LayoutError(f"{what} has no value for {', '.join(missing)}; it has {', '.join(map(str, named))}")
    sources = {}
    for kind, count in counts.items():
        value = named[kind] if _is_sequence(named[kind]) else [named[kind]] * count
        sources[kind] = iter(_one_each(value, count, what, f"{kind!s} layers"))
    return [next(sources[kind]) for kind in kinds]


def _one_each(values: object, count: int, what: str, of: str) -> list[object]:
    if not _is_sequence(values) or len(values) != count:
        raise LayoutError(f"{what} must have {count} values, one for each of the {of}, got {shown(values)}")
    return list(values)


def _memories(values: Sequence[object], kinds: Sequence[str]) -> tuple[list[Ratio], list[Ratio]]:
    fixed, moving = [], []
    for index, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        what = f"memory of layer {index} ({kind!s})"
        if isinstance(value, LayerMemory):
            pair: tuple[object, object] = value.fixed, value.per_microbatch
        elif isinstance(value, Mapping):
            if not set(value) <= {"fixed", "per_microbatch"}:
                raise LayoutError(f"{what} has keys {list(value)}; the known ones are fixed, per_microbatch")
            pair = value.get("fixed", 0), value.get("per_microbatch", 0)
        else:
            pair = 0, value
        fixed.append(_amount(what, pair[0]))
        moving.append(_amount(what, pair[1]))
    return fixed, moving


def _exact(numbers: Sequence[Ratio]) -> tuple[list[int], int]:
    """The numbers as integers, and their unit: ``integer / unit`` is the number, without rounding."""
    unit = math.lcm(*(denominator for _, denominator in numbers))
    return [numerator * (unit // denominator) for numerator, denominator in numbers], unit


def _amount(what: str, value: object) -> Ratio:
    """A cost or an amount of memory, exactly: finite, at least 0 and below 1e100."""
    ratio = _ratio(value)
    if ratio is not None and 0 <= ratio[0] < _LARGEST * ratio[1]:
        return ratio
    raise LayoutError(f"{what} is {shown(value)}; it must be a finite number of at least 0 and below {_LARGEST:g}")


def _ratio(value: object) -> Ratio | None:
    # Floats and ints first: models have thousands of layers, and isinstance of an abstract class is slow.
    if isinstance(value, float):
        return value.as_integer_ratio() if math.isfinite(value) else None
    if isinstance(value, int):
        return None if isinstance(value, bool) else (value, 1)
    if isinstance(value, Rational):
        return int(value.numerator), int(value.denominator)
    return _ratio(float(value)) if isinstance(value, Real) else None


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
