"""The example of a Hugging Face model: how much glue it takes, and that a short run trains, writes, saves and loads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .kit.programs import run

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "hf_vlm"


def lines_of_code(text):
    """Lines with code: without docstrings, comments and blank lines."""
    tree = ast.parse(text)
    documents = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    ]
    without = {line for one in documents for line in range(one.lineno, (one.end_lineno or 0) + 1)}
    return {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if number not in without and line.strip() and not line.strip().startswith("#")
    }


def test_the_glue_is_short_and_little_of_it_is_about_pipegrid():
    text = (EXAMPLE / "glue.py").read_text()
    rules = [number for number, line in enumerate(text.splitlines(), start=1) if line.startswith("# ----")]
    lines = lines_of_code(text)
    own = {line for line in lines if rules[0] < line < rules[1]}
    assert len(lines) <= 60
    assert len(own) <= 20
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pipegrid")
        for alias in node.names
    }
    outside = "\n".join(line for number, line in enumerate(text.splitlines(), start=1) if number in lines - own)
    assert imported
    assert not [name for name in (*imported, "pipegrid") if re.search(rf"\b{name}\b", outside)]


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_ranks")
def test_a_short_run_writes_the_same_in_the_pipeline_and_in_plain_transformers(tmp_path):
    result = run(
        EXAMPLE / "run.py",
        "--steps",
        10,
        "--microbatches",
        2,
        "--samples",
        4,
        "--unseen",
        8,
        "--out",
        tmp_path,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(found) for found in re.findall(r"loss per word (\d+\.\d+)", result.stdout)]
    assert losses[-1] < losses[0]
    assert re.search(r"exact captions of unseen images: \d+ of 8", result.stdout)
    assert "the same answer for 8 of 8 images" in result.stdout
    assert (tmp_path / "model.safetensors.index.json").is_file()


@pytest.mark.nightly
def test_the_example_reads_unseen_digits(tmp_path):
    result = run(EXAMPLE / "run.py", "--out", tmp_path, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    (exact,) = re.findall(r"exact captions of unseen images: \d+ of \d+ \((\d+\.\d)%\)", result.stdout)
    assert float(exact) > 60
    assert "the same answer for 256 of 256 images" in result.stdout


def test_options_that_do_not_fit_are_one_line():
    result = run(EXAMPLE / "run.py", "--samples", 3, timeout=60)
    assert result.returncode == 2
    assert "vision has two replicas" in result.stderr
