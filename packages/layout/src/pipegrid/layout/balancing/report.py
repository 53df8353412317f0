"""Cost and memory of a layout, stage by stage: numbers, table, picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from operator import mul

import attrs

from pipegrid.layout.balancing.in_flight import Peaks, peaks_of
from pipegrid.layout.balancing.profile import Costs, Memories, Profile, read_profile
from pipegrid.layout.grammar import LayerType
from pipegrid.layout.layout import PipelineParallelLayerLayout
from pipegrid.layout.text import align, name_layers

_BAR = 24  # characters of the longest bar in the table
_COLORS: dict[str, str] = {
    LayerType.embedding: "#4878cf",
    LayerType.encoder: "#8c6bb1",
    LayerType.decoder: "#6acc65",
    LayerType.mtp: "#d6a23c",
    LayerType.loss: "#d65f5f",
}
_OTHER_COLORS = ("#77bedb", "#c4ad66", "#956cb4", "#8c613c", "#dc7ec0", "#797979")
_WIDTH, _HEIGHT = 960, 220  # of the plotted area of one panel, in SVG units
_LEFT, _TOP, _BELOW = 60, 40, 40


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
            limits = self.limits or (0.0,) * len(self.rank_memory)
            parts = [used / limit if limit else 0.0 for used, limit in zip(self.rank_memory, limits, strict=True)]
            fill = list(zip(parts, self.rank_memory, strict=True))
            fullest = fill.index(max(fill))
            limit = f" of {limits[fullest]:.6g}" if self.limits else ""
            text += f"\nmemory: PP rank {fullest} is fullest, {self.rank_memory[fullest]:.6g}{limit}"
        return text

    def svg(self) -> str:
        """An SVG document: a bar per stage, stacked by kind of layer; with memory figures, a bar per rank."""
        return _draw(
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

    ``limit``: memory of a rank, or one number per pp rank; only shown beside the memory. Others are as in `balance`.

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
    ends = list(itertools.accumulate(len(stage) for stage in layout.stages))
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


def _draw(
    names: Sequence[str],
    costs: Sequence[Mapping[str, float]],
    *,
    title: str,
    mean: float,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> str:
    """A bar per stage, stacked by kind of layer, with the mean; below it a bar per rank's memory, with the limits.

    ``names``: the layers of each stage in words, as tooltips. ``costs``: for each stage the cost per kind of layer.
    ``memory``: for each rank; None for no second panel.
    """
    kinds = list(dict.fromkeys(kind for stage in costs for kind in stage))
    others = [kind for kind in kinds if kind not in _COLORS]
    colors = _COLORS | {kind: _OTHER_COLORS[i % len(_OTHER_COLORS)] for i, kind in enumerate(others)}
    parts = [_text(_LEFT, 16, title, weight="bold")]
    for left, kind in zip(itertools.count(_LEFT, 110), kinds, strict=False):
        parts.append(f'<rect x="{left}" y="22" width="10" height="10" fill="{colors[kind]}"/>')
        parts.append(_text(left + 14, 31, kind))
    totals = [sum(stage.values()) for stage in costs]
    scale = _HEIGHT / (max(totals) or 1)
    step = _WIDTH / len(costs)
    for stage, by_kind in enumerate(costs):
        top = float(_TOP + _HEIGHT)
        bars = []
        for kind, cost in by_kind.items():
            top -= cost * scale
            bars.append(_bar(_LEFT + stage * step, top, step, cost * scale, colors[kind]))
        label = f"stage {stage}: {names[stage]}, cost {totals[stage]:.6g}"
        parts.append(f"<g><title>{escape(label)}</title>{''.join(bars)}</g>")
    parts += _axis(_TOP, "stage", len(costs), f"{max(totals):.4g}")
    level, right = _TOP + _HEIGHT - mean * scale, _LEFT + _WIDTH
    parts.append(f'<path d="M{_LEFT} {level:.2f}h{_WIDTH}" stroke="black" stroke-dasharray="6 4"/>')
    parts.append(_text(right + 6, level + 4, f"mean {mean:.4g}"))
    height = _TOP + _HEIGHT + _BELOW
    if memory is not None:
        parts += _memory_panel(height, memory, limits)
        height += _HEIGHT + _BELOW + _TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _memory_panel(top: float, memory: Sequence[float], limits: Sequence[float] | None) -> list[str]:
    scale = _HEIGHT / (max([*memory, *(limits or ())]) or 1)
    step = _WIDTH / len(memory)
    top += _TOP
    parts = []
    for rank, used in enumerate(memory):
        left = _LEFT + rank * step
        bar = _bar(left, top + _HEIGHT - used * scale, step, used * scale, "#9aa7b1")
        label = f"PP rank {rank}: memory {used:.6g}"
        if limits is not None:
            label += f" of {limits[rank]:.6g}"
            height = top + _HEIGHT - limits[rank] * scale
            bar += f'<path d="M{left:.2f} {height:.2f}h{step:.2f}" stroke="#b22222" stroke-width="2"/>'
        parts.append(f"<g><title>{escape(label)}</title>{bar}</g>")
    heading = "memory of each PP rank" + ("" if limits is None else ", and its limit")
    parts.append(_text(_LEFT, top - 8, heading))
    return [*parts, *_axis(top, "PP rank", len(memory), f"{_HEIGHT / scale:.4g}")]


def _bar(left: float, top: float, step: float, height: float, color: str) -> str:
    gap = min(2.0, step / 8)
    place = f'x="{left + gap / 2:.2f}" y="{top:.2f}" width="{step - gap:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{color}"/>'


def _axis(top: float, name: str, count: int, largest: str) -> list[str]:
    """The base line with the first and the last index, and the value at the top."""
    base = top + _HEIGHT
    return [
        f'<path d="M{_LEFT} {base}h{_WIDTH}" stroke="black"/>',
        _text(_LEFT, base + 16, f"{name} 0"),
        _text(_LEFT + _WIDTH, base + 16, str(count - 1), anchor="end"),
        _text(_LEFT - 6, top + 10, largest, anchor="end"),
    ]


def _text(left: float, top: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{left:.2f}" y="{top:.2f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
