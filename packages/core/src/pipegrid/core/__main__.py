"""One command for all packages: ``pipegrid show zero_bubble_v --pp 4 --microbatches 8``.

It is the console script of this package; ``python -m pipegrid.core`` is the same.

A package adds commands by entry points of the group ``pipegrid.commands``: the name of a command, and the function that
runs its arguments. A command that has the name of its package is that package's whole command line; another one is a
subcommand of it, whose name comes first among the arguments.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from attrs import frozen

from pipegrid.core.fields import nearest
from pipegrid.core.tables import text_table

GROUP = "pipegrid.commands"
USAGE = 2


@frozen
class Command:
    """A command of pipegrid: the package that has it, what it does, and an example of its arguments."""

    package: str
    text: str
    example: str


COMMANDS = {
    "show": Command("search", "draw a schedule, or the plan in a file", "zero_bubble_v --pp 4 --microbatches 8"),
    "verify": Command("search", "prove plans, or list their faults", "schedules/*.csv --junit verify.xml"),
    "simulate": Command("search", "makespan, bubble and peaks of a schedule", "1f1b --pp 4 --microbatches 8"),
    "search": Command("search", "the shortest plan under a memory cap", "--pp 4 --microbatches 8 --memory-limit 2"),
    "export": Command("search", "a proved plan for torch's runtime", "v_half --pp 4 --microbatches 8 --to torch"),
    "explain": Command("timeline", "who holds a hung job up, from the dumps of its ranks", "dumps/nccl_trace_rank_*"),
    "compare": Command("search", "a table of schedules at the same costs", "--pp 8 --microbatches 32"),
    "layout": Command("layout", "the layers of a layout on each rank; balance, even", '"Ett|ttL" --pp 2'),
    "topology": Command("topology", "describe modules on ranks; serve a store", "describe --world 4 a:tp=2,dp=2"),
    "plan": Command("planner", "the best grids, layout and schedule of a job", "job.toml --gpus 64"),
    "planner": Command("planner", "all of the planner: plan, show, what-if, layers", "show job.toml --gpus 64"),
    "goodput": Command(
        "goodput",
        "which recovery from failures pays, and how often to checkpoint",
        "job.toml --nodes 8 --mtbf 12h --restart 10m --checkpoint 30s",
    ),
    "checkpoint": Command("checkpoint", "show, verify or export a checkpoint", "show runs/first"),
    "check": Command("training", "compare the stages of a model with the model", 'config.json "Et*6|t*6L"'),
}
"""The commands of pipegrid's own packages, those that are not installed as well."""


def installed() -> dict[str, EntryPoint]:
    """The commands that the installed packages have, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def overview(here: Sequence[str]) -> str:
    """The commands that are ``here``, and how to install the others."""
    rows = [
        (name, COMMANDS[name].text, f"pipegrid {name} {COMMANDS[name].example}")
        if name in COMMANDS
        else (name, "of another project", f"pipegrid {name} --help")
        for name in here
    ]
    parts = ["usage: pipegrid COMMAND ...    (pipegrid COMMAND --help)\n"]
    parts += [text_table(("command", "what it does", "example"), rows) + "\n"] if rows else []
    missing: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        if name not in here:
            missing.setdefault(command.package, []).append(name)
    lines = [(", ".join(names), f"pip install pipegrid-{package}") for package, names in missing.items()]
    parts += [text_table(("not installed", "install line"), lines) + "\n"] if lines else []
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status, 2 for one that is not known or not installed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    points = installed()
    if not given or given[0] in ("-h", "--help"):
        print(overview(list(points)), end="")
        return 0 if given else USAGE
    name, *rest = given
    if name not in points:
        if name in COMMANDS:
            needed = COMMANDS[name].package
            text = f"{name} is a command of pipegrid-{needed}, which is not installed: pip install pipegrid-{needed}"
        else:
            text = f"no command {name!r}{nearest(name, {*COMMANDS, *points})}; pipegrid --help lists them"
        print(f"pipegrid: {text}", file=sys.stderr)
        return USAGE
    if name in COMMANDS and rest[:1] in (["-h"], ["--help"]):
        print(f"example: pipegrid {name} {COMMANDS[name].example}\n")
    of_package = points[name].module.split(".")[-2:-1] == [name]
    status: int = points[name].load()(rest if of_package else given)
    return status


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
