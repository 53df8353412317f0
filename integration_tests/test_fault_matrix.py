"""A rank fails; every other rank raises a typed error within its deadline, and names no innocent rank."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attrs import asdict, evolve

from .fault_matrix import BACKENDS, DAYS, Case

PROGRAM = Path(__file__).with_name("fault_matrix.py")
SLACK = 20.0  # seconds beyond the promise: a test must hold on a machine that does other work

CASES = [
    Case("1f1b", "kill", "before", rank=2, point=3, step=1, monitor=True, store="launcher"),
    Case("1f1b", "stop", "after", rank=0, point=1, step=1, monitor=False, store="rank"),
    Case("interleaved", "raise", "forward", rank=1, point=2, step=0, monitor=True, store="file"),
    Case("zero_bubble_h1", "delay", "forward", rank=3, point=0, step=2, monitor=True, store="launcher"),
    Case("zero_bubble_v", "memory", "backward", rank=0, point=2, step=1, monitor=False, store="launcher"),
    Case("dualpipe_v", "interrupt", "after", rank=3, point=3, step=1, monitor=True, store="launcher"),
    Case("vtp", "exit", "forward", rank=1, point=2, step=1, monitor=True, store="file"),
    Case("modules", "kill", "reduce", rank=1, point=0, step=1, monitor=True, store="launcher"),
    Case("modules", "raise", "clip", rank=2, point=0, step=0, monitor=False, store="launcher"),
    Case("colocated", "stop and continue", "between", rank=2, point=0, step=2, monitor=True, store="launcher"),
    Case("colocated", "kill", "create", rank=3, point=0, step=0, monitor=False, store="file"),
    Case("1f1b", "exit", "close", rank=1, point=0, step=2, monitor=True, store="rank"),
    Case("interleaved", "kill", "open", rank=2, point=2, step=0, monitor=True, store="launcher"),
    Case("colocated", "interrupt", "open", rank=0, point=1, step=0, monitor=False, store="file"),
    Case("zero_bubble_h1", "kill", "restart", rank=2, point=0, step=0, monitor=True, store="launcher"),
    Case("vtp", "raise", "restart", rank=0, point=1, step=0, monitor=True, store="launcher"),
    Case("modules", "exit", "restart", rank=1, point=3, step=0, monitor=True, store="launcher"),
    Case("zero_bubble_v", "kill", "before", rank=1, point=2, step=2, monitor=True, store="file", days=DAYS),
    Case("modules", "stop", "forward", rank=3, point=1, step=1, monitor=False, store="launcher", days=DAYS),
    Case("colocated", "raise", "reduce", rank=0, point=0, step=1, monitor=True, store="rank", days=DAYS),
    Case("vtp", "exit", "close", rank=2, point=0, step=2, monitor=True, store="launcher", days=DAYS),
]

FAKES = [
    Case("1f1b", "kill", "forward", rank=2, point=1, step=1, monitor=False, store="launcher", backend="fake_nccl"),
    Case("vtp", "raise", "forward", rank=1, point=2, step=1, monitor=True, store="launcher", backend="fake_nccl"),
    Case("modules", "memory", "reduce", rank=0, point=0, step=1, monitor=True, store="file", backend="fake_nccl"),
    Case("colocated", "exit", "backward", rank=3, point=1, step=1, monitor=True, store="launcher", backend="fake_nccl"),
    Case(
        "interleaved", "raise", "after", rank=3, point=3, step=0, monitor=True, store="file", backend="fake_nccl_serial"
    ),
    Case("vtp", "exit", "open", rank=1, point=2, step=0, monitor=True, store="launcher", backend="fake_nccl_serial"),
    Case("modules", "kill", "restart", rank=3, point=0, step=0, monitor=True, store="launcher", backend="fake_nccl"),
]

AGED = [
    Case("1f1b", "kill", "forward", rank=2, point=1, step=2, monitor=True, store="launcher"),
    Case("dualpipe_v", "stop", "before", rank=0, point=3, step=1, monitor=False, store="launcher"),
    Case("modules", "raise", "backward", rank=1, point=1, step=1, monitor=True, store="file"),
    Case("colocated", "delay", "between", rank=2, point=0, step=2, monitor=True, store="launcher"),
    Case("interleaved", "memory", "clip", rank=3, point=0, step=1, monitor=True, store="rank"),
    Case("vtp", "kill", "close", rank=1, point=0, step=2, monitor=False, store="launcher"),
]


def judged(arguments, *, cases=(), seconds):
    lines = "".join(f"{json.dumps(asdict(case))}\n" for case in cases)
    command = [sys.executable, PROGRAM, "--slack", str(SLACK), *arguments]
    result = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=seconds)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
    return result.stdout.splitlines()[-1]


@pytest.mark.thorough
def test_one_fault_of_each_kind_and_place():
    assert judged(["--case", "-", "--jobs", "4"], cases=CASES, seconds=600) == f"{len(CASES)} passed, 0 failed"


@pytest.mark.thorough
def test_faults_over_the_fake_nccl():
    assert judged(["--case", "-", "--jobs", "4"], cases=FAKES, seconds=600) == f"{len(FAKES)} passed, 0 failed"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "backend", [BACKENDS[1], *(pytest.param(each, marks=pytest.mark.nightly) for each in BACKENDS[2:])]
)
def test_faults_over_the_fake_nccl_after_forty_days(backend):
    cases = [evolve(case, backend=backend, days=DAYS) for case in AGED]
    assert judged(["--case", "-", "--jobs", "4"], cases=cases, seconds=600) == f"{len(AGED)} passed, 0 failed"


@pytest.mark.nightly
def test_every_schedule_fault_and_place_with_every_monitor_and_store():
    """The covering part, and others that differ from night to night: 1004 of 7296 cases."""
    arguments = ["--random", "300", "--seed", str(int(time.time() // 86400)), "--jobs", "4", "--deadline", "6"]
    assert judged(arguments, seconds=3 * 3600) == "1004 passed, 0 failed"


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_every_schedule_fault_and_place_over_the_fake_nccl(backend):
    arguments = ["--backend", backend, "--jobs", "4", "--deadline", "6"]
    assert judged(arguments, seconds=3 * 3600) == "704 passed, 0 failed"
