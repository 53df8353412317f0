"""A parser of command lines that suggests the nearest name for an unknown one."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from pipegrid.core.fields import nearest


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser`; where a command or a choice is none, its error ends with the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and end with status 2."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        known = re.findall(r"[\w-]+", wrong[2]) if wrong else []  # with quotes, or without since Python 3.12
        super().error(message + (nearest(wrong[1], known) if wrong else ""))
