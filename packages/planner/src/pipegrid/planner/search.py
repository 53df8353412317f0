"""The search: candidates in the order of a lower bound of their step time, the first of them simulated.

A heap holds arrangements with the bound of their work and candidates with that of their stages. The bounds are true, so
the search may end where the next is no better than the last of the best: what is left cannot enter the list.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Annotated, TypeAlias

from attrs import define, field, frozen

from pipegrid.planner.choice import Arrangement, Choice, Shape, in_flight
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.job import GivenBytes, Job, Module
from pipegrid.planner.model import CostModel, Part
from pipegrid.schedules import SCHEDULES, ActionKind, Plan, PlanError, fitting_schedules, lower, verify
from pipegrid.schedules.generators import looped_placement, v_placement
from pipegrid.schedules.verify import Proof
from pipegrid.topology.fields import Count, checked_arguments, instance

BEST = 10
"""Choices in the result."""

MOST_SAMPLES = 4
"""Samples of a microbatch per data lane, at most."""

MOST_MICROBATCHES = 65_536
"""Microbatches of a step, at most."""

FEW = 16
"""Microbatches of the chains that tell memory before a plan is made, at most."""

_Candidate: TypeAlias = tuple[Shape, int, str]
"""A shape, the samples of a microbatch, the name of a schedule."""


@frozen
class Planned:
    """The best choices, fastest first. ``proof`` is that of the winner, lowered.

    ``simulated``: how many candidates were. ``complete``: no other candidate is faster than the last of ``choices``
    (or there are no others); where the limit ended the search, none is faster than ``bound`` seconds.
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
        job: what is trained.
        gpus: GPUs there are.
        memory: bytes of a GPU, or a text such as ``"80GB"``; by default the job's own.
        limit: candidates that are simulated at most.

    Raises:
        NoFitError: no candidate keeps to the GPUs, the batch or the memory; with the nearest that does.
        JobError: no job, or no memory, here or in the job.
    """
    capacity = job.device.memory if memory is None else memory
    if capacity is None:
        raise JobError("device.memory is missing; give it in the job, or memory=")
    return _Search(CostModel(job), gpus, float(capacity), limit).run()


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two, and three times those."""
    return sorted(
        {factor << power for power in range(most.bit_length()) for factor in (1, 3)} & set(range(1, most + 1))
    )


def _divisors(value: int, most: int) -> list[int]:
    return [size for size in range(1, min(value, most) + 1) if value % size == 0]


def parts_of(job: Job, module: Module, gpus: int) -> Iterator[Part]:
    """The grids of ``module`` with at most ``gpus`` ranks; its dp divides the global batch."""
    depth = len(module.each)
    dps = [dp for dp in module.dp or _divisors(job.global_batch, gpus) if job.global_batch % dp == 0]
    pps = [pp for pp in module.pp or _sizes(min(depth, gpus)) if pp <= depth]
    for tp, cp, dp, pp in itertools.product(module.tp, module.cp, dps, pps):
        if tp * cp * dp * pp <= gpus:
            yield Part(module.name, tp, cp, dp, pp)


def arrangements(job: Job, gpus: int) -> Iterator[Arrangement]:
    """Every grid of every module on at most ``gpus`` ranks: all modules apart, or all on the ranks of the last."""
    modules = [job.module(name) for name in job.graph.order]
    parts = [list(parts_of(job, module, gpus)) for module in modules]
    if all(module.placing != "colocated" for module in modules[:-1]):
        yield from (Arrangement(chosen) for chosen in _within(parts, gpus))
    if len(modules) > 1 and all(module.placing != "apart" for module in modules) and len(job.graph.sinks) == 1:
        for main in parts[-1]:
            others = [
                [part for part in options if part.ranks == main.ranks and part.pp in {1, main.pp}]
                for options in parts[:-1]
            ]
            for chosen in itertools.product(*others):
                yield Arrangement((*chosen, main), colocated=True)


