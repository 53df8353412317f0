"""`python -m pipegrid.topology describe --world 16 images:tp=1,dp=8 language:tp=2,pp=2,dp=2`, or `serve COMMAND`.

A module is ``name[@offset]:dim=size,dim=size,...``, the fastest dim first. The exit status is 2 if the modules do not
fit, with the reason.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from pipegrid.core.parser import Parser
from pipegrid.topology.errors import GridError, GroupConnectionError
from pipegrid.topology.job.job_store import serve_store
from pipegrid.topology.job.placement import describe, place

_MODULE = re.compile(r"(?P<name>[^@:=,]+)(@(?P<offset>\d+))?:(?P<dims>[^=,]+=\d+(,[^=,]+=\d+)*)")


def _module(text: str) -> tuple[str, int | None, dict[str, int]]:
    match = _MODULE.fullmatch(text)
    pairs = [part.split("=") for part in match["dims"].split(",")] if match else []
    dims = {dim: int(size) for dim, size in pairs}
    if match is None or len(dims) < len(pairs):
        raise ValueError(f"{text!r} is not a module name[@offset]:dim=size,dim=size, such as language:tp=2,pp=2,dp=2")
    return match["name"], None if match["offset"] is None else int(match["offset"]), dims


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m pipegrid.topology", description="Plans of rank grids.")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("describe", help="place modules and print the world as a table", epilog=__doc__)
    show.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    show.add_argument(
        "--together",
        action="append",
        default=[],
        metavar="A,B",
        type=lambda text: text.split(","),
        help="modules on the same ranks; may occur several times",
    )
    show.add_argument("--max-rows", type=int, default=64, metavar="N", help="larger worlds: a row per stretch of ranks")
    show.add_argument("modules", nargs="+", metavar="MODULE", help="name[@offset]:dim=size,dim=size,...")
    serve = commands.add_parser(
        "serve", help="run a launcher beside a store that outlives its ranks, which find it by `job_store`"
    )
    serve.add_argument("--host", default="localhost", help="name of this machine for the ranks")
    serve.add_argument("--port", type=int, default=0, help="0: any free one")
    serve.add_argument("launcher", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as srun ... python train.py")
    return parser


def _run(command: Sequence[str]) -> int:
    """Run ``command``, which gets this process's SIGTERM; its exit status."""
    child = subprocess.Popen(command)  # noqa: S603 -- typed by the person who runs this
    before = signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue  # the terminal has sent it to the child as well
        signal.signal(signal.SIGTERM, before)
        return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "launcher" in options:
        command = options.launcher[options.launcher[:1] == ["--"] :]
        if not command:
            parser.error("serve needs a COMMAND, which it runs")
        try:
            with serve_store(options.host, options.port):
                return _run(command)
        except (GridError, GroupConnectionError) as error:
            print(error, file=sys.stderr)
            return 2
        except OSError as error:  # of the command; as a shell does
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            return 127
    try:
        given = [_module(text) for text in options.modules]
        names = [name for name, _, _ in given]
        if len(set(names)) != len(names):
            raise ValueError(f"modules {names} must have a name each")  # noqa: TRY301 -- for the one handler
        grids = place(
            {name: dims for name, _, dims in given},
            world_size=options.world,
            together=options.together,
            offsets={name: offset for name, offset, _ in given if offset is not None},
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(describe(grids, max_rows=options.max_rows, color=sys.stdout.isatty()))
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
