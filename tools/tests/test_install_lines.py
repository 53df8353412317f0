"""The one install line of each README installs the package and every package of ours that it needs, or all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
# An indented line of a README that begins so is what its readers type.
LINE = re.compile(r"^ +pip install ((?:\./packages/\S+ ?)+)", re.MULTILINE)


def needs_of(names):
    """``names`` and the packages that they declare, those that these declare, and so on."""
    found, open_ = set(), list(names)
    while open_:
        found.add(name := open_.pop())
        declared = tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text())["project"]["dependencies"]
        open_ += {match[1] for need in declared if (match := re.match(r"pipegrid-(\w+)", need))} - found
    return found


@pytest.mark.parametrize("name", [*PACKAGES, ""], ids=lambda name: name or "everything")
def test_an_install_line_is_complete(name):
    readme = PACKAGES.get(name, ROOT) / "README.md"
    (line,) = LINE.findall(readme.read_text())
    given = {Path(path.partition("[")[0]).name for path in line.split()}
    if "*" in given:  # as in a shell
        given = set(PACKAGES)
    assert given == needs_of(given) >= ({name} if name else set(PACKAGES))
