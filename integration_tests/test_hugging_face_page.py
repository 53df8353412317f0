"""The page for Hugging Face: its scripts run, and the one on four processes is the example."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from .kit import programs

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hugging_face.md"
SCRIPT = ROOT / "docs" / "examples" / "hf_text" / "run.py"
ONE, FOUR, SHARDED = programs.blocks(PAGE.read_text(encoding="utf-8"))
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def test_the_page_shows_the_script_that_runs():
    assert SCRIPT.read_text(encoding="utf-8").split('"""\n', 1)[1].strip() == FOUR.strip()


def test_the_script_is_short_and_little_of_it_is_about_pipegrid():
    lines = FOUR.splitlines()
    assert len(lines) <= 60
    own = [line for line in lines if re.search(r"pipegrid|HyperCommGrid|\bPipeline|pipeline\.", line)]
    assert len(own) <= 13
    training = [line for line in own if not re.search(r"save|load\(|evaluate|generate", line)]
    assert len(training) <= 9


@pytest.mark.nightly
def test_the_script_goes_on_in_another_layout_and_recites(tmp_path):
    done = programs.run(SCRIPT, timeout=500, cwd=tmp_path, env=os.environ | OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss (\S+)", done.stdout)]
    epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+): ", done.stdout)]
    assert epochs == list(range(len(epochs)))
    half = len(losses) // 2
    assert losses[half] < losses[half - 1] < 0.5 * losses[0]  # the second run goes on where the first has ended
    assert losses[-1] < 0.5 * losses[half - 1]
    texts = re.findall(r"^loss \S+: (.*)", done.stdout, flags=re.MULTILINE)
    assert len(texts) == 2
    assert texts[-1].startswith("the fog comes on little cat feet.")


@pytest.mark.thorough
def test_the_loop_of_one_process_runs():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ONE, PAGE.name, "exec"), {})
    assert len(re.findall(r"loss \d+\.\d+", printed.getvalue())) == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_ranks")
def test_the_sharded_script_trains(tmp_path):
    (tmp_path / "page.py").write_text(SHARDED, encoding="utf-8")
    done = programs.torchrun(4, "page.py", timeout=500, cwd=tmp_path, env=os.environ | OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+), gradient norm", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
