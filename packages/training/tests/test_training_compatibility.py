"""Families of models, run in every way, are right or an error by name; the page of the table has them all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipegrid.schedules import JobFailedError, PipelineError
from pipegrid.training import CutError
from pipegrid.transport import P2PPeerError, P2PUsageError

from .compatibility import BEGIN, END, Outcome, first_sentence, outcome_of_error, table, together
from .compatibility_cells import COLUMNS, WrongNumbersError, require_equal_gradients, require_equal_losses, whole_model
from .compatibility_families import FAMILIES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "compatibility.md"
NAME = "packages.training.tests.compatibility"
# Six families, and every column.
OFTEN = {
    ("Llama + LoRA", "FSDP2 x 1F1B"): "right",
    ("Mixtral, router loss", "stages, one process"): "right",
    ("Mixtral, router loss", "generate"): "right",
    ("Mamba", "interleaved 1F1B"): "right",
    ("ViT", "ZB-V, compile split"): "right",
    ("Qwen2-VL", "ZB-V"): "right",
    ("Qwen2-VL", "generate"): "unsupported",
    ("Qwen3-VL", "1F1B"): "right",
}


def rows_of(text):
    """The rows of the table, the header first: by family, a cell for each column, without the numbers of notes."""
    made = text.partition(BEGIN)[2].partition(END)[0] or text
    lines = [line.strip("| ").split(" | ") for line in made.splitlines() if line.startswith("| ")]
    return {name: [re.sub(r" \(\d+\)", "", cell) for cell in cells] for name, *cells in lines if name != "---"}


def test_the_page_has_every_family_and_column_and_nothing_else():
    rows = rows_of(PAGE.read_text())
    assert rows.pop("family") == list(COLUMNS)
    assert list(rows) == list(FAMILIES)
    assert {cell for cells in rows.values() for cell in cells} <= {
        "right",
        "right, not proved",
        "unsupported",
        "fails alone",
    }


def test_the_page_says_its_versions_and_its_refusals():
    made = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert re.search(r"^torch \d+\.\d+\.\d+, transformers \d+\.\d+\.\d+, \d{4}-\d\d-\d\d: \d+ families", made.strip())
    used = {int(number) for number in re.findall(r"(?:unsupported|fails alone) \((\d+)\)", made)}
    kinds = r"`\w+Error`|torch\.compile of .*|fully_shard of .*"
    listed = [int(number) for number in re.findall(rf"^(\d+)\. (?:{kinds}): \w", made, re.MULTILINE)]
    assert listed == sorted(used) == list(range(1, len(used) + 1))


PROGRAM = f"""
import os, time
from {NAME} import COLUMNS, run_cells
from {NAME}_cells import WrongNumbersError
def wrong(family, world):
    raise WrongNumbersError("loss")
COLUMNS["hang"] = 2, lambda family, world: time.sleep(1000 * world.rank)
COLUMNS["die"] = 2, lambda family, world: os._exit(3) if world.rank else None
COLUMNS["wrong"] = 2, wrong
COLUMNS["fine"] = 2, lambda family, world: None
planted = [("Llama", column) for column in ("fine", "hang", "fine", "die", "wrong", "fine")]
for cells, deadline in (({list(OFTEN)}, 300.0), (planted, 5.0)):
    print("cells", [(cell, outcome.word, outcome.text) for cell, outcome in run_cells(cells, deadline)])
"""


@pytest.fixture(scope="module")
def outcomes():
    """Of some families, and of planted cells; from a process of its own: it forks, and this one may have threads."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=_alone(), capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return [eval(line.removeprefix("cells ")) for line in done.stdout.splitlines() if line.startswith("cells ")]


@pytest.mark.thorough
def test_some_families_are_right_or_refused_by_name(outcomes):
    found = {cell: word for cell, word, _ in outcomes[0]}
    assert found == OFTEN, outcomes[0]
    refusals = [text for _, word, text in outcomes[0] if word == "unsupported"]
    assert all(re.match(r"`(Cut|Generation)Error`: ", text) for text in refusals)


