"""The example as a person runs it: what it refuses, what it writes, and how it ends when a rank dies."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from digit_reader.launch import _what_happened
from pipegrid.monitor import Control
from pipegrid.schedules import recorded_costs, recording_from_json, simulate
from restart.launching import ranks_of

from .kit import programs

TRAIN = Path(__file__).parents[1] / "docs" / "examples" / "digit_reader" / "train.py"


run = partial(programs.run, TRAIN)
pytestmark = pytest.mark.usefixtures("warm_ranks")


def command(*arguments):
    return [sys.executable, str(TRAIN), *arguments]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--language", 'pp=2,layout="Ett|t|tL"'],
            "1f1b with pp=2,vpp=1 makes 2: use pp=3, or a layout with 2 stages",
        ),
        (["--language", 'pp=1,layout="Ett|ttL"', "--images", "dp=3"], "use pp=2, or a layout with 1 stages"),
        (
            ["--images", "dp=3"],
            "they need 5 ranks, 1 more than there are. Processes given: 4; images 3 + language 2 need 5",
        ),
        (["--graph", "audio>language"], "module 'images' is missing from the graph; use images>language"),
        (["--graph", "language>images"], "use images>language"),
        (["--images", "tp=2,dp=1"], "this model has no tensor-parallel layers; use tp=1"),
        (["--placement", "colocated", "--images", "dp=2"], "images has 2 ranks, language 4; use --images dp=4"),
        (["--batch", "60"], "56 or 64 would do"),
        (["--language", "layout=Ett|ttX"], "found 'X'"),
        (["--schedule", "best"], "there is no 'best'; choose from gpipe"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_2(arguments, text):
    done = run(*arguments, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("train.py: ")
    assert text in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [
        ("float32", []),
        pytest.param("float64", [], marks=pytest.mark.nightly),
        pytest.param("float64", ["--backend", "fake_nccl"], marks=pytest.mark.nightly),
        pytest.param(
            "float64",
            ["--backend", "fake_nccl_serial", "--placement", "mixed", "--schedule", "zero_bubble_h1"],
            marks=pytest.mark.nightly,
        ),
        pytest.param("float64", ["--backend", "staged"], marks=pytest.mark.nightly),
        pytest.param(
            "float64",
            ["--images", "dp=1", "--language", "dp=3,pp=1,layout=EttttL", "--batch", "48"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "float64",
            ["--images", "dp=2", "--language", "pp=3,layout=Et||tttL", "--processes", "5", "--microbatches", "2"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_first_steps_gradients_are_those_of_one_process(dtype, arguments):
    done = run("--check", "--dtype", dtype, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"largest relative difference .*: (\S+) \((\w+); within", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < {"float32": 1e-5, "float64": 1e-10}[dtype]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], marks=pytest.mark.nightly, id="default"),
        pytest.param(["--placement", "mixed", "--language", "pp=2,vpp=2", "--schedule", "zero_bubble_v"], id="mixed"),
    ],
)
def test_a_short_run_writes_its_files_and_plain_lines(tmp_path, arguments):
    done = run("--steps", "6", "--batch", "16", "--microbatches", "2", "--out", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 6/6  loss " in done.stdout
    assert "exact match on" in done.stdout
    assert "\x1b" not in done.stdout
    files = {"index.html", "loss.png", "metrics.jsonl", "recording.json"}
    files |= {f"timeline.{end}" for end in ("html", "json", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == files
    recording = recording_from_json((tmp_path / "recording.json").read_text())
    assert simulate(recording.plan, recorded_costs(recording)).makespan > 0
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 6
    assert 0.0 <= last["bubble"] < 1.0
    assert (tmp_path / "timeline.svg").read_text().count("<svg") == 1
    page = (tmp_path / "index.html").read_text()
    embedded = html.unescape(re.search(r'srcdoc="(.*?)"', page, re.DOTALL)[1])
    assert embedded == (tmp_path / "timeline.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "6 of 6</b>" in page
    assert 'http-equiv="refresh"' not in page
    told = re.search(r"largest relative difference .*: (\S+) \(float32; within", done.stdout)
    assert f"of any parameter is {float(told[1]):.1e}<" in page
    assert done.stdout.index("The plan of a step") < done.stdout.index("largest relative difference")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def agreed(text):
    """The ranks of which the last lines say where in their plan they stood."""
    lines = re.findall(r"^  ranks? ([\d, -]+): (?:position \d+, |between steps)", text, re.MULTILINE)
    spans = [list(map(int, span.split("-"))) for line in lines for span in line.split(", ")]
    return {rank for span in spans for rank in range(span[0], span[-1] + 1)}


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks through /proc")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_rank_that_dies_ends_the_run_and_is_named(tmp_path, victim):
    with subprocess.Popen(
        command("--steps", "100000", "--out", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step "):
                    break
            assert lines[-1].startswith("step "), "".join(lines)
            ranks = ranks_of(process.pid)
            assert sorted(ranks) == [0, 1, 2, 3]
            os.kill(ranks[victim], signal.SIGKILL)
            killed = time.monotonic()
            rest = process.communicate(timeout=60)[0]
            assert time.monotonic() - killed < 30
            assert process.returncode == 1
            assert f"rank {victim} failed first (SIGKILL); the other ranks were stopped. Where the ranks stood:" in rest
            assert agreed(rest) == {0, 1, 2, 3}
            assert not [rank for rank, pid in ranks.items() if Path(f"/proc/{pid}").exists()]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("said", "text"),
    [(3, "rank 3 failed first (ValueError: bad); "), (2, "rank 3 failed first (SIGABRT); "), (None, "(SIGABRT); ")],
)
def test_of_a_rank_that_a_signal_ended_its_own_word_is_told_and_no_other_ranks(said, text):
    store = HashStore()
    if said is not None:
        Control(store, said, (2, 3)).record("ValueError: bad")
    codes = {2: 1, 3: -signal.SIGABRT}
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=code, error_file="") for rank, code in codes.items()}
    assert text in _what_happened(ChildFailedError("train.py", failures), Control(store, -1, (2, 3)))


@pytest.mark.thorough
def test_a_rank_that_fails_is_named_with_what_it_said_and_where_all_stood(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--steps", "1", "--batch", "16", "--out", str(tmp_path / "file"))
    assert done.returncode == 1
    assert "rank 3 failed first (FileExistsError: " in done.stderr, done.stderr[-3000:]
    assert agreed(done.stderr) == {0, 1, 2, 3}
    # The ranks that it stopped leave the telling to the launcher.
    assert done.stderr.count("Traceback") == 1, done.stderr
