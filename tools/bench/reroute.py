"""How short the steps around dead ranks are, beside a lower bound of all routes and all orders.

    python tools/bench/reroute.py [--cases 200] [--seed 0] [--quick]

Every case of ReCycle's example (4 stages, 4 replicas, 12 microbatches: no death, one at each stage, the five of the
paper), then random ones: 2 to 8 stages, 2 to 8 replicas, 4 to 16 microbatches, one and two dead ranks. F = I = W = 1.
*Room*: the units that an actor holds beyond its peak in 1F1B (all: as many as it likes). Then the planning times with
room for 4, in seconds of this process's CPU: routes and schedule (with the bound), lowering, proof. ``--quick``: a few
cases; exits with 1 where a step of ReCycle's example with room for 2 is more than 3% above its bound.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from attrs import frozen

from pipegrid.plans.generators import one_f_one_b
from pipegrid.plans.plan import Actor, Routes
from pipegrid.schedules import lower, verify
from pipegrid.search.routed import RoutedStep, reroute, schedule_routes

ROOMS = (0, 2, 4, None)
GAP = 0.03
SIZES = ((4, 4, 12), (8, 8, 16), (64, 8, 64))


@frozen
class Case:
    """Stages, replicas, microbatches, and the dead actors."""

    stages: int
    replicas: int
    microbatches: int
    dead: tuple[Actor, ...]

    def __str__(self) -> str:
        return f"{self.stages} x {self.replicas} x {self.microbatches}, {' '.join(map(str, self.dead)) or 'none'}"

    def step(self, room: int | None) -> RoutedStep:
        """The step with so much room."""
        routes = reroute(Routes.identity(self.replicas, self.microbatches), self.dead)
        peaks = [min(self.stages - place, self.microbatches) for place in range(self.stages)]
        limits = None if room is None else [peak + room for peak in peaks]
        return schedule_routes(one_f_one_b(self.stages, self.microbatches), routes, memory_limit=limits)


def recycle() -> Iterator[Case]:
    """The cases of ReCycle's example (Gandhi et al. 2024)."""
    all_dead = {0: [0], 1: [0, 1], 2: [2], 3: [3]}
    for dead in ({}, *({stage: [0]} for stage in range(4)), all_dead):
        yield Case(4, 4, 12, tuple([Actor(p, replica) for p, replicas in dead.items() for replica in replicas]))


def random_cases(seed: int) -> Iterator[Case]:
    """Cases without end, in which every stage has a living rank."""
    rng = random.Random(seed)
    while True:
        stages, replicas, microbatches = rng.randint(2, 8), rng.randint(2, 8), rng.randint(4, 16)
        places = {(rng.randrange(stages), rng.randrange(replicas)) for _ in range(rng.choice((1, 2)))}
        if all(any((stage, r) not in places for r in range(replicas)) for stage in range(stages)):
            yield Case(stages, replicas, microbatches, tuple(sorted(Actor(*place) for place in places)))


def gap(step: RoutedStep) -> float:
    """How far the step is above its bound."""
    return step.makespan / step.bound - 1


def show_recycle(rooms: Sequence[int | None]) -> bool:
    """A row per case of the example: found and bound by room; whether those with room for 2 are close."""
    print("ReCycle's example: found / bound")
    print(f"{'dead':<28}" + "".join(f"{f'room {room}' if room is not None else 'all':>12}" for room in rooms))
    close = True
    for case in recycle():
        steps = {room: case.step(room) for room in rooms}
        figures = [f"{step.makespan:g} / {step.bound:g}" for step in steps.values()]
        print(f"{' '.join(map(str, case.dead)) or 'none':<28}" + "".join(f"{figure:>12}" for figure in figures))
        close &= gap(steps[2]) <= GAP
    return close


def show_random(count: int, seed: int, rooms: Sequence[int | None]) -> None:
    """Per room, how many random cases are at the bound, within 3%, and beyond, with the worst of them."""
    print(f"\n{count} random cases (seed {seed})")
    print(f"{'room':<6}{'at bound':>10}{'within 3%':>11}{'beyond':>8}{'mean':>8}   farthest")
    drawn = random_cases(seed)
    cases = [next(drawn) for _ in range(count)]
    for room in rooms:
        steps = [(gap(step), case, step) for case in cases for step in (case.step(room),)]
        kinds = Counter("at bound" if far < 1e-9 else "within" if far <= GAP else "beyond" for far, *_ in steps)
        far, case, step = max(steps, key=lambda one: one[0])
        farthest = f"{100 * far:.1f}%: {step.makespan:g} / {step.bound:g} at {case}" if far else "none"
        mean = sum(one[0] for one in steps) / count
        print(
            f"{'all' if room is None else room!s:<6}{kinds['at bound']:>10}{kinds['within']:>11}{kinds['beyond']:>8}"
            f"{100 * mean:>7.2f}%   {farthest}",
            flush=True,
        )


def show_times(sizes: Sequence[tuple[int, int, int]]) -> None:
    """Planning times: one dead rank in the middle, and two."""
    print(f"\n{'planning, s':<40}{'schedule':>10}{'lower':>8}{'verify':>8}{'found':>8}{'bound':>8}")
    for stages, replicas, microbatches in sizes:
        for dead in ((Actor(stages // 2, 0),), (Actor(0, 0), Actor(stages - 1, 1))):
            case = Case(stages, replicas, microbatches, dead)
            times = [time.process_time()]
            step = case.step(4)
            times.append(time.process_time())
            plan = lower(step.plan, proved=True)
            times.append(time.process_time())
            verify(plan)
            times.append(time.process_time())
            schedule, lowering, proof = (end - begin for begin, end in pairwise(times))
            print(
                f"{case!s:<40}{schedule:>10.2f}{lowering:>8.2f}{proof:>8.2f}{step.makespan:>8g}{step.bound:>8g}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    rooms = (2, None) if options.quick else ROOMS
    close = show_recycle(rooms)
    show_random(min(options.cases, 5) if options.quick else options.cases, options.seed, rooms)
    show_times(SIZES[:1] if options.quick else SIZES)
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
