"""Plan a job: ``python -m pipegrid.planner plan job.toml --gpus 64 --memory 80GB``.

Draw a job, all modules in one picture: ``... show job.toml --gpus 64 --schedule zero_bubble_v --html job.html``.
Predict another schedule or cut of a recorded run: ``... what-if run.json --schedule zero_bubble_v --pp 8``. Costs of
its layers, for a job file: ``... layers run.json --layout "Et*3|t*4L"``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from pipegrid.core.parser import Parser
from pipegrid.layout import LayoutError
from pipegrid.planner.choice import Choice
from pipegrid.planner.dry_run import dry_run
from pipegrid.planner.errors import JobError, NoFitError
from pipegrid.planner.layer_costs import layer_costs, layers_toml
from pipegrid.planner.reading import read_job
from pipegrid.planner.report import explanation, refinement, results_table, summary, to_json, what_if_table
from pipegrid.planner.script import training_script
from pipegrid.planner.search import plan, refined
from pipegrid.planner.what_if import what_if
from pipegrid.plans import CostsError, PlanError, find_schedule, lower
from pipegrid.timeline import (
    Timeline,
    TimelineError,
    recording_from_json,
    terminal_timeline,
    timeline,
    write_html,
    write_svg,
)

USAGE = 2
NO_FIT = 1


def choice_of(choices: Sequence[Choice], number: int) -> Choice:
    """The choice in row ``number`` of the table, from 1."""
    if not 1 <= number <= len(choices):
        raise JobError(f"--choice {number}: the table has the choices 1 to {len(choices)}")
    return choices[number - 1]


def picture(choice: Choice) -> Timeline:
    """The timeline of a choice, under the name of what was chosen."""
    title = f"{choice.schedule}, {choice.arrangement}, {choice.plan.num_microbatches} microbatches"
    return timeline(choice.simulation, unit="s", title=title)


def draw(drawn: Sequence[Timeline], arguments: argparse.Namespace) -> None:
    """Write the pictures that are asked for."""
    if arguments.svg:
        write_svg(drawn, arguments.svg)
    if arguments.html:
        write_html(drawn, arguments.html)


def show_file(arguments: argparse.Namespace) -> int:
    """Draw the best choice of a job, or another of the table."""
    job = read_job(arguments.job)
    name = find_schedule(arguments.schedule).name if arguments.schedule else None
    if name:
        job = evolve(job, training=evolve(job.training, schedules=(name,)))
    found = plan(job, gpus=arguments.gpus, memory=arguments.memory).choices
    choices = [choice for choice in found if name in (None, choice.schedule)]
    if not choices:
        raise JobError(
            f"--schedule {name}: the best choices have one stage; allow {job.graph.order[-1]!r} only pp above 1"
        )
    choice = choice_of(choices, arguments.choice)
    drawn = picture(choice)
    draw([drawn], arguments)
    for module, layout in choice.layouts.items():
        print(f"{module}: {layout}")
    print(terminal_timeline(drawn), end="")
    return 0


def plan_file(arguments: argparse.Namespace) -> int:
    """Search, and print the best choices."""
    planned = plan(read_job(arguments.job), gpus=arguments.gpus, memory=arguments.memory, limit=arguments.limit)
    chosen = winner = choice_of(planned.choices, arguments.choice)
    if arguments.search:
        winner = refined(winner, memory=planned.memory, effort=arguments.search)
    if arguments.json:
        print(to_json(planned, winner if arguments.search else None))
    else:
        print(results_table(planned, terminal=sys.stdout.isatty()), end="")
        print(explanation(planned) if arguments.explain else summary(planned), end="")
        if arguments.search:
            print(refinement(chosen, winner))
        if arguments.dry_run:
            print(dry_run(chosen))
    draw([picture(winner)], arguments)
    if arguments.plan:
        arguments.plan.write_text(str(lower(winner.plan, collectives=winner.shape.collectives)), encoding="utf-8")
    if arguments.code:
        arguments.code.write_text(training_script(chosen), encoding="utf-8")
    return 0


def what_if_file(arguments: argparse.Namespace) -> int:
    """Predict a step of another plan, and print it beside the recorded one."""
    recording = recording_from_json(arguments.recording.read_text(encoding="utf-8"))
    found = what_if(
        recording,
        schedule=arguments.schedule,
        pp=arguments.pp,
        chunks=arguments.chunks,
        microbatches=arguments.microbatches,
        input_share=arguments.input_share,
    )
    print(what_if_table(found), end="")
    if arguments.svg:
        write_svg(timeline(found.other, unit="s"), arguments.svg)
    if arguments.html:
        write_html([timeline(found.other, unit="s"), timeline(recording)], arguments.html)
    return 0


def layers_file(arguments: argparse.Namespace) -> int:
    """Print the layers of a job's module, as a recorded run had them."""
    layers = layer_costs(
        recording_from_json(arguments.recording.read_text(encoding="utf-8")),
        arguments.layout,
        module=arguments.module,
        samples=arguments.samples,
        free=arguments.free,
        input_share=arguments.input_share,
    )
    print(layers_toml(layers), end="")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m pipegrid.planner", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="plan | show | what-if | layers")
    planned = Parser(add_help=False)
    planned.add_argument("job", type=Path, help="a file, JSON by its suffix, otherwise TOML")
    planned.add_argument("--gpus", type=int, required=True, help="at most this many")
    planned.add_argument("--memory", help="of a GPU, such as 80GB; by default the job's own")
    recorded = Parser(add_help=False)
    recorded.add_argument("recording", type=Path, help="JSON, as written by recording_to_json")
    recorded.add_argument("--input-share", type=float, default=0.5, help="part I of a backward that was recorded whole")
    search = commands.add_parser(
        "plan", parents=[planned], help="the best grids, layout, schedule and microbatch size of a job"
    )
    search.add_argument("--limit", type=int, default=200, help="candidates that are simulated at most")
    search.add_argument("--explain", action="store_true", help="layouts, memory per position, why the others lost")
    search.add_argument("--json", action="store_true", help="the choices as JSON, in place of tables and texts")
    search.add_argument("--dry-run", action="store_true", help="count and check what all ranks of the choice open")
    search.add_argument(
        "--choice", type=int, default=1, metavar="N", help="which of the table the other options take (default 1)"
    )
    search.add_argument("--svg", type=Path, help="write the choice's timeline")
    search.add_argument("--html", type=Path, help="write it as a page: zoom, hover, follow a microbatch")
    search.add_argument(
        "--search",
        type=float,
        metavar="EFFORT",
        help="search the choice's plan, encoders in its bubbles; 1: about 10 s",
    )
    search.add_argument("--plan", type=Path, help="write that plan, or the choice's, with its communication")
    search.add_argument("--code", type=Path, help="write a training script with the choice's sizes, which runs")
    search.set_defaults(run=plan_file)
    show = commands.add_parser(
        "show", parents=[planned], help="draw the best choice of a job, all modules in one picture"
    )
    show.add_argument("--schedule", help="the best choice with this schedule, such as zero_bubble_v")
    show.add_argument("--choice", type=int, default=1, metavar="N", help="the N-th best of all (default 1)")
    show.add_argument("--svg", type=Path, help="write a picture")
    show.add_argument("--html", type=Path, help="write a page: zoom, hover, follow a microbatch")
    show.set_defaults(run=show_file)
    other = commands.add_parser(
        "what-if", parents=[recorded], help="the step time of a recorded run under another plan"
    )
    other.add_argument("--schedule", required=True, help="its name, such as zero_bubble_v")
    other.add_argument("--pp", type=int, help="positions; by default as recorded")
    other.add_argument("--chunks", type=int, help="stages per position; by default the schedule's own number")
    other.add_argument("--microbatches", type=int, help="of the same batch; by default as recorded")
    other.add_argument("--svg", type=Path, help="write its timeline")
    other.add_argument("--html", type=Path, help="write a page with its timeline and the recorded one")
    other.set_defaults(run=what_if_file)
    layers = commands.add_parser("layers", parents=[recorded], help="costs of a recorded run's layers, for a job file")
    layers.add_argument("--layout", required=True, help='of the recorded module, such as "Et*3|t*4|t*3L"')
    layers.add_argument("--module", help="its name, where there are several")
    layers.add_argument("--samples", type=int, default=1, help="of a microbatch, on each rank")
    layers.add_argument("--free", nargs="*", default=[], help="kinds of layers that take no time")
    layers.set_defaults(run=layers_file)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 where nothing fits, 2 for bad input."""
    parsed = parser().parse_args(arguments)
    try:
        result: int = parsed.run(parsed)
    except (JobError, LayoutError, PlanError, CostsError, TimelineError, OSError, UnicodeDecodeError) as error:
        print(f"pipegrid.planner: {error}", file=sys.stderr)
        return NO_FIT if isinstance(error, NoFitError) else USAGE
    return result


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
