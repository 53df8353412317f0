"""Commands: ``python -m pipegrid.training checkpoint show | verify | export PATH``, ``... check MODEL LAYOUT``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipegrid.checkpoint import command_line as checkpoint
from pipegrid.core.parser import Parser
from pipegrid.training import check

COMMANDS = {"check": check.main, "checkpoint": checkpoint.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    parser = Parser(prog="python -m pipegrid.training")
    parser.add_argument("command", choices=sorted(COMMANDS), help="what to look at")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    given = parser.parse_args(arguments)
    return COMMANDS[given.command](given.arguments)


if __name__ == "__main__":
    sys.exit(main())
