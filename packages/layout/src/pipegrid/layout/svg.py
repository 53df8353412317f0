"""The picture of a layout report: an SVG document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pipegrid.layout.grammar import LayerType

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


def draw(
    names: Sequence[str],
    costs: Sequence[Mapping[str, float]],
    *,
    title: str,
    mean: float,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> str:
    """A bar per stage, stacked by kind of layer, with the mean; below it a bar per rank's memory, with the limits.

    Args:
        names: the layers of each stage in words, as tooltips.
        costs: for each stage the cost per kind of layer.
        title: the heading.
        mean: mean cost of a stage.
        memory: for each rank; None for no second panel.
        limits: for each rank; None for no limits.
    """
    kinds = list(dict.fromkeys(kind for stage in costs for kind in stage))
    others = [kind for kind in kinds if kind not in _COLORS]
    colors = _COLORS | {kind: _OTHER_COLORS[i % len(_OTHER_COLORS)] for i, kind in enumerate(others)}
    parts = [_text(_LEFT, 16, title, weight="bold"), *_legend(kinds, colors)]
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
    parts += [*_axis(_TOP, "stage", len(costs), f"{max(totals):.4g}"), *_level(_TOP, mean * scale, f"mean {mean:.4g}")]
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
    return (
        f'<rect x="{left + gap / 2:.2f}" y="{top:.2f}" width="{step - gap:.2f}" height="{height:.2f}" fill="{color}"/>'
    )


def _axis(top: float, name: str, count: int, largest: str) -> list[str]:
    """The base line with the first and the last index, and the value at the top."""
    base = top + _HEIGHT
    return [
        f'<path d="M{_LEFT} {base}h{_WIDTH}" stroke="black"/>',
        _text(_LEFT, base + 16, f"{name} 0"),
        _text(_LEFT + _WIDTH, base + 16, str(count - 1), anchor="end"),
        _text(_LEFT - 6, top + 10, largest, anchor="end"),
    ]


def _level(top: float, height: float, label: str) -> list[str]:
    """A dashed line across the panel with its label on the right."""
    at = top + _HEIGHT - height
    return [
        f'<path d="M{_LEFT} {at:.2f}h{_WIDTH}" stroke="black" stroke-dasharray="6 4"/>',
        _text(_LEFT + _WIDTH + 6, at + 4, label),
    ]


def _legend(kinds: Sequence[str], colors: Mapping[str, str]) -> list[str]:
    parts = []
    for index, kind in enumerate(kinds):
        left = _LEFT + index * 110
        parts.append(f'<rect x="{left}" y="22" width="10" height="10" fill="{colors[kind]}"/>')
        parts.append(_text(left + 14, 31, kind))
    return parts


def _text(left: float, top: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{left:.2f}" y="{top:.2f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
