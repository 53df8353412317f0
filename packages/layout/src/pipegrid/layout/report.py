"""What a layout costs, stage by stage: as numbers, as a table, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import attrs

from pipegrid.layout.checks import checked_peaks, figure, of_type
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.in_flight import in_flight_1f1b
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.profile import Costs, Memories, Profile, read_profile
from pipegrid.layout.svg import draw
from pipegrid.layout.table import align, name_layers

_BAR = 24  # characters of the longest bar in the table

Peaks = Sequence[Sequence[Sequence[int]]]
"""For each rank, combinations of in-flight microbatches per chunk that occur, as `in_flight_1f1b` gives them."""


@attrs.frozen
class LayoutReport:
    """Cost and memory of each stage of a layout.

    Attributes:
        layout: the layout.
        costs: cost of each stage.
        costs_by_kind: for each stage, the cost of its layers of each kind.
        memory: for each stage, its memory when most microbatches of it are in flight; None without memory figures.
        rank_memory: for each pp rank, its memory at the worst moment, all chunks together; None likewise.
        limits: for each pp rank, the memory it may use; None where no limit was given.

    Raises:
        LayoutError: a row has not one value for each stage, or each rank, of the layout.
    """

    layout: PipelineParallelLayerLayout
    costs: tuple[float, ...]
    costs_by_kind: tuple[Mapping[str, float], ...] = attrs.field(hash=False)
    memory: tuple[float, ...] | None = None
    rank_memory: tuple[float, ...] | None = None
    limits: tuple[float, ...] | None = None

    def __attrs_post_init__(self) -> None:
        of_type("layout of a report", self.layout, PipelineParallelLayerLayout, "report() makes a report of one")
        stages, ranks = len(self.layout.stages), self.layout.pipeline_model_parallel_size
        for name, values, count in (
            ("costs", self.costs, stages),
            ("costs_by_kind", self.costs_by_kind, stages),
            ("memory", self.memory, stages),
            ("rank_memory", self.rank_memory, ranks),
            ("limits", self.limits, ranks),
        ):
            _check_row(name, values, count, optional=name not in {"costs", "costs_by_kind"})

    @property
    def bottleneck(self) -> float:
        """Cost of the most expensive stage."""
        return max(self.costs)

    @property
    def spread(self) -> float:
        """The largest stage cost minus the smallest."""
        return max(self.costs) - min(self.costs)

    @property
    def mean(self) -> float:
        """The mean stage cost, empty stages included."""
        return sum(self.costs) / len(self.costs)

    @property
    def imbalance(self) -> float:
        """The largest stage cost over the mean: 1 for a perfect balance, and where nothing costs anything."""
        return self.bottleneck / self.mean if self.mean else 1.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's part of the total cost; they add up to 1 (to 0 where nothing costs anything)."""
        total = sum(self.costs)
        return tuple(cost / total if total else 0.0 for cost in self.costs)

    def table(self) -> str:
        """One line per stage (position, layers, cost, share, memory, a bar for the cost), and the summary."""
        header = ["stage", "PP rank", "VPP rank", "cost", "share"]
        rows = [
            [str(stage), *map(str, self.layout.position(stage)), f"{cost:.6g}", f"{share:.1%}"]
            for stage, (cost, share) in enumerate(zip(self.costs, self.shares, strict=True))
        ]
        if self.memory is not None:
            header.append("memory")
            rows = [[*row, f"{memory:.6g}"] for row, memory in zip(rows, self.memory, strict=True)]
        right = frozenset(range(len(header)))
        header += ["layers", ""]
        longest = self.bottleneck or 1
        rows = [
            [*row, name_layers(layers), "#" * round(_BAR * cost / longest)]
            for row, layers, cost in zip(rows, self.layout.stages, self.costs, strict=True)
        ]
        return f"{align([header, *rows], right=right)}\n{self.summary()}"

    def summary(self) -> str:
        """Bottleneck, spread, imbalance and, where it is known, the fullest rank."""
        worst = self.costs.index(self.bottleneck)
        text = (
            f"bottleneck {self.bottleneck:.6g} (stage {worst}), mean {self.mean:.6g}, spread {self.spread:.6g}, "
            f"imbalance (max / mean) {self.imbalance:.4f}"
        )
        if self.rank_memory is not None:
            fullest = max(range(len(self.rank_memory)), key=self._fill)
            limit = f" of {self.limits[fullest]:.6g}" if self.limits else ""
            text += f"\nmemory: PP rank {fullest} is fullest, {self.rank_memory[fullest]:.6g}{limit}"
        return text

    def _fill(self, rank: int) -> tuple[float, float]:
        """How full a rank is: of its limit where there is one, else absolutely."""
        used = self.rank_memory[rank] if self.rank_memory else 0.0
        limit = self.limits[rank] if self.limits else 0.0
        return (used / limit if limit else 0.0), used

    def svg(self) -> str:
        """The picture as an SVG document: a bar per stage, stacked by kind of layer; and memory per rank, if known."""
        return draw(
            [name_layers(layers) for layers in self.layout.stages],
            self.costs_by_kind,
            title=f"{self.layout.short_text()}, PP {self.layout.pipeline_model_parallel_size}",
            mean=self.mean,
            memory=self.rank_memory,
            limits=self.limits,
        )

    def to_dict(self) -> dict[str, object]:
        """The numbers as plain data, for JSON."""
        stages = []
        for stage, (cost, share) in enumerate(zip(self.costs, self.shares, strict=True)):
            rank, chunk = self.layout.position(stage)
            row: dict[str, object] = {"stage": stage, "pp_rank": rank, "vp_stage": chunk, "cost": cost, "share": share}
            if self.memory is not None:
                row["memory"] = self.memory[stage]
            stages.append(row)
        data: dict[str, object] = {
            "stages": stages,
            "bottleneck": self.bottleneck,
            "mean": self.mean,
            "spread": self.spread,
            "imbalance": self.imbalance,
        }
        if self.rank_memory is not None:
            data["rank_memory"] = list(self.rank_memory)
        if self.limits is not None:
            data["limits"] = list(self.limits)
        return data

    def __str__(self) -> str:
        return self.table()


