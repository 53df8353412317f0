"""What a later step enters of pipegrid stays as little as it is: counts, which no machine changes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench" / "trace_step.py"
FEW, MANY = 4, 8
LONG_WAITS = {"transport/waits/aborts.py", "topology/bounded_calls.py"}
"""Which a rank enters as it waits for the other: for a slice of 0.05 s, asked of the device; a second, written down."""


def files_in(step: Any) -> int:
    return len({name.partition(": ")[0] for name in step["list"]} - LONG_WAITS)


@pytest.fixture(scope="module")
def found() -> Any:
    command = [sys.executable, BENCH, "--json", "--microbatches", str(FEW), str(MANY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("side", "files", "functions", "fewest", "most"),
    [("step function", 25, 84, 195, 329), ("Pipeline", 48, 186, 389, 584)],
)
def test_a_later_step_enters_no_more_than_this(
    found: Any, side: str, files: int, functions: int, fewest: int, most: int
) -> None:
    """A few calls are those of waits that find their message there, or do not."""
    few, many = (found[side][str(count)]["later"] for count in (FEW, MANY))
    assert files_in(few) <= files
    assert few["functions"] <= functions
    assert few["calls"] <= fewest
    assert many["calls"] <= most


@pytest.mark.parametrize(("side", "files"), [("step function", 60), ("Pipeline", 109)])
def test_a_first_step_enters_no_more_files_than_this(found: Any, side: str, files: int) -> None:
    assert files_in(found[side][str(FEW)]["first"]) <= files


def test_nothing_is_derived_again(found: Any) -> None:
    for side in found.values():
        entered = {name for count in (FEW, MANY) for name in side[str(count)]["later"]["list"]}
        derived = ("plans/passes/", "plans/verify/", "gradients/reduction/tied.py", "topology/hyper_comm_grid.py")
        assert not [name for name in entered if name.startswith(derived)]
        assert not [
            name for name in entered if name.endswith((": GradientReduction.of", ": options_of", ": Rows._axis"))
        ]


def test_the_walk_of_the_architecture_names_the_files_of_a_later_step(found: Any) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walk = page.split("## One microbatch")[1].split("\n## ")[0]
    named = re.findall(r"\]\(packages/\w+/src/pipegrid/([^)]+)\)", walk)
    few, many = (
        {name.partition(": ")[0] for name in found["step function"][str(count)]["later"]["list"]}
        for count in (FEW, MANY)
    )
    assert sorted(named) == sorted(few & many)  # a wait may enter one more by chance
