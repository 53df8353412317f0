"""The search: candidates in the order of a lower bound of their step time, the first of them simulated.

A heap holds arrangements with the bound of their work and candidates with that of their stages. The bounds are true, so
the search may end where the next is no better than the last of the best: what is left cannot enter the list.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Annotated, TypeAlias

from attrs import define, evolve, field, frozen

from pipegrid.core.fields import Amount, Count, checked_arguments, instance
from pipegrid.planner.choice import Candidate, Choice, GivenChoice, in_flight
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.grids import Arrangement, GridPart, arrangements
from pipegrid.planner.job import GivenBytes, Job
from pipegrid.planner.model import CostModel
from pipegrid.planner.stages import PlacedGraph, Shape
from pipegrid.plans import SCHEDULES, Plan, PlanError, fitting_schedules, lower, stage_places, verify
from pipegrid.plans.verify import Proof
from pipegrid.search import search

BEST = 10  # choices in the result
MOST_SAMPLES = 4  # samples of a microbatch per replica, at most
MOST_MICROBATCHES = 65_536  # microbatches of a step, at most
_places = cache(stage_places)


@frozen
class Planned:
    """The best choices of a job, fastest first.

    Attributes:
        job: that was planned.
        gpus: of the job, at most.
        memory: of a GPU, in bytes.
        choices: the best, fastest first.
        proof: of the winner, lowered.
        simulated: number of simulated candidates.
        complete: no other candidate is faster than the last of ``choices`` (or there are no others).
        bound: seconds; no other candidate is faster, where the limit ended the search.
    """

    job: Job = field(repr=False)
    gpus: int
    memory: float
    choices: tuple[Choice, ...]
    proof: Proof = field(repr=False)
    simulated: int
    complete: bool
    bound: float

    @property
    def winner(self) -> Choice:
        """The choice with the shortest step."""
        return self.choices[0]


GivenJob: TypeAlias = Annotated[Job, instance(Job, "a Job, such as read_job(path) or parse_job(text)")]


@checked_arguments(JobError)
def plan(job: GivenJob, *, gpus: Count, memory: GivenBytes | None = None, limit: Count = 200) -> Planned:
    """The best grids, layout, schedule and microbatch size of ``job`` on at most ``gpus`` GPUs.

    Args:
        job: to plan.
        gpus: GPUs there are.
        memory: bytes of a GPU, or a text such as ``"80GB"``; by default the job's own.
        limit: candidates that are simulated at most.

    Raises:
        NoFitError: no candidate keeps to the GPUs, the batch or the memory; with the nearest that does.
        JobError: no job, or no memory, here or in the job.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB")
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=Network("450GB", "50GB"))
        >>> planned = plan(job, gpus=4, limit=20)
        >>> planned.winner.schedule
        '1f1b'
    """
    capacity = job.device.memory if memory is None else memory
    if capacity is None:
        raise JobError("device.memory is missing; give it in the job, or memory=")
    return _JobSearch(CostModel(job), gpus, float(capacity), limit).run()


@define
class _JobSearch:
    model: CostModel
    gpus: int
    capacity: float
    limit: int
    plans: dict[tuple[PlacedGraph, str, int], tuple[Plan, tuple[int, ...]] | None] = field(factory=dict)

    def run(self) -> Planned:
        serial = itertools.count()
        heap: list[tuple[float, int, Arrangement | Candidate]] = [
            (self.model.least_seconds(arrangement), next(serial), arrangement)
            for arrangement in arrangements(self.model.job, self.gpus)
            if self.model.least_memory(arrangement) <= self.capacity
        ]
        heapq.heapify(heap)
        best: list[Choice] = []
        simulated, bound, complete = 0, 0.0, True
        while heap:
            bound, _, entry = heapq.heappop(heap)
            if len(best) == BEST and bound >= best[-1].step:
                break
            if isinstance(entry, Arrangement):
                for candidate in self.candidates(entry):
                    heapq.heappush(heap, (candidate.least_seconds(), next(serial), candidate))
                continue
            if best and simulated >= self.limit:
                complete = False
                break
            choice = self._fitting(entry)
            if choice is not None:
                simulated += 1
                best = sorted([*best, choice], key=lambda one: one.step)[:BEST]
        if not best:
            raise self._no_fit()
        proof = verify(lower(best[0].plan, collectives=best[0].shape.collectives))
        bound = best[-1].step if complete else bound
        return Planned(self.model.job, self.gpus, self.capacity, tuple(best), proof, simulated, complete, bound)

    def candidates(self, arrangement: Arrangement) -> Iterator[Candidate]:
        """The candidates of an arrangement: microbatch sizes that all dp divide, and schedules that fit."""
        replicas, batch = math.lcm(*(part.dp for part in arrangement.parts)), self.model.job.global_batch
        sizes = self.model.job.training.microbatch or [replicas * size for size in range(1, MOST_SAMPLES + 1)]
        sizes = [
            size for size in sizes if size % replicas == 0 and batch % size == 0 and batch // size <= MOST_MICROBATCHES
        ]
        shapes: dict[tuple[int, ...], Shape] = {}
        for schedule, places in self._schedules(arrangement.parts[-1]) if sizes else ():
            if places not in shapes:
                shapes[places] = Shape(self.model, arrangement, places)
            yield from (Candidate(shapes[places], schedule, size) for size in sizes)

    def _schedules(self, main: GridPart) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The schedules of the module with the loss, and the places of its stages."""
        training = self.model.job.training
        allowed = set(training.schedules)
        if main.pp == 1 or len(self.model.job.graph.sinks) > 1:
            yield "1f1b", tuple(range(main.pp))
            return
        for chunks in sorted({1, 2, *training.chunks}):
            if main.pp * chunks > len(self.model.job.module(main.module).each):
                continue
            for name in fitting_schedules(chunks):
                known = SCHEDULES[name].chunks
                if name in allowed and (known == chunks or (known is None and chunks in training.chunks)):
                    yield name, _places(name, main.pp, chunks)

    def planned(self, candidate: Candidate) -> tuple[Plan, tuple[int, ...]] | None:
        """The plan of a candidate and its microbatches in flight; None where the schedule is not for it."""
        key = (candidate.shape.placed, candidate.schedule, candidate.microbatch)
        if key not in self.plans:
            try:
                made = candidate.named_plan()
            except PlanError:
                self.plans[key] = None
            else:
                self.plans[key] = made, in_flight(made)
        return self.plans[key]

    def _fitting(self, candidate: Candidate) -> Choice | None:
        """The choice, where the memory holds it; with one stage per position, also by a layout under the limit."""
        live = candidate.least_in_flight()
        if candidate.least_memory(live) > self.capacity:
            leaner = self._leaner(candidate, live, 0.0)
            if leaner is None:
                return None
            candidate = leaner
        found = self.planned(candidate)
        if found is None:
            return None
        made, live = found
        if candidate.least_memory(live) <= self.capacity:
            choice = candidate.cost(made)
            if choice.peak <= self.capacity:
                return choice
        leaner = self._leaner(candidate, live, max(candidate.communicators(made)))
        if leaner is None:
            return None
        choice = leaner.cost(made)
        return choice if choice.peak <= self.capacity else None

    def _leaner(self, candidate: Candidate, live: tuple[int, ...], buffers: float) -> Candidate | None:
        """The candidate with the best layouts that keep to the memory, where each stage has a position of its own."""
        shape, room = candidate.shape, self.capacity - self.model.job.device.reserved - buffers
        if shape.chunks > 1 or shape.arrangement.colocated or room <= 0:
            return None
        layouts, first = [], 0
        for part in shape.parts:
            own = live[first : (first := first + part.pp)]
            peaks = tuple(peak * (candidate.microbatch // part.dp) for peak in own)
            layout = self.model.layout_within(part, room, peaks)
            if layout is None:
                return None
            layouts.append(layout)
        return evolve(candidate, shape=evolve(shape, layouts=tuple(layouts)))

    def _leanest(self) -> Choice | None:
        """The candidate that needs the least memory; None where no schedule and microbatch size is for any grids."""
        least, leanest = math.inf, None
        for arrangement in sorted(arrangements(self.model.job, self.gpus), key=self.model.least_memory):
            if self.model.least_memory(arrangement) >= least:
                break
            for candidate in self.candidates(arrangement):
                found = self.planned(candidate)
                if found is not None and candidate.least_memory(found[1]) < least:
                    choice = candidate.cost(found[0])
                    if choice.peak < least:
                        least, leanest = choice.peak, choice
        return leanest

    def _no_fit(self) -> NoFitError:
        """The bound that fails, and the nearest value that fits."""
        if not any(True for _ in arrangements(self.model.job, self.gpus)):
            return self._too_few()
        leanest = self._leanest()
        if leanest is None:
            return NoFitError(
                f"global_batch: no microbatch size of {self.model.job.global_batch} samples suits a grid and a "
                f"schedule on {self.gpus} GPUs with at most {MOST_MICROBATCHES} microbatches; allow smaller dp, other "
                "schedules or other sizes"
            )
        need = math.ceil(leanest.peak / 1e8) / 10
        full = max(leanest.memory, key=lambda memory: memory.total)
        return NoFitError(
            f"memory is {self.capacity / 1e9:.6g} GB per GPU; on {self.gpus} GPUs the choice that needs the least "
            f"takes {need:.6g} GB ({leanest.arrangement}, {leanest.schedule}: parameters, gradients and "
            f"optimizer {(full.parameters + full.gradients + full.optimizer) / 1e9:.3g}, activations "
            f"{full.activations / 1e9:.3g}): give {need:.6g} GB, or more GPUs",
            memory=leanest.peak,
        )

    def _too_few(self) -> NoFitError:
        gpus = self.gpus
        while gpus < self.gpus * 4096:
            gpus *= 2
            fitting = [arrangement.gpus for arrangement in arrangements(self.model.job, gpus)]
            if fitting:
                return NoFitError(f"gpus is {self.gpus}; the smallest grids that the modules allow take {min(fitting)}")
        return NoFitError(
            "modules: no grids at all: their tp, cp, dp, pp and placing allow none, or no dp divides global_batch"
        )


@checked_arguments(JobError)
def refined(choice: GivenChoice, *, memory: Amount, ahead: Count | None = None, effort: Amount = 1.0) -> Choice:
    """``choice`` with the best plan of its grids, layouts and microbatch size that `search` finds, if one is shorter.

    Encoders, on the same ranks or on their own, fill the bubbles of the module with the loss; frozen ones run at most
    ``ahead`` microbatches ahead of it.

    Args:
        choice: of a `Planned`, such as its winner.
        memory: bytes of a GPU; activations get what the rest of the fullest position leaves.
        ahead: the most microbatches that a frozen module is ahead of those that it feeds; pass it to `lower` as well.
        effort: of the search.

    Examples:
        >>> module = ModuleCosts("language", [Layers("decoder", count=8, flops=1e12)], message="8MB", pp=[2])
        >>> job = Job([module], global_batch=16, device=Device(4e14, memory="80GB"), links=Network("450GB", "50GB"))
        >>> winner = plan(job, gpus=2, limit=20).winner
        >>> refined(winner, memory=80e9, effort=0.1).step <= winner.step
        True
    """
    named = choice.plan
    found = search(
        choice.costs,
        max(choice.simulation.peak(), min(memory - each.total + each.activations for each in choice.memory)),
        num_positions=named.num_positions,
        num_microbatches=named.num_microbatches,
        graph=named.graph,
        placement=named.placement,
        forward_only=[module.name for module in choice.shape.job.modules if module.frozen],
        ahead=ahead,
        effort=effort,
    )
    better = Candidate(choice.shape, "search", choice.microbatch).cost(found.plan)
    return better if better.step < choice.step and better.peak <= max(memory, choice.peak) else choice
