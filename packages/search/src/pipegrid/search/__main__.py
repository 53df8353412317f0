"""Look at schedules: ``python -m pipegrid.search show | verify | simulate | search | compare | export``."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipegrid.core.fields import Count, checked
from pipegrid.core.order import ORDER_MODELS
from pipegrid.core.parser import Parser
from pipegrid.core.tables import text_table
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators import SCHEDULES, find_schedule
from pipegrid.plans.orders import Orders, fewest_communicators, orders_from_csv, orders_of_plan, prove_order
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import Plan, to_torch
from pipegrid.plans.simulate import Costs, CostsError, costs_from_json
from pipegrid.plans.verify import as_limit, verify
from pipegrid.search import COMPARED, Found, Progress, compare, comparison_table, search
from pipegrid.search.buffers import plan_buffers
from pipegrid.search.compare import played
from pipegrid.search.foreign import read_schedule
from pipegrid.timeline import (
    Timeline,
    amount,
    order_timeline,
    terminal_timeline,
    time_text,
    timeline,
    write_html,
    write_perfetto,
    write_svg,
)
from pipegrid.timeline.plan_files import named, read_file, read_plan, write_plan

USAGE = 2
FAULTY = 1
NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def read_costs(path: Path | None) -> Costs:
    """The costs in a JSON file; without one, F = I = W = 1 per position and free communication."""
    return Costs() if path is None else costs_from_json(read_file(path))


SEARCHED = ("greedy", "search")


def searched(arguments: argparse.Namespace, costs: Costs, *, effort: float = 1.0) -> Found:
    """Run `search`, with its progress on a terminal."""
    pp = checked(arguments.pp, Count, "num_positions", PlanError)
    stages = pp * checked(1 if arguments.chunks is None else arguments.chunks, Count, "num_chunks", PlanError)
    reports = bool(effort) and sys.stderr.isatty()

    def report(progress: Progress) -> None:
        print(f"\r{progress.share:4.0%}  {progress.best:.6g}  {progress.origin:40}", end="", file=sys.stderr)

    found = search(
        costs.cut_into(stages, slices=pp),
        arguments.memory_limit,
        num_positions=pp,
        num_microbatches=arguments.microbatches,
        num_stages=stages,
        objective=arguments.objective or "makespan",
        effort=effort,
        time_limit=arguments.time_limit,
        progress=report if reports else None,
    )
    if reports:
        print(file=sys.stderr)
    return found


BY_NAME = "a schedule by name"
USERS = {  # of the options that choose a plan
    **dict.fromkeys(("pp", "microbatches", "chunks", "slices", "pairs"), (BY_NAME,)),
    "memory_limit": SEARCHED,
    "objective": ("search",),
    "time_limit": ("search",),
}


def chosen(arguments: argparse.Namespace, costs: Costs) -> tuple[Plan, str]:
    """The plan of a name, or in a file, and what it is called."""
    name, path = str(arguments.schedule), Path(arguments.schedule)
    is_file = path.is_file() or bool(path.suffix)  # no schedule has a dot in its name
    for option, users in USERS.items():  # one that would change nothing is an error
        used = not is_file if users == (BY_NAME,) else name in users
        if getattr(arguments, option) is not None and not used:
            raise PlanError(f"--{option.replace('_', '-')} is for {' and '.join(users)}; {name} does not use it")
    if is_file:
        return read_plan(path), path.name
    if arguments.pp is None or arguments.microbatches is None:
        raise PlanError(f"{name} needs --pp and --microbatches (or give the file of a plan)")
    if name in SEARCHED:
        if arguments.slices not in (None, 1):
            raise PlanError(f"--slices is {arguments.slices}; {name} orders whole microbatches")
        if arguments.pairs:
            raise PlanError(f"--pairs is for {BY_NAME}; {name} forms pairs where the costs say what they hide")
        return searched(arguments, costs, effort=1.0 if name == "search" else 0.0).plan, name
    schedule = find_schedule(name, arguments.chunks)
    options = {"num_slices": arguments.slices, "overlap": bool(arguments.pairs)}
    return schedule.plan(arguments.pp, arguments.microbatches, arguments.chunks, **options), schedule.name


def show(arguments: argparse.Namespace) -> int:
    """Draw one schedule."""
    costs = read_costs(arguments.costs)
    plan, name = chosen(arguments, costs)
    if arguments.lower:
        plan = lower(plan)
    drawn = timeline(played(plan, costs), unit=arguments.unit)
    drawn = timeline(drawn, title=f"{name}: {drawn.title}")
    write_pictures(arguments, drawn, arrows=arguments.arrows)
    if arguments.perfetto:
        write_perfetto(drawn, arguments.perfetto)
    if arguments.plan:
        write_plan(plan, arguments.plan)
    print(terminal_timeline(drawn), end="")
    if arguments.buffers:
        print(buffers_text(plan if plan.has_communication else lower(plan)))
    return 0


def write_pictures(arguments: argparse.Namespace, drawn: Timeline | list[Timeline], *, arrows: bool = True) -> None:
    """Write the picture and the page that are asked for."""
    if drawn and arguments.svg:
        write_svg(drawn, arguments.svg, arrows=arrows)
    if drawn and arguments.html:
        write_html(drawn, arguments.html, arrows=arrows)


def buffers_text(plan: Plan) -> str:
    """The slots of what is received, and those of all that has buffers, in one pool per position."""
    received, every = plan_buffers(plan), plan_buffers(plan, kinds=("receives", "copies", "sends", "offload"))
    return f"{received}\n\nwith what is sent, kept and offloaded, in one pool per position:\n{every}"


def show_figures(arguments: argparse.Namespace) -> int:
    """The figures of one schedule: of a step, and of each position."""
    costs = read_costs(arguments.costs)
    plan, name = chosen(arguments, costs)
    step = played(plan, costs)
    print(
        f"{name}: makespan {time_text(step.makespan, arguments.unit)}, span {time_text(step.span, arguments.unit)}, "
        f"bubble {step.bubble():.1%}"
    )
    columns = ("position", "first", "last", "busy", "bubble", "peak until W", "peak until I")
    figures = zip(step.spans, step.busy, step.bubbles(), step.peaks(), step.peaks(until="I"), strict=True)
    rows = [
        (str(at), *(time_text(time, arguments.unit) for time in (*span, busy)), f"{bubble:.1%}", *map(amount, peaks))
        for at, (span, busy, bubble, *peaks) in enumerate(figures)
    ]
    print(text_table(columns, rows), end="")
    return 0


def find(arguments: argparse.Namespace) -> int:
    """The shortest plan under a memory cap, beside its bound."""
    found = searched(arguments, read_costs(arguments.costs))
    objective = arguments.objective or "makespan"
    value = found.makespan if objective == "makespan" else found.span
    ends = "" if found.complete else "; the time limit ended the search"
    said = "the best on its placement" if found.optimal else f"no plan on this placement is below {amount(found.bound)}"
    print(
        f"{objective} {time_text(value, arguments.unit)}, peak {amount(found.peak)}, from {found.origin}: {said}{ends}"
    )
    if arguments.plan:
        write_plan(found.plan, arguments.plan)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write a proved plan for another runtime; the proof goes to stderr."""
    plan, _ = chosen(arguments, read_costs(arguments.costs))
    lowered = plan if plan.has_communication else lower(plan)
    text = to_torch(plan if arguments.computes else lowered, waits=arguments.waits)
    print(verify(lowered), file=sys.stderr)
    for name in () if arguments.computes else ORDER_MODELS:  # each message alone on one group, as torch launches it
        print(prove_order(orders_from_csv(text), name), file=sys.stderr)
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def verify_files(arguments: argparse.Namespace) -> int:
    """Prove plans, or the orders of other programs, or list their faults."""
    paths: list[Path] = arguments.plans
    as_limit(arguments.memory_limit)  # bad input; what follows is about the files
    if len(paths) > 1 and (arguments.svg or arguments.html):
        raise PlanError("--svg and --html are for one file; --pictures DIR has a picture of each that hangs")
    cases: list[tuple[str, str, str, str]] = []  # file, question, answer, outcome
    for path in paths:
        try:
            for asked, text, proved in verdicts_of(path, arguments):
                print(text, file=sys.stdout if proved else sys.stderr)
                cases.append((str(path), asked, text, "proved" if proved else "failure"))
        except (PlanError, OSError) as error:
            if len(paths) == 1 and not arguments.junit:
                raise
            print(error, file=sys.stderr)
            cases.append((str(path), "read", str(error), "error"))
        if len(paths) > 1:
            own = {outcome for file, _, _, outcome in cases if file == str(path)}
            print(f"{path}: {'not read' if 'error' in own else 'FAULTY' if 'failure' in own else 'proved'}\n")
    if arguments.junit:
        write_junit(cases, arguments.junit)
    found = {outcome for _, _, _, outcome in cases}
    return USAGE if "error" in found else FAULTY if "failure" in found else 0


