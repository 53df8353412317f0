"""What a run is, before its first step: the modules on their ranks, and the plan of a step. No torch."""

from __future__ import annotations

from digit_reader.modules import LANGUAGE
from digit_reader.options import Options
from pipegrid.bridges import positions_of
from pipegrid.schedules import Plan, ascii_timeline, schedule_for
from pipegrid.schedules import timeline as timeline_of
from pipegrid.topology import HyperCommGrid


def shape(options: Options) -> str:
    """A line for each module: its ranks, the sizes of its grid, and its layout."""
    grids = options.place()
    width = max(map(len, grids))
    return "\n".join(f"{name:{width}}  {_on_ranks(options, name, grid)}" for name, grid in grids.items())


def _on_ranks(options: Options, name: str, grid: HyperCommGrid) -> str:
    ranks = f"rank {grid.ranks[0]}" if len(grid.ranks) == 1 else f"ranks {grid.ranks[0]} to {grid.ranks[-1]}"
    sizes = ", ".join(f"{dim} {size}" for dim, size in options.grids[name].items() if size > 1)
    layout = f'layout "{options.layout}"' if name == LANGUAGE else ""
    return ", ".join(part for part in (ranks, sizes, layout) if part)


def plan_of_step(options: Options) -> Plan:
    """The computes of a step; the step function adds their messages."""
    graph, grids = options.modules(), options.place()
    places = {name: tuple(range(graph.depth(name))) for name in graph.order} | options.stage_placement()
    placement = positions_of(graph, grids, places).placement
    return schedule_for(graph, options.schedule, options.microbatches, placement=placement)


def opening(options: Options) -> str:
    """What a person reads first."""
    drawn = timeline_of(plan_of_step(options), title=f"The plan of a step, {options.schedule}:")
    following = f"Open {options.out / 'index.html'} in a browser: it follows the run.\n"
    return (
        f"{options.processes} processes learn to read strips of handwritten digits aloud, as one pipeline:\n\n"
        f"{shape(options)}\n\n{ascii_timeline(drawn, width=100)}\n"
        f"F forward, B backward (I and W its halves), then the microbatch; a dot is waiting.\n"
        f"{'' if options.check else following}"
    )