def _alone():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.nightly
def test_every_family_in_every_way_is_what_the_page_says(tmp_path):
    page = tmp_path / "compatibility.md"
    shutil.copy(PAGE, page)
    done = subprocess.run(
        [sys.executable, "-m", NAME, "--page", str(page)],
        cwd=ROOT,
        env=_alone(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert rows_of(page.read_text()) == rows_of(PAGE.read_text())


# -- What the table would not overlook.


@pytest.mark.parametrize("change", [1e-6, 1.0])
def test_another_gradient_is_found(change):
    family = FAMILIES["Llama"]
    stage, whole = whole_model(family), whole_model(family)
    for model in (stage, whole):
        model(**family.batch(0)).loss.backward()
    require_equal_gradients(family, [stage], whole)
    stage.model.layers[2].mlp.up_proj.weight.grad[0, 0] *= 1 + change
    stage.model.layers[2].mlp.up_proj.weight.grad[0, 0] += change
    with pytest.raises(WrongNumbersError, match=r"gradient of model\.layers\.2\.mlp\.up_proj\.weight: error"):
        require_equal_gradients(family, [stage], whole)


@pytest.mark.parametrize("loss", [1.001, float("nan")])
def test_another_loss_is_found(loss):
    require_equal_losses([2.0, 1.0], [2.0, 1.0])
    with pytest.raises(WrongNumbersError, match="loss of microbatch 1"):
        require_equal_losses([2.0, loss], [2.0, 1.0])


def test_a_gradient_that_is_no_number_is_found():
    family = FAMILIES["Llama"]
    stage, whole = whole_model(family), whole_model(family)
    for model in (stage, whole):
        model(**family.batch(0)).loss.backward()
    stage.model.layers[0].mlp.up_proj.weight.grad[0, 0] = torch.nan
    with pytest.raises(WrongNumbersError, match=r"gradient of model\.layers\.0\.mlp\.up_proj\.weight: error inf"):
        require_equal_gradients(family, [stage], whole)


def test_a_missing_gradient_is_found():
    family = FAMILIES["Llama"]
    stage, whole = whole_model(family), whole_model(family)
    for model in (stage, whole):
        model(**family.batch(0)).loss.backward()
    stage.model.norm.weight.grad = None
    with pytest.raises(WrongNumbersError, match="gradient of model.norm.weight: error 1"):
        require_equal_gradients(family, [stage], whole)


def raised(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (CutError("a value crosses"), "unsupported"),
        (raised(PipelineError("rank 0"), P2PUsageError("not contiguous")), "unsupported"),
        (raised(PipelineError("rank 0"), raised(CutError("no"), RuntimeError("meta"))), "unsupported"),
        (raised(PipelineError("rank 0"), RuntimeError("sizes differ")), "crash"),
        (raised(PipelineError("rank 0"), TimeoutError("10 s")), "crash"),
        (raised(PipelineError("rank 0"), P2PPeerError("rank 1 has ended")), "stopped"),
        (JobFailedError("rank 1 has failed"), "stopped"),
        (ValueError("of the model"), "crash"),
    ],
)
def test_only_a_typed_error_that_says_what_does_not_fit_is_a_refusal(error, word):
    assert outcome_of_error(error).word == word


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["right", "right"], "right"),
        (["unsupported", "stopped"], "unsupported"),
        (["stopped", "unsupported"], "unsupported"),
        (["fails alone", "fails alone"], "fails alone"),
        (["right", "stopped"], "crash"),
        (["right", None], "crash"),
        (["unsupported", "crash"], "crash"),
        (["unsupported", "WRONG"], "WRONG"),
    ],
)
def test_a_cell_is_as_bad_as_its_worst_rank(words, word):
    found = {rank: Outcome(one) for rank, one in enumerate(words) if one}
    assert together(found, len(words), 5.0).word == word


@pytest.mark.thorough
def test_a_rank_that_hangs_or_dies_fails_its_cell_alone(outcomes):
    assert [(column, word) for (_, column), word, _ in outcomes[1]] == [
        ("fine", "right"),
        ("hang", "crash"),
        ("fine", "right"),
        ("die", "crash"),
        ("wrong", "WRONG"),
        ("fine", "right"),
    ]


def test_the_table_counts_its_cells_and_lists_each_refusal_once():
    error = "`CutError`: layerdrop is above 0"
    outcomes = {
        ("A", "1F1B"): Outcome("right"),
        ("A", "ZB-V"): Outcome("unsupported", error),
        ("B", "1F1B"): Outcome("right", "layout is not proved"),
        ("B", "ZB-V"): Outcome("unsupported", error),
    }
    text = table(outcomes)
    assert ": 2 families, 4 cells, 2 right, 2 unsupported." in text
    assert text.count(error) == 1
    assert rows_of(text) == {
        "family": ["1F1B", "ZB-V"],
        "A": ["right", "unsupported"],
        "B": ["right, not proved", "unsupported"],
    }


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a is 3; it must be 4. Give 4", "a is 3"),
        ("values cross:\n  float32 (3,) made by mm\nprint(x) shows all", "values cross: float32 (3,) made by mm"),
        ("rope 0.5 is odd", "rope 0.5 is odd"),
        ("", ""),
    ],
)
def test_the_first_sentence_of_an_error(text, first):
    assert first_sentence(text) == first
