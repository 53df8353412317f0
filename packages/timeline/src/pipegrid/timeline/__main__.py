"""Explain a hung job from what its ranks left: ``python -m pipegrid.timeline explain DUMPS...``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pipegrid.core.parser import Parser
from pipegrid.plans.errors import PlanError
from pipegrid.timeline.dumps import explain, read_dumps, read_records
from pipegrid.timeline.dumps.places import places_timeline
from pipegrid.timeline.plan_files import read_plan
from pipegrid.timeline.svg import write_svg

USAGE = 2


def explain_dumps(arguments: argparse.Namespace) -> int:
    """Print the roots of a hang, the waits of each rank and, with a plan, its place there."""
    if arguments.svg and arguments.plan is None:
        raise PlanError("--svg draws the plan with the actions at which ranks stand; give it with --plan")
    plan = None if arguments.plan is None else read_plan(arguments.plan)
    records = read_records(arguments.dumps)
    dumps, errors = read_dumps(arguments.dumps)
    if not dumps and not records:
        raise errors[0]
    found = explain(dumps, errors, plan=plan, records=records)
    if plan is not None and arguments.svg:
        write_svg(places_timeline(plan, found.places), arguments.svg)
    print(json.dumps(found.as_json(), indent=1) + "\n" if arguments.json else found, end="")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m pipegrid.timeline", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="explain")
    why = commands.add_parser("explain", help="who holds a hung job up, from the flight-recorder dumps of its ranks")
    why.add_argument(
        "dumps", type=Path, nargs="+", help="files or folders; a name ends with its rank: nccl_trace_rank_3"
    )
    why.add_argument("--plan", type=Path, help="the lowered plan that the job runs: says the action of each rank")
    why.add_argument("--json", action="store_true", help="print JSON")
    why.add_argument("--svg", type=Path, metavar="FILE", help="with --plan: write a picture of where the ranks stand")
    why.set_defaults(run=explain_dumps)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    parsed = parser().parse_args(arguments)
    try:
        result: int = parsed.run(parsed)
    except (PlanError, OSError) as error:
        print(f"pipegrid.timeline: {error}", file=sys.stderr)
        return USAGE
    return result


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