def _within(parts: list[list[Part]], gpus: int) -> Iterator[tuple[Part, ...]]:
    if not parts:
        yield ()
        return
    for part in parts[0]:
        if part.ranks + len(parts) - 1 <= gpus:
            for rest in _within(parts[1:], gpus - part.ranks):
                yield (part, *rest)


@define
class _Search:
    model: CostModel
    gpus: int
    capacity: float
    limit: int
    plans: dict[object, tuple[Plan, tuple[int, ...]] | None] = field(factory=dict)
    splits: dict[str, bool] = field(factory=dict)
    chains: dict[object, tuple[int, ...]] = field(factory=dict)

    @property
    def job(self) -> Job:
        return self.model.job

    def run(self) -> Planned:
        serial = itertools.count()
        heap: list[tuple[float, int, Arrangement | _Candidate]] = [
            (self._work(arrangement), next(serial), arrangement)
            for arrangement in arrangements(self.job, self.gpus)
            if self._static_bound(arrangement) <= self.capacity
        ]
        heapq.heapify(heap)
        best: list[Choice] = []
        simulated, bound, complete = 0, 0.0, True
        while heap:
            bound, _, entry = heapq.heappop(heap)
            if len(best) == BEST and bound >= best[-1].step:
                break
            if isinstance(entry, Arrangement):
                for candidate in self._candidates(entry):
                    shape, microbatch, schedule = candidate
                    time = shape.lower_bound(microbatch, split=self._splits(schedule))
                    heapq.heappush(heap, (time, next(serial), candidate))
                continue
            if best and simulated >= self.limit:
                complete = False
                break
            choice = self._evaluated(*entry)
            if choice is not None:
                simulated += 1
                best = sorted([*best, choice], key=lambda one: one.step)[:BEST]
        if not best:
            raise self._no_fit()
        proof = verify(lower(best[0].plan, collectives=best[0].shape.collectives))
        bound = best[-1].step if complete else bound
        return Planned(self.job, self.gpus, self.capacity, tuple(best), proof, simulated, complete, bound)

    def _work(self, arrangement: Arrangement) -> float:
        """Seconds of computes of the busiest position, at least: a position has the mean of its module's."""
        each = [
            self.model.total(part.module, part.tp, part.cp) * self.job.global_batch / (part.dp * part.pp)
            for part in arrangement.parts
        ]
        return sum(each) if arrangement.colocated else max(each)

    def _static_bound(self, arrangement: Arrangement) -> float:
        """Bytes of the fullest rank at least: the mean of its module's, with one microbatch of the fewest samples."""
        lanes = math.lcm(*(part.dp for part in arrangement.parts))
        fixed, trained, running = [], [], []
        for part in arrangement.parts:
            module = self.job.module(part.module)
            fixed.append(module.parameters / (part.tp * part.pp) * sum(self.model.parameter_bytes(part)))
            held = module.activations * lanes / part.ranks
            trained.append(0.0 if module.frozen else held)
            running.append(held)  # a frozen module frees them at the end of its forward, before others run
        if arrangement.colocated:
            return self.job.device.reserved + sum(fixed) + max(sum(trained), *running)
        return self.job.device.reserved + max(size + held for size, held in zip(fixed, running, strict=True))

    def _candidates(self, arrangement: Arrangement) -> Iterator[_Candidate]:
        """The candidates of an arrangement: microbatch sizes that all dp divide, and schedules that fit."""
        lanes, batch = math.lcm(*(part.dp for part in arrangement.parts)), self.job.global_batch
        sizes = self.job.training.microbatch or [lanes * size for size in range(1, MOST_SAMPLES + 1)]
        sizes = [
            size for size in sizes if size % lanes == 0 and batch % size == 0 and batch // size <= MOST_MICROBATCHES
        ]
        shapes: dict[tuple[int, ...], Shape] = {}
        for schedule, places in self._schedules(arrangement.parts[-1]) if sizes else ():
            if places not in shapes:
                shapes[places] = Shape(self.model, arrangement, places)
            yield from ((shapes[places], size, schedule) for size in sizes)

    def _schedules(self, main: Part) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The schedules of the module with the loss, and the places of its stages."""
        training = self.job.training
        allowed = set(training.schedules)
        if main.pp == 1 or len(self.job.graph.sinks) > 1:
            yield "1f1b", tuple(range(main.pp))
            return
        for chunks in sorted({1, 2, *training.chunks}):
            if main.pp * chunks > len(self.job.module(main.module).each):
                continue
            for name in fitting_schedules(chunks):
                known = SCHEDULES[name].chunks
                if name in allowed and (known == chunks or (known is None and chunks in training.chunks)):
                    yield name, v_placement(main.pp) if known == 2 else looped_placement(main.pp, main.pp * chunks)

    def _splits(self, schedule: str) -> bool:
        """Whether the schedule splits backwards."""
        if schedule not in self.splits:
            small = SCHEDULES[schedule].plan(2, 4)
            self.splits[schedule] = any(action.kind is ActionKind.W for action in small.actions(0))
        return self.splits[schedule]

    def _plan(self, shape: Shape, microbatch: int, schedule: str) -> tuple[Plan, tuple[int, ...]] | None:
        """The plan of a candidate and its microbatches in flight; None where the schedule is not for it."""
        key = (shape.wiring, schedule, microbatch)
        if key not in self.plans:
            try:
                made = shape.plan(schedule, microbatch)
            except PlanError:
                self.plans[key] = None
            else:
                self.plans[key] = made, in_flight(made)
        return self.plans[key]

    def _live(self, shape: Shape, microbatch: int, schedule: str) -> tuple[int, ...]:
        """Per stage, microbatches that it holds at once, at least: of the schedule on a chain of a few microbatches.

        A frozen module frees each at the end of its forward.
        """
        held = zip(shape.part_of, self._trained_live(shape, microbatch, schedule), strict=True)
        return tuple(1 if self.job.module(part.module).frozen else live for part, live in held)

    def _trained_live(self, shape: Shape, microbatch: int, schedule: str) -> tuple[int, ...]:
        graph, microbatches = shape.wiring.graph, self.job.global_batch // microbatch
        if schedule == "1f1b":
            return tuple(min(microbatches, distance + 1) for distance in graph.distance_to_sink)
        few = min(microbatches, shape.parts[-1].pp, FEW)
        key = (len(shape.places), shape.places, schedule, few)
        if key not in self.chains:
            chunks = len(shape.places) // shape.parts[-1].pp
            known = SCHEDULES[schedule]
            try:
                made = known.plan(shape.parts[-1].pp, few, chunks if known.chunks is None else None)
            except PlanError:
                self.chains[key] = (1,) * len(shape.places)
            else:
                self.chains[key] = in_flight(made)
        first = 1 if not shape.arrangement.colocated else microbatches  # an encoder on these ranks runs before
        return (*[first] * (graph.num_stages - len(shape.places)), *self.chains[key])

    def _evaluated(self, shape: Shape, microbatch: int, schedule: str) -> Choice | None:
        """The choice, where the memory holds it; with one stage per position, also by a layout under the limit."""
        live = self._live(shape, microbatch, schedule)
        if self._floor(shape, microbatch, live) > self.capacity:
            leaner = self._leaner(shape, microbatch, live, 0.0)
            if leaner is None:
                return None
            shape = leaner
        found = self._plan(shape, microbatch, schedule)
        if found is None:
            return None
        made, live = found
        if self._floor(shape, microbatch, live) <= self.capacity:
            choice = shape.choice(made, schedule, microbatch)
            if choice.peak <= self.capacity:
                return choice
        leaner = self._leaner(shape, microbatch, live, max(shape.communicators(made, microbatch)))
        if leaner is None:
            return None
        choice = leaner.choice(made, schedule, microbatch)
        return choice if choice.peak <= self.capacity else None

    def _leaner(self, shape: Shape, microbatch: int, live: tuple[int, ...], buffers: float) -> Shape | None:
        """The shape with the best layouts that keep to the memory, where each stage has a position of its own."""
        room = self.capacity - self.job.device.reserved - buffers
        if len(shape.places) > shape.parts[-1].pp or shape.arrangement.colocated or room <= 0:
            return None
        layouts, first = [], 0
        for part in shape.parts:
            own = live[first : (first := first + part.pp)]
            peaks = tuple(peak * (microbatch // part.dp) for peak in own)
            fixed = sum(self.model.parameter_bytes(part))
            module = self.job.module(part.module)
            # The fullest stage has at least the mean of all, weighted by 1 / peak.
            moving = module.activations / (part.tp * part.cp)
            if moving + module.parameters / part.tp * fixed / max(peaks) > room * sum(1 / peak for peak in peaks):
                return None
            layout = self.model.layout(part.module, part.tp, part.cp, part.pp, fixed, room, peaks)
            if layout is None:
                return None
            layouts.append(layout)
        return Shape(self.model, shape.arrangement, shape.places, layouts)

    def _floor(self, shape: Shape, microbatch: int, live: tuple[int, ...]) -> float:
        """Bytes that the fullest rank holds at least: parameters and their states, and one stage's activations."""
        sizes = shape.activations
        each = (
            sum(static) + max(live[s] * sizes[s] for s in stages) * microbatch
            for static, stages in zip(shape.static, shape.wiring.held, strict=True)
        )
        return max(each) + self.job.device.reserved

    def _no_fit(self) -> NoFitError:
        """The bound that fails, and the nearest value that fits."""
        if not any(True for _ in arrangements(self.job, self.gpus)):
            return self._too_few()
        least, leanest = math.inf, None
        for arrangement in sorted(arrangements(self.job, self.gpus), key=self._static_bound):
            if self._static_bound(arrangement) >= least:
                break
            for shape, microbatch, schedule in self._candidates(arrangement):
                found = self._plan(shape, microbatch, schedule)
                if found is not None and self._floor(shape, microbatch, found[1]) < least:
                    choice = shape.choice(found[0], schedule, microbatch)
                    if choice.peak < least:
                        least, leanest = choice.peak, choice
        if leanest is None:
            return NoFitError(
                f"global_batch: no microbatch size of {self.job.global_batch} samples suits a grid and a schedule on "
                f"{self.gpus} GPUs with at most {MOST_MICROBATCHES} microbatches; allow smaller dp, other schedules or "
                "other sizes"
            )
        need = math.ceil(least / 1e8) / 10
        full = max(leanest.memory, key=lambda memory: memory.total)
        return NoFitError(
            f"memory is {self.capacity / 1e9:.6g} GB per GPU; on {self.gpus} GPUs the choice that needs the least "
            f"takes {need:.6g} GB ({leanest.arrangement}, {leanest.schedule}: parameters, gradients and "
            f"optimizer {(full.parameters + full.gradients + full.optimizer) / 1e9:.3g}, activations "
            f"{full.activations / 1e9:.3g}): give {need:.6g} GB, or more GPUs",
            memory=least,
        )

    def _too_few(self) -> NoFitError:
        gpus = self.gpus
        while gpus < self.gpus * 4096:
            gpus *= 2
            fitting = [arrangement.gpus for arrangement in arrangements(self.job, gpus)]
            if fitting:
                return NoFitError(f"gpus is {self.gpus}; the smallest grids that the modules allow take {min(fitting)}")
        return NoFitError(
            "modules: no grids at all: their tp, cp, dp, pp and placing allow none, or no dp divides global_batch"
        )
