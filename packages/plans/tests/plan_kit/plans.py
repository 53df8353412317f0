"""Plans that several test files ask for, and how many of them a property draws."""

import functools
import itertools
import random

from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    SCHEDULES,
    ActionKind,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    seq1f1b,
    seq1f1b_zero_bubble,
    u_shape,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

GENERATORS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "looped_bfs": looped_bfs,
    "forward_only": forward_only,
    "zero_bubble_h1": zero_bubble_h1,
    "zero_bubble_h2": zero_bubble_h2,
    "zero_bubble_v": zero_bubble_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "u_shape": u_shape,
    # As many slices as the others have microbatches.
    "seq1f1b": lambda p, m: seq1f1b(p, -(-m // 2), num_slices=2),
    "seq1f1b_zero_bubble": lambda p, m: seq1f1b_zero_bubble(p, -(-m // 2), num_slices=2),
}


@functools.cache
def lowered(name, num_positions, num_microbatches):
    """The plan of one of `GENERATORS`, lowered."""
    return lower(GENERATORS[name](num_positions, num_microbatches))


def compute_plans(num_positions, num_microbatches):
    """Every named schedule's plan: 1 to 3 chunks where it takes any, 2 slices where it cuts; as (name, plan)."""
    for schedule in SCHEDULES.values():
        for chunks in (1, 2, 3) if schedule.chunks is None else (schedule.chunks,):
            slices = 2 if schedule.sliced else None
            yield (
                f"{schedule.name} with {chunks} chunks",
                schedule.plan(num_positions, num_microbatches, chunks, num_slices=slices),
            )


def in_halves(plan):
    """A plan of computes with each backward in its two halves, the second right after the first."""
    halves = {ActionKind.B: (ActionKind.I, ActionKind.W)}
    rows = [
        [evolve(action, kind=kind) for action in actions for kind in halves.get(action.kind, (action.kind,))]
        for actions in plan.positions
    ]
    return evolve(plan, positions=rows)


def examples(day, night):
    """The settings of a property that draws so many examples in every run, and in those of the nights."""
    return settings(max_examples=night if settings.get_current_profile_name() == "night" else day)


LETTERS = st.sampled_from("abcde")


@st.composite
def module_graphs(draw, names=LETTERS, *, most=5, depth=3):
    """Graphs of up to ``most`` modules of depths 1..``depth``, with any edges from earlier to later ones."""
    chosen = draw(st.lists(names, min_size=1, max_size=most, unique=True))
    pairs = list(itertools.combinations(chosen, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return ModuleGraph([(name, draw(st.integers(1, depth))) for name in chosen], edges)


def random_module_plan(seed):
    """1F1B over a random graph of up to 5 modules of depths 1..4, some of them colocated, lowered; or not.

    Returns the plan of computes and the arguments for `lower`.
    """
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(rng.randint(1, 5))]
    edges = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if rng.random() < 0.5]
    declared = rng.sample(names, len(names))
    graph = ModuleGraph([(name, rng.randint(1, 4)) for name in declared], edges)
    positions = rng.randint(1, graph.num_stages)
    most = min(3, positions)
    placement = [
        tuple(rng.sample(range(positions), rng.choice([1, 1, 1, 2, 3][: most + 2]))) for _ in range(graph.num_stages)
    ]
    held = [[stage for stage, places in enumerate(placement) if p in places] for p in range(positions)]
    placement = [[p for p in places if held.index(held[p]) == p] for places in placement]  # no two positions alike
    plan = multi_module_1f1b(graph, rng.randint(1, 6), placement=placement)
    options = {
        "receives": rng.choice(["late", "early"]),
        "collectives": {
            edge: f"bridge{edge.source}-{edge.destination}" for edge in graph.stage_edges if rng.random() < 0.2
        },
        "tied": {"tied": rng.sample(range(graph.num_stages), min(2, graph.num_stages))},
    }
    return plan, options if rng.random() < 0.7 else {}
