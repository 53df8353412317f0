"""Draw the packages and what each needs, from their metadata: `python tools/draw_packages.py`.

The picture is committed; tools/tests/test_draw_packages.py holds it to what this script draws. An arrow that others
imply is left out. A dark box needs torch by its metadata, or by that of what it needs; a light one installs without.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 108, 30, 132, 74, 16

Needs = Mapping[str, frozenset[str]]


@cache
def metadata() -> dict[str, list[str]]:
    """The requirements of each package."""
    paths = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return {path.parent.name: tomllib.loads(path.read_text())["project"]["dependencies"] for path in paths}


def needs() -> dict[str, frozenset[str]]:
    """The packages of this repository that each one declares."""
    found = {name: (re.match(r"pipegrid-(\w+)", one) for one in declared) for name, declared in metadata().items()}
    return {name: frozenset(match[1] for match in matches if match) for name, matches in found.items()}


def all_needs(name: str, direct: Needs) -> frozenset[str]:
    """What a package needs, directly or not."""
    return direct[name].union(*(all_needs(one, direct) for one in direct[name]))


def arrows(direct: Needs) -> list[tuple[str, str]]:
    """From a package to what it needs, without those that another need implies."""
    return [
        (name, one)
        for name in sorted(direct)
        for one in sorted(direct[name])
        if not any(one in all_needs(other, direct) for other in direct[name] - {one})
    ]


def heights(direct: Needs) -> dict[str, int]:
    """The row of each package, from 0 at the bottom: one above the highest that it needs."""

    def height(name: str) -> int:
        return 1 + max(map(height, direct[name]), default=-1)

    return {name: height(name) for name in sorted(direct)}


def places(direct: Needs) -> dict[str, tuple[float, int]]:
    """The column and row of each package: a row is in the order of the mean column of what its packages need."""
    rows: dict[int, list[str]] = {}
    for name, row in heights(direct).items():
        rows.setdefault(row, []).append(name)
    widest = max(map(len, rows.values()))
    placed: dict[str, tuple[float, int]] = {}
    for row in sorted(rows):
        means = {
            name: sum(placed[one][0] for one in direct[name]) / len(direct[name]) if direct[name] else 0.0
            for name in rows[row]
        }
        ordered = sorted(rows[row], key=lambda name, means=means: (means[name], name))  # type: ignore[misc]
        for place, name in enumerate(ordered):
            placed[name] = (widest - len(ordered)) / 2 + place, row
    return placed


def svg() -> str:
    """The picture."""
    direct = needs()
    placed = places(direct)
    top = max(row for _, row in placed.values())
    torch = {name for name, declared in metadata().items() if any(re.match(r"torch\b", one) for one in declared)}
    width = max(column for column, _ in placed.values()) * ACROSS + WIDTH + 2 * MARGIN
    height = top * DOWN + HEIGHT + 2 * MARGIN

    def corner(name: str) -> tuple[float, float]:
        column, row = placed[name]
        return MARGIN + column * ACROSS, MARGIN + (top - row) * DOWN

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" text-anchor="middle">',
        "<style>text { font: 13px sans-serif }</style>",
        "<title>The packages: each needs those that its lines lead down to. Dark: with torch.</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for name, one in arrows(direct):
        (x1, y1), (x2, y2) = corner(name), corner(one)
        path = f"M{x1 + WIDTH / 2:g} {y1 + HEIGHT:g}C{x1 + WIDTH / 2:g} {y1 + DOWN:g} {x2 + WIDTH / 2:g} "
        path += f"{y2 - DOWN + HEIGHT:g} {x2 + WIDTH / 2:g} {y2:g}"
        lines.append(f'<path d="{path}" fill="none" stroke="#8a94a6"/>')
    for name in sorted(placed):
        x, y = corner(name)
        dark = name in torch or torch & all_needs(name, direct)
        box, text = ("#1f4e79", "#ffffff") if dark else ("#dfe9f3", "#10263b")
        lines.append(f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{box}"/>')
        lines.append(f'<text x="{x + WIDTH / 2:g}" y="{y + HEIGHT / 2 + 4.5:g}" fill="{text}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
