"""The comparison with torch on a Hugging Face model runs, small: each question has an answer of both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCH = Path(__file__).parents[1] / "bench" / "hf_pipelining.py"


def bench(*options: str) -> str:
    """What the bench prints; that a bound is missed is no failure here, where nothing is measured in earnest."""
    result = subprocess.run(
        [sys.executable, BENCH, "--quick", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


@pytest.mark.nightly
def test_the_glue_of_both_is_counted_and_steps_have_a_ratio() -> None:
    table = bench("--only", "steps", "--schedules", "1f1b")
    glue = re.search(r"pipegrid (\d+), torch (\d+)$", table, re.MULTILINE)
    assert glue is not None, table
    assert int(glue[1]) <= 50
    assert int(glue[1]) < int(glue[2])
    assert re.search(r"^  1f1b( +\d+\.\d){2} +\d+\.\d{3} (<=|> ) [\d.]+ \[", table, re.MULTILINE), table


@pytest.mark.nightly
def test_every_question_has_an_answer_of_both() -> None:
    """Where ours are right, and what torch's do not run or run wrong."""
    table = bench("--only", "questions")
    rows = dict(re.findall(r"^  (\S.{38}\S?) *right \(\S+\) +(\S.*)$", table, re.MULTILINE))
    answers = {question.strip(): answer for question, answer in rows.items()}
    assert len(answers) == 8, table
    assert answers["1F1B"].startswith("right")
    assert answers["1F1B, padded texts"].startswith("right")
    assert answers["ZB-V"].startswith("right")
    assert "Sizes of tensors must match" in answers["1F1B, microbatches of unequal length"]
    assert answers["1F1B, head tied to the embedding"].startswith("wrong gradients")
    assert "RuntimeError" in answers["ZB-V, compiled layers"]
