"""How fast layouts are read, written and balanced.

    python tools/bench/layout.py [--repeat 5] [--layers 10000] [--stages 512] [--only balance]

Prints medians of ``repeat`` runs, in seconds of this process's CPU (all of it is one thread, and a busy machine
would blur the clock), with the range, and the targets beside the numbers that have one. Balancing is timed on
several families of costs, since its time depends on them: with and without memory limits, and with chunks that share
one (where the search is bounded and says how far from the optimum it ended).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipegrid.layout import LayerMemory, LayoutInfeasibleError, PipelineParallelLayerLayout, balance

T = TypeVar("T")

PARSE_TARGET, BALANCE_TARGET = 0.2, 1.0  # seconds: 100,000 layers; 10,000 layers on 512 stages


def median(function: Callable[[], T], repeat: int) -> tuple[float, str, T]:
    """The median CPU time of ``repeat`` calls in seconds, the range in words, and what the last returned."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        result = function()
        times.append(time.process_time() - start)
    return statistics.median(times), f"{1000 * min(times):,.1f} to {1000 * max(times):,.1f}", result


def line(what: str, seconds: float, spread: str, *, target: float | None = None, note: str = "") -> None:
    """One row."""
    verdict = "" if target is None else f"target {1000 * target:,.0f} ms: {'met' if seconds < target else 'MISSED'}"
    print(f"  {what:<54} {1000 * seconds:>10,.1f} ms  ({spread})  {verdict} {note}".rstrip())


def parsing(repeat: int) -> None:
    """Texts of 100,000 layers."""
    print("read a layout string of 100,000 layers, and write its canonical text")
    rng = random.Random(1)
    uneven = "|".join("t" * rng.randint(0, 40) for _ in range(5_000))
    texts = {
        "all letters": "t" * 100_000,
        "with commas": "t," * 100_000,
        "50,000 stages": "tt|" * 50_000,
        "50,000 groups": "(t)*2," * 50_000,
        "one repetition": "Et*3|(tt|)*49999,m|L",
        f"uneven ({uneven.count('t'):,} layers)": uneven,
        "nested 30,000 deep": "(" * 30_000 + "t*100000" + ")*1" * 30_000,
    }
    for name, text in texts.items():
        seconds, spread, layout = median(lambda text=text: PipelineParallelLayerLayout(text, 1), repeat)  # type: ignore[misc]
        line(f"read: {name}", seconds, spread, target=PARSE_TARGET)
        seconds, spread, _ = median(layout.__str__, repeat)
        line(f"write: {name}", seconds, spread)


def families(layers: int, rng: random.Random) -> dict[str, list[float]]:
    """Costs of layers, by what makes them hard or easy."""
    return {
        "uniform 0.5 to 1.5": [rng.uniform(0.5, 1.5) for _ in range(layers)],
        "nearly equal": [rng.uniform(0.98, 1.02) for _ in range(layers)],
        "lognormal": [rng.lognormvariate(0, 1) for _ in range(layers)],
        "heavy tail (Pareto 1.1)": [rng.paretovariate(1.1) for _ in range(layers)],
        "equal": [0.0123] * layers,
        "two kinds, alternating": [1.0 if i % 2 else 3.7 for i in range(layers)],
        "dense and sparse layers": [1.0 if rng.random() < 0.75 else 1.31 for _ in range(layers)],
        "growing": [1 + i / layers for i in range(layers)],
        "one giant layer": [1.0] * (layers // 2) + [100.0] + [1.0] * (layers - layers // 2 - 1),
    }


def balancing(layers: int, stages: int, repeat: int) -> None:
    """One chunk per rank, without a limit and with one that is nearly as low as it can be."""
    print(f"balance {layers:,} layers on {stages} stages: least bottleneck, then least spread, both exact")
    target = BALANCE_TARGET if (layers, stages) == (10_000, 512) else None
    rng = random.Random(1)
    memory = [LayerMemory(rng.uniform(1, 2), rng.uniform(0.01, 0.02)) for _ in range(layers)]
    limit = low_limit(memory, stages)
    for name, costs in families(layers, rng).items():
        for kind, options in (("", {}), (", tight limit", {"memory": memory, "limit": limit})):
            seconds, spread, found = median(lambda c=costs, o=options: balance(c, stages, **o), repeat)  # type: ignore[misc]
            line(name + kind, seconds, spread, target=target, note=f"imbalance {found.report.imbalance:.4f}")


def low_limit(memory: Sequence[LayerMemory], pp: int, vpp: int = 1) -> float:
    """A limit within a hundredth of the lowest that some layout is found to keep."""
    low, high = 0.0, sum(one.fixed + 2 * pp * vpp * one.per_microbatch for one in memory)
    while high > 1.01 * low:
        middle = (low + high) / 2
        try:
            balance([1.0] * len(memory), pp, vpp, memory=list(memory), limit=middle, nodes=100)
        except LayoutInfeasibleError:
            low = middle
        else:
            high = middle
    return high


def sharing(repeat: int) -> None:
    """Several chunks per rank under one limit: a bounded search."""
    print("balance with chunks that share their rank's limit: a bounded branch and bound")
    rng = random.Random(1)
    for pp, vpp, layers in ((4, 2, 34), (8, 2, 63), (8, 4, 100), (16, 4, 130), (64, 4, 600)):
        costs = [rng.uniform(0.5, 1.5) for _ in range(layers)]
        memory = [LayerMemory(0, rng.uniform(0.8, 1.2)) for _ in range(layers)]
        lowest = low_limit(memory, pp, vpp)
        for slack in (1.3, 1.1):
            limit = lowest * slack
            seconds, spread, found = median(
                lambda c=costs, m=memory, n=limit, sizes=(pp, vpp): balance(c, *sizes, memory=m, limit=n),  # type: ignore[misc]
                repeat,
            )
            verdict = "optimal" if found.optimal else f"bottleneck within {found.gap:.1%} of the least"
            name = f"{layers} layers, pp {pp}, vpp {vpp}, limit {slack:.0%} of the lowest"
            line(name, seconds, spread, note=verdict)


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of which the median is printed")
    parser.add_argument("--layers", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=512)
    parser.add_argument("--only", choices=("parse", "balance", "share"))
    options = parser.parse_args()
    if options.only in {None, "parse"}:
        parsing(options.repeat)
    if options.only in {None, "balance"}:
        balancing(options.layers, options.stages, options.repeat)
    if options.only in {None, "share"}:
        sharing(1)


if __name__ == "__main__":
    main()
