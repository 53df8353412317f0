"""The bench of the runtime runs, small: every table has a figure for each of its runners, and gradients agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SECONDS = 300
# Before torch 2.12, the ZB-V of torch's own runtime deadlocks over gloo, and the tables say so in place of a figure.
PEER_HANGS = {"zero_bubble_v"} if torch.__version__ < (2, 12) else set()


def bench(*options: str) -> str:
    """What the bench prints; that a bound is missed is no failure here, where nothing is measured in earnest."""
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "bench" / "runtime.py", "--quick", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tables() -> str:
    return bench("--only", "overhead", "emulated", "memory", "--schedules", "1f1b", "zero_bubble_v")


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_overhead_has_three_figures_side_by_side_and_two_ratios_with_their_quartiles(tables, schedule):
    ratio = r" +\d+\.\d\d (<=|> ) [\d.]+ \[\d+\.\d\d, \d+\.\d\d\]"
    peer, beside = ("-", " +-") if schedule in PEER_HANGS else (r"\d+\.\d", ratio)
    row = rf"^  {schedule} +\d+ +\d+\.\d +{peer} +\d+\.\d +\d+\.\d\d{ratio}{beside}$"
    assert re.search(row, tables, re.MULTILINE), tables


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_emulated_compute_stands_beside_its_simulation_and_torch(tables, schedule):
    beside = "- +-" if schedule in PEER_HANGS else r"\d+\.\d +\d+\.\d\d\d (<=|> ) 1"
    row = rf"^  {schedule} +\d+\.\d +\d+\.\d +[+-]\d+\.\d% (<=|> ) 3% +{beside}   \d+, \d+$"
    assert re.search(row, tables, re.MULTILINE), tables


def test_live_activations_are_what_the_plan_says_whatever_the_machine_does(tables):
    assert len(re.findall(r"^ +ours( +[\d,]+){4}  equal$", tables, re.MULTILINE)) == 2, tables
    assert "after the step" not in tables


def test_nobody_has_wrong_gradients(tables):
    assert "wrong gradients" not in tables
    assert tables.count("does not run") == 3 * len(PEER_HANGS)


def test_the_step_function_the_early_reduction_and_two_modules_have_a_ratio_each():
    table = bench("--only", "stepping", "reduction", "modules", "--schedules", "1f1b")
    assert re.search(r"^  1f1b( +\d+\.\d\d){3} (<=|> ) 1\.05 \[", table, re.MULTILINE), table
    assert re.search(r"^  1f1b( +\d+\.\d){5} +\d+\.\d\d (<=|> ) 1 \[.*\] +(-?\d+%|-)$", table, re.MULTILINE), table
    assert re.search(r"^  1f1b( +\d+\.\d){2} +\d+\.\d\d (<=|> ) 1\.3 \[", table, re.MULTILINE), table
    assert "gradients differ" not in table


def test_a_dry_run_of_nccl_prints_ratios():
    table = bench("--only", "stepping", "reduction", "--schedules", "1f1b", "--backend", "fake_nccl")
    assert table.startswith(f"torch {torch.__version__}, fake_nccl")
    assert len(re.findall(r"^  1f1b +\d+\.\d.* (<=|> ) 1", table, re.MULTILINE)) == 2, table