def write_junit(cases: Sequence[tuple[str, str, str, str]], path: Path) -> None:
    """Write a JUnit suite with a case for each question; a fault is a failure, a file that is not read an error."""
    counts = {f"{name}s": str(sum(case[-1] == name for case in cases)) for name in ("failure", "error")}
    top = ET.Element("testsuites")
    suite = ET.SubElement(top, "testsuite", {"name": "pipegrid verify", **counts, "tests": str(len(cases))})
    for *texts, outcome in cases:
        file, asked, text = (NOT_XML.sub("\ufffd", text) for text in texts)
        element = ET.SubElement(suite, "testcase", classname=file, name=asked)
        if outcome == "proved":
            ET.SubElement(element, "system-out").text = text
        else:
            ET.SubElement(element, outcome, message=text.partition("\n")[0]).text = text
    ET.indent(top)
    ET.ElementTree(top).write(path, encoding="utf-8", xml_declaration=True)


def verdicts_of(path: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """Questions about a file, the proof or its faults, whether it is proved; its pictures are written on the way."""
    text = read_file(path)
    with named(path):
        plan = read_schedule(text)
    plan = plan or read_plan(path)
    if isinstance(plan, Orders):
        if arguments.communicators:
            raise PlanError(f"--communicators is for plans, whose lanes may be placed; {path} has orders")
        if arguments.buffers:
            raise PlanError(f"--buffers is for plans, which say until when a message is read; {path} has orders")
        yield from verdicts_of_orders(plan, path, arguments)
        return
    try:
        proof = verify(
            plan,
            rendezvous=not arguments.buffered,
            memory_limit=arguments.memory_limit,
            lanes=arguments.lanes,
            batches=arguments.batches,
        )
    except PlanError as error:
        yield "verify", str(error), False
        if arguments.pictures and {fault.rule for fault in error.faults} == {"cycle"}:
            for _ in verdicts_of_orders(orders_of_plan(plan), path, arguments):
                pass  # for the pictures
        return
    yield "verify", str(proof), True
    lowered = plan if plan.has_communication else lower(plan)
    if arguments.buffers:
        yield "buffers", buffers_text(lowered), True
    if arguments.communicators:
        yield "communicators", str(fewest_communicators(lowered, *(arguments.order or ()))), True
    if arguments.order or arguments.svg or arguments.html:
        orders = orders_from_csv(text) if "WAIT_SEND" in text else orders_of_plan(lowered)
        yield from verdicts_of_orders(orders, path, arguments)


def verdicts_of_orders(orders: Orders, path: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, str, bool]]:
    """Orders under each order model that is asked for; of other programs, by default, under all."""
    drawn: list[Timeline] = []
    hangs: list[Timeline] = []
    options = {"buffered": arguments.buffered, "drains": arguments.drains}
    for name in arguments.order or ORDER_MODELS:
        rules: set[str] = set()
        try:
            yield name, str(prove_order(orders, name, **options)), True
        except PlanError as error:
            rules = {fault.rule for fault in error.faults}
            yield name, str(error), False
        if rules <= {"cycle"} and (arguments.svg or arguments.html or (arguments.pictures and rules)):
            drawn.append(order_timeline(orders, name, title=f"{path.stem} under {name}", **options))
            hangs += drawn[-1:] if rules else []
    write_pictures(arguments, drawn)
    if hangs and arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        write_svg(hangs, arguments.pictures / f"{path.stem}.svg", arrows=True)


