"""Grids of a job: one of each module, and every arrangement of them on so many GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

from attrs import frozen

from pipegrid.planner.job import Job, ModuleCosts
from pipegrid.topology.grid import Grid


@frozen
class GridPart:
    """A module on a grid of ``tp`` x ``cp`` x ``dp`` x ``pp`` ranks, the first dim varying fastest."""

    module: str
    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, the fastest first."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}


@frozen(slots=False)
class Arrangement:
    """A grid for each module, in the order of the graph: each on ranks of its own, or all on those of the last."""

    parts: tuple[GridPart, ...]
    colocated: bool = False

    @property
    def gpus(self) -> int:
        """Ranks of all modules together."""
        return self.parts[-1].ranks if self.colocated else sum(part.ranks for part in self.parts)

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grids. Modules apart lie by descending tp x cp, so that groups of powers of two do not cross nodes."""
        offset, found = 0, {}
        for part in sorted(self.parts, key=lambda part: -part.tp * part.cp):
            found[part.module] = Grid(tuple(part.sizes.values()), tuple(part.sizes), offset)
            offset += 0 if self.colocated else part.ranks
        return {part.module: found[part.module] for part in self.parts}

    def __str__(self) -> str:
        """Each grid by its sizes above 1."""
        texts = (
            " ".join(f"{name}={size}" for name, size in part.sizes.items() if size > 1) or "1 rank"
            for part in self.parts
        )
        return (" & " if self.colocated else " | ").join(texts)


def _sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two, and three times those."""
    return sorted(
        {factor << power for power in range(most.bit_length()) for factor in (1, 3)} & set(range(1, most + 1))
    )


def _parts_of(job: Job, module: ModuleCosts, gpus: int) -> Iterator[GridPart]:
    """The grids of ``module`` with at most ``gpus`` ranks; its dp divides the global batch."""
    depth = len(module.each)
    batch = job.global_batch
    dps = [dp for dp in module.dp or range(1, min(batch, gpus) + 1) if batch % dp == 0]
    pps = [pp for pp in module.pp or _sizes(min(depth, gpus)) if pp <= depth]
    for tp, cp, dp, pp in itertools.product(module.tp, module.cp, dps, pps):
        if tp * cp * dp * pp <= gpus:
            yield GridPart(module.name, tp, cp, dp, pp)


def arrangements(job: Job, gpus: int) -> Iterator[Arrangement]:
    """Every grid of every module on at most ``gpus`` ranks: all modules apart, or all on the ranks of the last."""
    modules = [job.module(name) for name in job.graph.order]
    parts = [list(_parts_of(job, module, gpus)) for module in modules]
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


def _within(parts: list[list[GridPart]], gpus: int) -> Iterator[tuple[GridPart, ...]]:
    if not parts:
        yield ()
        return
    for part in parts[0]:
        if part.ranks + len(parts) - 1 <= gpus:
            for rest in _within(parts[1:], gpus - part.ranks):
                yield (part, *rest)
