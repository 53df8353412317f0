"""Random plans with routes: uneven replicas, moved units, dead actors, skipped modules, calls of several units."""

import random

from attrs import evolve

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import Actor, PlanError, Routes, lower, multi_module_1f1b, routed
from pipegrid.plans.plan import check_routes
from plan_kit.plans import GENERATORS

CHAINS = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v", "u_shape", "forward_only")


def fits(routes, plan):
    """Whether the routes fit the graph and the placement of ``plan``."""
    try:
        check_routes(routes, plan.graph, plan.placement, forward_only=plan.forward_only)
    except PlanError:
        return False
    return True


def random_routes(plan, rng, *, replicas=3):
    """Routes that fit ``plan``, a schedule of one replica."""
    graph, count = plan.graph, rng.randint(1, replicas)
    units = [rng.randint(0, plan.num_microbatches) for _ in range(count)]
    units[rng.randrange(count)] = plan.num_microbatches
    routes = Routes(units)
    for name in graph.order:
        if rng.random() < 0.3 and fits(more := evolve(routes, every={**dict(routes.every), name: 2}), plan):
            routes = more
    for unit in range(routes.num_units):
        skipped = {name for name in graph.order if rng.random() < 0.25}
        for name in reversed(graph.order):
            after = {destination for source, destination in graph.edges if source == name}
            skipped |= {name} if after and after <= skipped else set()
        skips = dict(routes.skips) | {name: {*dict(routes.skips).get(name, ()), unit} for name in skipped}
        if fits(more := evolve(routes, skips=skips), plan):
            routes = more
    dead = {Actor(rng.randrange(plan.num_positions), rng.randrange(count)) for _ in range(rng.choice((0, 0, 1, 2)))}
    share = rng.choice((0, 0, 0.2, 0.6))
    moves = {}
    for stage, places in enumerate(plan.placement):
        living = [r for r in range(count) if not any(Actor(place, r) in dead for place in places)]
        if not living:
            return routes
        for call in routes.calls(graph.module_of(stage)[0]):
            if routes.home(call) not in living or rng.random() < share:
                moves[call, stage] = rng.choice(living)
    routes = evolve(routes, moves=moves, dead=dead)
    assert fits(routes, plan)
    return routes


def random_schedule(rng, *, most_microbatches=3):
    """A schedule of one replica: a named one, or 1F1B over a small graph with colocated and frozen modules."""
    microbatches = rng.randint(1, most_microbatches)
    if rng.random() < 0.4:
        return GENERATORS[rng.choice(CHAINS)](rng.randint(1, 3), microbatches)
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    edges = [(one, other) for i, one in enumerate(names) for other in names[i + 1 :] if rng.random() < 0.7]
    graph = ModuleGraph([(name, rng.randint(1, 2)) for name in names], edges)
    positions = rng.randint(1, min(3, graph.num_stages))
    placement = [
        rng.sample(range(positions), rng.choice((1, 1, 1, min(2, positions)))) for _ in range(graph.num_stages)
    ]
    held = [[stage for stage, places in enumerate(placement) if p in places] for p in range(positions)]
    placement = [[p for p in places if held.index(held[p]) == p] for places in placement]  # no two positions alike
    first = graph.order[0]
    frozen = [first] if rng.random() < 0.2 and not any(destination == first for _, destination in edges) else []
    return multi_module_1f1b(graph, microbatches, placement=placement, forward_only=frozen)


def random_routed(seed, *, replicas=3, most_microbatches=3):
    """A routed plan of computes, and arguments for `lower`."""
    rng = random.Random(seed)
    while True:
        plan = random_schedule(rng, most_microbatches=most_microbatches)
        routes = random_routes(plan, rng, replicas=replicas)
        if not routes.is_identity:
            break
    options = {"receives": rng.choice(["late", "early"])}
    trained = [stage for stage in range(plan.num_stages) if stage not in plan.forward_only]
    if trained and rng.random() < 0.3:
        options["tied"] = {"tied": rng.sample(trained, min(2, len(trained)))}
    return routed(plan, routes), options


def lowered_routed(seed, **sizes):
    """`random_routed`, lowered."""
    plan, options = random_routed(seed, **sizes)
    return lower(plan, **options)