def compare_all(arguments: argparse.Namespace) -> int:
    """A table of schedules."""
    rows = compare(
        arguments.pp,
        arguments.microbatches,
        costs=read_costs(arguments.costs),
        memory_limit=arguments.memory_limit,
        num_chunks=arguments.chunks,
        num_slices=arguments.slices,
    )
    print(comparison_table(rows, unit=arguments.unit, terminal=sys.stdout.isatty()), end="")
    shown = {row.schedule for row in rows}
    left_out = [name for name in COMPARED if name not in shown]
    if left_out:
        print(f"left out, as no plan fits under the cap or the costs are of other edges: {', '.join(left_out)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m pipegrid.search", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="show | verify | simulate | search | compare | export")

    priced = Parser(add_help=False)
    priced.add_argument("--costs", type=Path, help="costs as JSON; a number is that of a whole position")
    united = Parser(add_help=False)
    united.add_argument("--unit", default="", help="unit of the costs, s for seconds")
    sized = Parser(add_help=False)
    sized.add_argument("--pp", type=int, required=True, help="positions")
    sized.add_argument("--microbatches", type=int, required=True)
    caps = Parser(add_help=False, parents=[priced])
    caps.add_argument("--memory-limit", type=float, help="live microbatches per position, for greedy and search")
    caps.add_argument("--objective", choices=("makespan", "span"), help="what search makes short (makespan)")
    caps.add_argument("--time-limit", type=float, metavar="SECONDS", help="ends search with the best plan so far")

    plans = Parser(add_help=False, parents=[caps])
    plans.add_argument("schedule", help=f"{', '.join((*SCHEDULES, *SEARCHED))}; or a file (.csv, .json, .txt)")
    plans.add_argument("--pp", type=int, help="positions")
    plans.add_argument("--microbatches", type=int)
    plans.add_argument("--chunks", type=int, help="stages per position; 1f1b with several is interleaved_1f1b")
    plans.add_argument("--slices", type=int, help="slices of each microbatch (default 1), for those named seq1f1b")
    together = "forwards and backwards run together, in schedules with pairs"
    plans.add_argument("--pairs", action="store_const", const=True, help=together)

    play = commands.add_parser("simulate", parents=[plans, united], help="the figures of a step, and of each position")
    play.set_defaults(run=show_figures)

    shortest = "the shortest plan under a memory cap, with its bound"
    best = commands.add_parser("search", parents=[caps, united, sized], help=shortest)
    best.add_argument("--chunks", type=int, help="stages per position")
    best.set_defaults(run=find)

    out = commands.add_parser("export", parents=[plans], help="write a proved plan for the runtime of another project")
    out.add_argument("--to", choices=("torch",), required=True, help="torch: the CSV of torch.distributed.pipelining")
    out.add_argument("--computes", action="store_true", help="without messages: torch adds its own")
    out.add_argument("--waits", action="store_true", help="a wait for each send and reduction, as torch 2.15 needs")
    out.add_argument("--out", type=Path, metavar="FILE", help="default: printed")
    out.set_defaults(run=export)

    draw = commands.add_parser("show", parents=[plans, united], help="draw a named schedule, or the plan in a file")
    draw.add_argument("--lower", action="store_true", help="add the communication, and draw it")
    slots = "the slots of messages, kept copies and offloaded activations, by position"
    draw.add_argument("--buffers", action="store_true", help=slots)
    draw.add_argument("--svg", type=Path, help="write a picture")
    draw.add_argument("--html", type=Path, help="write a page: zoom, hover, follow a microbatch")
    draw.add_argument("--arrows", action="store_true", help="draw every message in the picture")
    draw.add_argument("--perfetto", type=Path, help="write a trace for ui.perfetto.dev")
    for command in (best, draw):
        command.add_argument("--plan", type=Path, help="write the plan (.csv, .json, otherwise text)")
    draw.set_defaults(run=show)

    prove = commands.add_parser("verify", help="prove plans, or list their faults")
    prove.add_argument(
        "plans",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a plan (.csv, .json, text); JSON of orders, or of a schedule of Megatron-LM, DeepSpeed or JaxPP",
    )
    prove.add_argument("--buffered", action="store_true", help="sends do not wait for their receive")
    prove.add_argument("--lanes", choices=("separate", "shared"), default="separate")
    prove.add_argument(
        "--batches", choices=("in_order", "simultaneous"), default="in_order", help="how the messages of a batch wait"
    )
    prove.add_argument("--memory-limit", type=float, help="live microbatches per position")
    prove.add_argument(
        "--order",
        action="append",
        choices=tuple(ORDER_MODELS),
        help="prove the messages of one group under this order model as well (again for several; orders: default all)",
    )
    prove.add_argument("--drains", action="store_true", help="orders: any compute may wait for the whole device")
    prove.add_argument("--svg", type=Path, help="orders: a picture of each model, with the cycle where ranks get stuck")
    prove.add_argument("--html", type=Path, help="orders: the same as a page")
    prove.add_argument("--communicators", action="store_true", help="plans: the fewest communicators per rank")
    prove.add_argument("--buffers", action="store_true", help=f"plans: {slots}")
    prove.add_argument("--junit", type=Path, metavar="FILE", help="write the verdicts as JUnit XML, for CI")
    prove.add_argument("--pictures", type=Path, metavar="DIR", help="write a picture of each file that hangs")
    prove.set_defaults(run=verify_files)

    described = "a table of schedules at the same costs"
    table = commands.add_parser("compare", parents=[priced, united, sized], help=described)
    table.add_argument("--memory-limit", type=float, help="live microbatches per position")
    table.add_argument("--chunks", type=int, default=2, help="stages per position, where any number will do")
    table.add_argument("--slices", type=int, default=1, help="adds schedules that cut each microbatch into so many")
    table.set_defaults(run=compare_all)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 for a plan with faults, 2 for bad input."""
    parsed = parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except (PlanError, CostsError, OSError) as error:
        print(f"pipegrid.search: {error}", file=sys.stderr)
        return USAGE


def search_command(arguments: Sequence[str]) -> int:
    """``pipegrid search``, whose name would otherwise mean the whole of this command line."""
    return main(["search", *arguments])


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
