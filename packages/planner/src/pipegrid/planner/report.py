"""The result of a search as a table, as an explanation and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from attrs import astuple, fields

from pipegrid.core.tables import table, text_table
from pipegrid.planner.choice import Choice, Memory, in_flight
from pipegrid.planner.search import Planned
from pipegrid.planner.survival import count_survivable, survivable_table
from pipegrid.planner.what_if import WhatIf
from pipegrid.timeline import position_name, time_text

_SAME = 1e-9  # a smaller share of a step is the rounding of a sum
HEADINGS = ("GPUs", "schedule", "microbatch", "step", "bubble", "gradients", "memory")


def results_table(planned: Planned, *, terminal: bool = False) -> str:
    """The best choices; ``terminal``: drawn by rich where it is installed."""
    cells = []
    for place, choice in enumerate(planned.choices, 1):
        schedule = choice.schedule + (f" ({choice.shape.chunks} chunks)" if choice.shape.chunks > 1 else "")
        chosen = str(choice.arrangement), str(choice.arrangement.gpus), schedule, str(choice.microbatch)
        seconds, gradients = time_text(choice.step, "s"), time_text(choice.reduction, "s")
        figures = seconds, f"{100 * choice.bubble:.1f}%", gradients, f"{choice.peak / 1e9:.1f} GB"
        cells.append((str(place), *chosen, *figures))
    right = (0, 2, 4, 5, 6, 7, 8)
    names = ", ".join(part.module for part in planned.winner.arrangement.parts)
    shared = " (&: on the same ranks)" if any(choice.arrangement.colocated for choice in planned.choices) else ""
    headings = ("", f"grids: {names}{shared}", *HEADINGS)
    drawn = table(headings, cells, right=right, color=True) if terminal else text_table(headings, cells, right=right)
    return f"{drawn}\n"


def why_slower(winner: Choice, other: Choice) -> str:
    """The difference of the two steps, in words: computes of the busiest position, waiting, sums of gradients."""
    parts = (
        (other.busy - winner.busy, "computes of the busiest position"),
        ((other.makespan - other.busy) - (winner.makespan - winner.busy), "waiting"),
        (other.reduction - winner.reduction, "sums of gradients"),
    )
    texts = [
        f"{'+' if change > 0 else '-'}{time_text(abs(change), 's')} {what}"
        for change, what in parts
        if abs(change) > _SAME * winner.step
    ]
    if not texts:
        return "as fast; it was found later"
    share = f" ({100 * (other.step / winner.step - 1):.2g}%)" if winner.step else ""
    return f"{time_text(other.step - winner.step, 's')}{share} longer: {', '.join(texts)}"


def explanation(planned: Planned) -> str:
    """The winner's layouts and memory, why the others lost, and how far the search went."""
    winner, grids = planned.winner, planned.winner.arrangement.grids
    lines = [f"{module}: {grids[module]}, layout {layout}" for module, layout in winner.layouts.items()]
    rows = []
    for position, memory in enumerate(winner.memory):
        sizes = [f"{part / 1e9:.2f}" for part in (*astuple(memory), memory.total)]
        rows.append((position_name(winner.plan, position), *sizes))
    names = ("position", *(part.name for part in fields(Memory)), "total GB")
    lines += ["", text_table(names, rows, right=range(1, len(names))), "", *_losers(planned), _extent(planned)]
    return "\n".join([*lines, str(planned.proof), survival(winner, planned.memory)]) + "\n"


def _losers(planned: Planned) -> list[str]:
    return [f"{place}: {why_slower(planned.winner, other)}" for place, other in enumerate(planned.choices[1:], 2)]


def summary(planned: Planned) -> str:
    """The reasons why the runner-up lost, the extent of the search, and the deaths that the winner survives."""
    return "\n".join([*_losers(planned)[:1], _extent(planned), survival(planned.winner, planned.memory)]) + "\n"


def _extent(planned: Planned) -> str:
    limit = f", the limit; none of the others is faster than {time_text(planned.bound, 's')}"
    none_left = "; no other is faster than the last of these"
    return f"{planned.simulated} candidates simulated{none_left if planned.complete else limit}"


