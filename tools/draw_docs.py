"""Draw the timelines on the pages of docs/concepts: `python tools/draw_docs.py`.

The pictures are committed, so that the pages show them wherever they are read; tools/tests/test_draw_docs.py
holds them to what this script draws.
"""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import multi_module_1f1b, one_f_one_b, routed
from pipegrid.plans.generators.registry import find_schedule
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Actor, Routes
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from pipegrid.search.routed import reroute, schedule_routes
from pipegrid.timeline.sources import timeline
from pipegrid.timeline.svg import svg
from pipegrid.timeline.timeline import Timeline

FOLDER = Path(__file__).parents[1] / "docs" / "concepts" / "timelines"


def named(name: str, positions: int = 4, microbatches: int = 8, *, slices: int | None = None) -> Timeline:
    """A named schedule at unit costs."""
    drawn = timeline(find_schedule(name).plan(positions, microbatches, num_slices=slices))
    return evolve(drawn, title=f"{name}: {drawn.title}")


def modules() -> Timeline:
    """Two encoders of different depth that feed a language model, with messages that take time."""
    graph = ModuleGraph({"images": 2, "audio": 1, "language": 2}, {"images": ["language"], "audio": ["language"]})
    plan = lower(multi_module_1f1b(graph, 5), receives="early")
    simulation = simulate(plan, Costs(F=[1, 1, 1.5, 1.5, 1.5], latency=0.3))
    return timeline(simulation, title="multi_module_1f1b: two encoders feed a language model")


def planned_and_uneven() -> list[Timeline]:
    """One plan twice: as planned, and with a slow third stage, in seconds."""
    plan = lower(find_schedule("1f1b").plan(4, 6), receives="early")
    even = Costs(F=0.01, I=0.01, W=0.01)
    uneven = Costs(F=[0.01, 0.01, 0.015, 0.01], I=[0.01, 0.01, 0.015, 0.01], W=[0.01, 0.01, 0.015, 0.01], latency=0.002)
    return [
        timeline(simulate(plan, even), title="1f1b, as planned", unit="s"),
        timeline(simulate(plan, uneven), title="1f1b, stage 2 half as fast again, 2 ms per hop", unit="s"),
    ]


def routed_step() -> list[Timeline]:
    """One replica undisturbed, and three of which one has lost its second position."""
    home = one_f_one_b(3, 6)
    moves = {(6 + microbatch, 1): 2 * (microbatch % 2) for microbatch in range(6)}  # to replicas 0 and 2 in turn
    plan = routed(home, Routes([6, 6, 6], moves=moves, dead=[Actor(1, 1)]))
    return [
        timeline(home, title="1f1b: each of 3 replicas"),
        timeline(plan, title="without stage 1 of replica 1, whose units go to replicas 0 and 2"),
    ]


def without_a_rank() -> Timeline:
    """The step of three replicas around a dead rank of position 2, with room for two more microbatches."""
    routes = reroute(Routes.identity(3, 6), {2: [1]})
    step = schedule_routes(one_f_one_b(4, 6), routes, memory_limit=[6, 5, 4, 3])
    return timeline(step.plan, title="position 2 of replica 1 is dead: replicas 0 and 2 compute its units")


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    names = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "v_half", "u_shape")
    drawn = {name: svg(named(name)) for name in names}
    drawn["seq1f1b"] = svg(named("seq1f1b", microbatches=4, slices=4))
    drawn["modules"] = svg(modules(), arrows=True)
    drawn["planned-and-uneven"] = svg(planned_and_uneven())
    drawn["routes"] = svg(routed_step())
    drawn["every-rank-alive"] = svg(timeline(one_f_one_b(4, 6), title="1f1b: all three replicas alike"))
    drawn["without-a-rank"] = svg(without_a_rank())
    return {f"{name}.svg": text for name, text in drawn.items()}


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER.relative_to(Path(__file__).parents[1]) / name, f"{len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
