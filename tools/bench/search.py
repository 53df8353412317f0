"""How short the plans of `search` are, beside the authors' programs, the named schedules, and the optimum.

    python tools/bench/search.py [--effort 1] [--large]

Makespans in the unit of the costs; for the span, the share of it in which the busiest position waits. *Theirs*: what
the programs of arXiv 2405.15362 reach at the same peak (at half caps, its formula), and for ZB-2p the rate printed in
arXiv 2401.10241, table 5. *Optimum*: proved by a search of all orders. *Seconds* of this process's CPU. ``--large``:
64 positions x 256 microbatches x 2 chunks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from pipegrid.plans.generators import looped_placement, v_placement
from pipegrid.schedules import Costs, search
from pipegrid.search.candidates import named, problems

UNIT = Costs(F=1, I=1, W=1)
PROFILED = Costs(F=4959, I=5217, W=3519, latency=213)


def measured(forward: float, inputs: float, weights: float, hop: float, *, heads: int, hidden: int) -> Costs:
    """Costs of arXiv 2401.10241, table 9: of an activation, 34 + 5as/h bytes per token and hidden unit, W needs 32."""
    released = 1 - 32 / (34 + 5 * heads * 1024 / hidden)
    return Costs(F=forward, I=inputs, W=weights, latency=hop, input_release=released)


LARGER, LARGEST = {"heads": 40, "hidden": 5120}, {"heads": 48, "hidden": 6144}
ZB_2P = measured(18.522, 18.086, 9.337, 0.601, heads=24, hidden=2304)


@frozen
class Case:
    """A problem, and what its authors' program reaches (None: not known)."""

    name: str
    costs: Costs
    positions: int
    microbatches: int
    cap: float
    theirs: float | None
    chunks: int = 2
    span: bool = False
    either: bool = False  # placement: a V, or round by round


CASES = (
    Case("V, equal costs", UNIT, 4, 8, 3, 53),
    Case("V, equal costs", UNIT, 4, 12, 2.5, 80),
    Case("V, equal costs", UNIT, 6, 18, 3, 125),
    Case("V, equal costs", UNIT, 8, 24, 5, 161),
    Case("V, equal costs", UNIT, 8, 24, 4, 167),
    Case("V, equal costs", UNIT, 6, 18, 3.5, 122),
    Case("V, equal costs", UNIT, 6, 18, 4.5, 116),
    Case("V, equal costs", UNIT, 8, 24, 4.5, 164),
    Case("V, equal costs", UNIT, 8, 24, 5.5, 158),
    Case("  either placement", UNIT, 6, 18, 3.5, 122, either=True),
    Case("  either placement", UNIT, 6, 18, 4.5, 116, either=True),
    Case("  either placement", UNIT, 8, 24, 4.5, 164, either=True),
    Case("  either placement", UNIT, 8, 24, 5.5, 158, either=True),
    Case("V, profiled", PROFILED, 8, 24, 5, 769_413),
    Case("ZB-2p, bubble of span", ZB_2P, 8, 24, 16, 0.0433, chunks=1, span=True),
    Case("  14.6B", measured(11.325, 11.308, 8.109, 0.378, **LARGER), 16, 128, 32, 0.0028, chunks=1, span=True),
    Case("  28.3B", measured(10.419, 10.207, 7.715, 0.408, **LARGEST), 32, 96, 64, 0.0038, chunks=1, span=True),
    Case("  28.3B", measured(10.408, 10.204, 7.703, 0.408, **LARGEST), 32, 128, 64, 0.0029, chunks=1, span=True),
    Case("  28.3B", measured(10.402, 10.248, 7.698, 0.460, **LARGEST), 32, 256, 64, 0.0018, chunks=1, span=True),
    Case("  all live until W", evolve(ZB_2P, input_release=0), 8, 24, 16, None, chunks=1, span=True),
)
LARGE = (Case("V, equal costs", UNIT, 64, 256, 33, None), Case("V, profiled", PROFILED, 64, 256, 40, None))

HEADINGS = ("case", "P x m", "cap", "named", "theirs", "ours", "optimum", "from", "seconds")
WIDTHS = (22, 8, 5, 9, 9, 9, 9, 24, 8)


def solve(case: Case, effort: float) -> tuple[str, ...]:
    """The row of ``case``."""
    places = v_placement(case.positions) if case.chunks == 2 else looped_placement(case.positions, case.positions)
    sizes: dict[str, Any] = {
        "num_positions": case.positions,
        "num_microbatches": case.microbatches,
        "num_stages": case.chunks * case.positions,
        "placement": None if case.either else places,
    }
    work = sum(sum(case.costs.per_stage(kind, case.chunks)) for kind in ("F", "I", "W")) * case.microbatches

    def figure(makespan: float, span: float) -> float:
        return 1 - work / span if case.span else makespan

    tried = [entry for problem in problems(case.costs, case.cap, **sizes) for entry in named(problem)]
    best_named = min((figure(entry.makespan, entry.span) for entry in tried), default=None)
    begin = time.process_time()
    found = search(case.costs, case.cap, **sizes, objective="span" if case.span else "makespan", effort=effort)
    seconds = time.process_time() - begin
    ours = figure(found.makespan, found.span)

    def text(number: float | None) -> str:
        return "" if number is None else f"{number:.4f}" if case.span else f"{number:,.0f}"

    return (
        case.name,
        f"{case.positions} x {case.microbatches}",
        f"{case.cap:g}",
        text(best_named),
        text(case.theirs),
        text(ours),
        text(ours) if found.optimal else "",
        found.origin,
        f"{seconds:.1f}",
    )


def line(cells: Sequence[str]) -> str:
    """One row of the table."""
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--large", action="store_true", help="64 positions x 256 microbatches x 2 chunks instead")
    arguments = parser.parse_args()
    print(line(HEADINGS))
    for case in LARGE if arguments.large else CASES:
        print(line(solve(case, arguments.effort)), flush=True)


if __name__ == "__main__":
    main()
