"""What a later step enters of pipegrid stays as little as it is: counts, which no machine changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "trace_step.py"
FEW, MANY = 4, 8


@pytest.fixture(scope="module")
def found() -> Any:
    command = [sys.executable, BENCH, "--json", "--microbatches", str(FEW), str(MANY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("side", "files", "functions", "fewest", "most"),
    [("step function", 42, 155, 330, 500), ("Pipeline", 72, 278, 595, 825)],
)
def test_a_later_step_enters_no_more_than_this(
    found: Any, side: str, files: int, functions: int, fewest: int, most: int
) -> None:
    """A few calls are those of waits that find their message there, or do not."""
    few, many = (found[side][str(count)]["later"] for count in (FEW, MANY))
    assert few["files"] <= files
    assert few["functions"] <= functions
    assert few["calls"] <= fewest
    assert many["calls"] <= most


def test_nothing_is_derived_again(found: Any) -> None:
    for side in found.values():
        entered = {name for count in (FEW, MANY) for name in side[str(count)]["later"]["list"]}
        derived = ("plans/passes/", "plans/verify/", "gradients/reduction/tied.py", "topology/hyper_comm_grid.py")
        assert not [name for name in entered if name.startswith(derived)]
        assert not [
            name for name in entered if name.endswith((": GradientReduction.of", ": options_of", ": Rows._axis"))
        ]