def _check_row(name: str, values: object, count: int, *, optional: bool) -> None:
    """Refuse a row of a report that is not one value for each stage, or each rank."""
    if values is None and optional:
        return
    row = of_type(f"{name} of a report", values, tuple, "report() makes all of it")
    if len(row) != count:
        raise LayoutError(f"{name} of a report has {len(row)} values, the layout has {count}; report() makes all of it")
    for value in row:
        if name == "costs_by_kind":
            of_type(f"{name} of a stage", value, Mapping, "it maps kinds of layer to costs")  # type: ignore[type-abstract]
        else:
            figure(f"{name} of a report", value)


def report(
    layout: PipelineParallelLayerLayout,
    costs: Costs,
    *,
    memory: Memories | None = None,
    limit: float | Sequence[float] | None = None,
    microbatches: int | None = None,
    in_flight: Peaks | None = None,
) -> LayoutReport:
    """What each stage of a layout costs and holds.

    Args:
        layout: the layout.
        costs: forward plus backward time of each layer, per kind or per layer in model order (see `balance`).
        memory: memory of each layer likewise: a `LayerMemory`, or a number per microbatch in flight.
        limit: memory of a rank, or one number per pp rank; only shown beside the memory.
        microbatches: microbatches per step, for the number in flight under 1F1B; None for many.
        in_flight: what is in flight under another schedule, as `in_flight_1f1b` gives it.

    Raises:
        LayoutError: costs or memory do not fit the layout, or a number is not one.
    """
    of_type("layout", layout, PipelineParallelLayerLayout, "PipelineParallelLayerLayout('Ett|ttL', 2) is one")
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    profile = read_profile(layout.flatten_layout, costs, memory, limit, pp=pp, grammar=layout.grammar)
    return measure(layout, profile, peaks_of(in_flight, pp, vpp, microbatches))


def measure(
    layout: PipelineParallelLayerLayout, profile: Profile, peaks: Sequence[Sequence[Sequence[int]]]
) -> LayoutReport:
    """The report on a layout of the layers of ``profile``; ``peaks`` as those of `peaks_of`."""
    ends = list(accumulate(len(stage) for stage in layout.stages))
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    costs, by_kind = [], []
    for start, end in spans:
        parts: dict[str, int] = {}
        for kind, cost in zip(profile.kinds[start:end], profile.cost[start:end], strict=True):
            parts[kind] = parts.get(kind, 0) + cost
        costs.append(sum(parts.values()) / profile.unit)
        by_kind.append({kind: part / profile.unit for kind, part in parts.items()})
    if profile.memory is None:
        return LayoutReport(layout, tuple(costs), tuple(by_kind))
    pp, unit = layout.pipeline_model_parallel_size, profile.memory.unit
    fixed = [sum(profile.memory.fixed[start:end]) for start, end in spans]
    moving = [sum(profile.memory.moving[start:end]) for start, end in spans]
    most = [max(peak[stage // pp] for peak in peaks[stage % pp]) for stage in range(len(spans))]
    at_peaks = [
        max(sum(fixed[rank::pp]) + sum(map(mul, moving[rank::pp], peak)) for peak in peaks[rank]) for rank in range(pp)
    ]
    return LayoutReport(
        layout,
        tuple(costs),
        tuple(by_kind),
        memory=tuple((fixed[stage] + moving[stage] * count) / unit for stage, count in enumerate(most)),
        rank_memory=tuple(held / unit for held in at_peaks),
        limits=None if profile.memory.limits is None else tuple(limit / unit for limit in profile.memory.limits),
    )


def peaks_of(
    in_flight: Peaks | None, pp: int, vpp: int, microbatches: int | None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """What is in flight: as given or, without that, under 1F1B.

    Raises:
        LayoutError: both are given, or one is malformed.
    """
    if in_flight is None:
        return in_flight_1f1b(pp, vpp, microbatches)
    if microbatches is not None:
        raise LayoutError("give microbatches (for 1F1B) or in_flight (for another schedule), not both")
    return checked_peaks(in_flight, pp, vpp)
