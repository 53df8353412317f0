"""Compare policies of recovery from failures, and intervals of checkpoints, by goodput.

``python -m pipegrid.goodput job.toml --nodes 8 --mtbf 12h --restart 10m --checkpoint 30s --policy all``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipegrid.core.parser import Parser
from pipegrid.goodput.goodput import goodput, possible
from pipegrid.goodput.outages import random_failures, read_failures
from pipegrid.goodput.report import goodput_json, goodput_table
from pipegrid.goodput.rerouted import rerouted_throughput
from pipegrid.goodput.simulate import POLICIES, Scenario
from pipegrid.goodput.throughput import Throughput, parse_throughput, planned_throughput
from pipegrid.layout import LayoutError
from pipegrid.planner import JobError, NoFitError, parse_job, plan
from pipegrid.planner.reading import Form, parse_document, read_as
from pipegrid.plans import CostsError, PlanError

USAGE = 2
NO_FIT = 1


def run(arguments: argparse.Namespace) -> None:
    """Simulate a job under failures, and print what each policy makes of it."""
    throughput = read_as(arguments.job, partial(throughput_of, arguments=arguments))
    duration, repair = arguments.duration, arguments.repair
    if arguments.failures:
        failures = read_failures(arguments.failures, duration=duration)
    else:
        nodes, seed = throughput.nodes, arguments.seed
        failures = random_failures(nodes, mtbf=arguments.mtbf, repair=repair, duration=duration, seed=seed)
    replanned = read_as(arguments.job, partial(replanned_of, arguments=arguments)) if arguments.reroute else None
    names = ("restart", "checkpoint", "write", "replan", "promote", "spares", "without_spares")
    scenario = Scenario(throughput, failures, replanned=replanned, **{name: getattr(arguments, name) for name in names})
    policies = possible(scenario) if arguments.policy == "all" else (arguments.policy,)
    found = goodput(scenario, policies=policies, every=arguments.every)
    print(goodput_json(found) if arguments.json else goodput_table(found, terminal=sys.stdout.isatty()), end="")


def throughput_of(text: str, form: Form, *, arguments: argparse.Namespace) -> Throughput:
    """The throughput in a file, or that of the job in it, planned."""
    if "throughput" in parse_document(text, form):
        if arguments.nodes is not None or arguments.memory is not None:
            raise JobError("--nodes and --memory are of a job that is planned; the file is a table of throughput")
        return parse_throughput(text, form)
    job = parse_job(text, form)
    if arguments.nodes is None:
        raise JobError("a job has no number of nodes; give --nodes")
    return planned_throughput(job, nodes=arguments.nodes, memory=arguments.memory, limit=arguments.limit)


def replanned_of(text: str, form: Form, *, arguments: argparse.Namespace) -> Throughput:
    """The throughput of a job's best choice whose peers take over the work of a dead node."""
    if "throughput" in parse_document(text, form):
        raise JobError("--reroute is for a job, whose grids say who takes over; the file is a table of throughput")
    job, nodes, memory = parse_job(text, form), arguments.nodes, arguments.memory
    best = plan(job, gpus=nodes * job.links.gpus_per_node, memory=memory, limit=arguments.limit).winner
    return rerouted_throughput(best, nodes=nodes, memory=memory)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    failing = Parser(prog="python -m pipegrid.goodput", description=__doc__)
    failing.add_argument("job", type=Path, help="a job file, or a file with samples per second by number of nodes")
    failing.add_argument("--nodes", type=int, help="of a job file's job")
    failing.add_argument("--memory", help="of a GPU, such as 80GB; by default the job's own")
    failing.add_argument("--limit", type=int, default=200, help="candidates that are simulated for a number of nodes")
    when = failing.add_mutually_exclusive_group(required=True)
    when.add_argument("--mtbf", help="mean time between failures of all nodes together, such as 12h")
    when.add_argument("--failures", type=Path, metavar="CSV", help="with the columns time, node and, if any, back")
    failing.add_argument("--repair", default="1h", help="until a node that failed is back, or never (default 1h)")
    failing.add_argument("--seed", type=int, default=0, help="of the failures")
    failing.add_argument("--for", dest="duration", metavar="TIME", help="of the run; 1,000 failures, or all of the CSV")
    failing.add_argument("--restart", required=True, help="from a failure until training goes on from a checkpoint")
    failing.add_argument("--checkpoint", required=True, help="training stops for it")
    failing.add_argument("--write", default="0s", help="until it can be loaded, while training goes on (default 0s)")
    failing.add_argument("--every", metavar="TIME", help="between checkpoints; by default the best for each policy")
    failing.add_argument("--replan", default="10s", help="until the nodes left go on with the step (default 10s)")
    failing.add_argument(
        "--reroute", action="store_true", help="re-plan on the grids of a job: peers take over the work of the dead"
    )
    failing.add_argument("--promote", default="10s", help="until a spare has the place of a node (default 10s)")
    failing.add_argument("--spares", type=int, default=1, help="of the nodes (default 1)")
    failing.add_argument("--without-spares", choices=("restart", "wait"), default="restart", help="when none is up")
    failing.add_argument("--policy", choices=(*POLICIES, "all"), default="all", help="(default all)")
    failing.add_argument("--json", action="store_true", help="as JSON, in place of the table")
    return failing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 where nothing fits, 2 for bad input."""
    parsed = parser().parse_args(arguments)
    try:
        run(parsed)
    except (JobError, LayoutError, PlanError, CostsError, OSError, UnicodeDecodeError) as error:
        print(f"pipegrid.goodput: {error}", file=sys.stderr)
        return NO_FIT if isinstance(error, NoFitError) else USAGE
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
