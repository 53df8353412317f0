"""Cost and memory of a layout, stage by stage: numbers, table, picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import attrs

from pipegrid.core.fields import checked_arguments
from pipegrid.layout.balancing.in_flight import Peaks, peaks_of
from pipegrid.layout.balancing.profile import Costs, Memories, Profile, read_profile
from pipegrid.layout.errors import LayoutError
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.svg import draw
from pipegrid.layout.text import align, name_layers

_BAR = 24  # characters of the longest bar in the table


@attrs.frozen
class LayoutReport:
    """Cost and memory of each stage of a layout.

    Attributes:
        layout: the layout.
        costs: cost of each stage.
        costs_by_kind: for each stage, the cost of its layers of each kind.
        memory: for each stage, its memory with most of its microbatches in flight; None without memory figures.
        rank_memory: for each pp rank, its memory at the worst moment, all chunks together; None likewise.
        limits: for each pp rank, its limit; None without limits.
    """

    layout: PipelineParallelLayerLayout
    costs: tuple[float, ...]
    costs_by_kind: tuple[Mapping[str, float], ...] = attrs.field(hash=False)
    memory: tuple[float, ...] | None = None
    rank_memory: tuple[float, ...] | None = None
    limits: tuple[float, ...] | None = None

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
        """The largest stage cost over the mean: 1 for a perfect balance, and where all costs are 0."""
        return self.bottleneck / self.mean if self.mean else 1.0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each stage's part of the total cost; the sum is 1 (0 where the total is 0)."""
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
        """Bottleneck, spread, imbalance and, with memory figures, the fullest rank."""
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
        """The key of the fullest rank: its part of its limit where there is one, then its memory."""
        used = self.rank_memory[rank] if self.rank_memory else 0.0
        limit = self.limits[rank] if self.limits else 0.0
        return (used / limit if limit else 0.0), used

    def svg(self) -> str:
        """An SVG document: a bar per stage, stacked by kind of layer; with memory figures, a bar per rank."""
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
            row = {"stage": stage, "pp_rank": rank, "vp_stage": chunk, "cost": cost, "share": share}
            stages.append(row if self.memory is None else {**row, "memory": self.memory[stage]})
        data = {"stages": stages} | {
            name: getattr(self, name) for name in ("bottleneck", "mean", "spread", "imbalance")
        }
        ranks = {"rank_memory": self.rank_memory, "limits": self.limits}
        return data | {name: list(each) for name, each in ranks.items() if each is not None}

    def __str__(self) -> str:
        return self.table()


@checked_arguments(LayoutError, kinds=True)
def report(
    layout: PipelineParallelLayerLayout,
    costs: Costs,
    *,
    memory: Memories | None = None,
    limit: float | Sequence[float] | None = None,
    microbatches: int | None = None,
    in_flight: Peaks | None = None,
) -> LayoutReport:
    """Cost and memory of each stage of a layout.

    Args:
        layout: the layout.
        costs: as in `balance`.
        memory: as in `balance`.
        limit: memory of a rank, or one number per pp rank; only shown beside the memory.
        microbatches: as in `balance`.
        in_flight: as in `balance`.

    Examples:
        >>> found = report(even(8, 2), {"embedding": 0.3, "decoder": 1.0, "loss": 1.1})
        >>> found.costs
        (4.3, 5.1)
    """
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    profile = read_profile(layout.flatten_layout, costs, memory, limit, pp=pp, grammar=layout.grammar)
    return measure(layout, profile, peaks_of(in_flight, pp, vpp, microbatches))


def measure(
    layout: PipelineParallelLayerLayout, profile: Profile, peaks: Sequence[Sequence[Sequence[int]]]
) -> LayoutReport:
    """The report on a layout of the layers of ``profile``; ``peaks`` in the form of `peaks_of`."""
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