def survival(choice: Choice, memory: float) -> str:
    """Deaths after which others have all state and can take over the work, and the memory that this needs."""
    shape, grids = choice.shape, choice.arrangement.grids
    sharding = shape.job.training.sharding
    divided = sharding != "none"
    count = partial(count_survivable, grids, sharding=sharding, buddy=divided)
    gpus, nodes = count(unit=1), count(unit=shape.job.links.gpus_per_node)
    if not gpus.survived:
        return "survivable: no death of a GPU, its work or its state is on no other"
    text = f"survivable: {gpus} of GPUs; {nodes} of nodes"
    if divided:
        host = max(part.optimizer for part in choice.memory)
        text = (
            "survivable: no death of a GPU, whose optimizer states are sharded over replicas and come from the "
            f"checkpoint; with copies on a buddy's host ({host / 1e9:.1f} GB for each GPU), which pipegrid.survive "
            f"does not keep, {gpus} of GPUs; {nodes} of nodes"
        )
    free = [memory - taken.total for taken in choice.memory]
    more, position, room = max(_rooms(choice), key=lambda row: row[-1] - free[row[1]])
    sources = survivable_table(grids, sharding=sharding)
    return (
        f"{text}\n{sources}\none death needs room for up to {more} more microbatches on position {position} "
        f"({room / 1e9:.1f} GB of {free[position] / 1e9:.1f} GB free)\n"
        "a prediction: pipegrid.survive goes on where modules have equal dp and whole replicas, on gloo; others "
        "restart from a checkpoint"
    )


def _rooms(choice: Choice) -> Iterator[tuple[int, int, float]]:
    """The microbatches of a dead replica that a peer holds beside its own, the position, and their bytes, by position.

    The dead replica's microbatches in flight are shared by the replicas that are left.
    """
    live, stages = in_flight(choice.plan), choice.shape.stages
    for position, held in enumerate(choice.shape.placed.held):
        shares = {s: -(-live[s] // (stages[s].part.dp - 1)) for s in held if stages[s].part.dp > 1}
        bytes_more = sum(more * stages[s].activations * choice.microbatch for s, more in shares.items())
        yield max(shares.values(), default=0), position, bytes_more


def refinement(choice: Choice, better: Choice) -> str:
    """The gain of a search of the plan, in words."""
    if better is choice:
        return f"search: no plan shorter than that of {choice.schedule} found"
    gain = f"{100 * (1 - better.step / choice.step):.1f}% shorter than {choice.schedule}"
    figures = f"bubble {100 * better.bubble:.1f}%, memory {better.peak / 1e9:.1f} GB"
    return f"search: step {time_text(better.step, 's')}, {gain}; {figures}"


def what_if_table(found: WhatIf) -> str:
    """The recorded step, its simulation, and the other plan's."""
    unit = "bytes" if found.other.costs.activation is not None else "microbatches"
    rows = [("recorded", time_text(found.measured, "s"), "", "", "")]
    for name, simulation in (("recorded, simulated", found.reproduced), ("predicted", found.other)):
        off = f"{100 * (simulation.makespan / found.measured - 1):+.1f}%"
        peak = f"{simulation.peak():.4g}"
        rows.append((name, time_text(simulation.makespan, "s"), off, f"{100 * simulation.bubble():.1f}%", peak))
    drawn = text_table(("step", "time", "change", "bubble", f"peak {unit}"), rows, right=(1, 2, 3, 4)) + "\n"
    if found.gathers:
        drawn += (
            f"The recorded plan gathers parameters {found.gathers} times. Recordings do not measure gathers: neither "
            "simulation has their time, nor the memory of gathered parameters.\n"
        )
    return drawn


def to_json(planned: Planned, searched: Choice | None = None) -> str:
    """The choices as JSON: grids, layouts, schedule, microbatch, seconds and bytes; ``searched``: of `refined`."""
    data = {name: getattr(planned, name) for name in ("gpus", "memory", "simulated", "complete")}
    data["choices"] = [_as_data(choice) for choice in planned.choices]
    if searched is not None:
        data["searched"] = _as_data(searched)
    return json.dumps(data, indent=2)


def _as_data(choice: Choice) -> dict[str, Any]:
    arrangement, modules = choice.arrangement, {}
    for part in arrangement.parts:
        first, layout = arrangement.grids[part.module].rank_offset, choice.layouts[part.module]
        modules[part.module] = {**part.sizes, "first_rank": first, "layout": layout}
    return {
        "modules": modules,
        "gpus": arrangement.gpus,
        "colocated": arrangement.colocated,
        "schedule": choice.schedule,
        "microbatch": choice.microbatch,
        "step": choice.step,
        "makespan": choice.makespan,
        "gradients": choice.reduction,
        "bubble": choice.bubble,
        "memory": [memory.total for memory in choice.memory],
    }
