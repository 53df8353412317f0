"""docs/how_to: each page is one sentence, a script of at most 40 lines that runs, and what it prints.

Scripts with ranks run on the pool of ranks in every run, and all scripts by their own command line at night.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from .kit import programs

FOLDER = Path(__file__).parents[1] / "docs" / "how_to"
COMMAND = re.compile(r"^    ((?:torchrun --nproc-per-node (\d)|python) ?([\w-]+\.py)(.*))$", re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
SECONDS = re.compile(r"\d+\.\d+s\b")  # what pytest took


def page(name):
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def script(name):
    """The script of a page, its arguments, the number of its ranks (0: no ranks), and what it prints."""
    text = page(name)
    (code,), (said,) = programs.blocks(text), programs.blocks(text, "text")
    ((_, ranks, file, arguments),) = COMMAND.findall(text)
    assert file == f"{name}.py"
    return code, shlex.split(arguments), int(ranks or 0), said


NAMES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
# At night alone: they compile, search, start a pytest of their own, or load what no other test needs on as many ranks.
SLOW = {"compile", "encoder_and_language", "evaluate_and_generate", "fsdp", "lora", "moe", "pretrained_70b"}
SLOW |= {"choose_a_schedule", "different_dp", "fits", "ragged_batches"}
SLOW |= {"save_and_resume", "tensor_parallel", "test_on_ranks", "low_precision", "muon", "resume_data", "config_file"}
RANKS = {name: script(name)[2] for name in NAMES if name not in SLOW}
ALONE = [name for name, ranks in RANKS.items() if not ranks]
PINNED = {"environment": {"backend": "gloo"}}  # it prints the name of its backend
ON_RANKS = [
    pytest.param(name, marks=pytest.mark.ranks(ranks, deadline=240, **PINNED.get(name, {})))
    for name, ranks in RANKS.items()
    if ranks
]


def lines(text):
    """Lines without spaces at their ends; ranks print in any order, so lines that begin with a rank are sorted."""
    found = [line.rstrip() for line in SECONDS.sub("", text).strip().splitlines()]
    ranked = iter(sorted(line for line in found if line.startswith("rank ")))
    return [next(ranked) if line.startswith("rank ") else line for line in found]


def compare(printed, said):
    """The same words and whole numbers; fractions within 2%, as another machine may round them."""
    for line, expected in zip(lines(printed), lines(said), strict=True):
        assert NUMBER.sub("#", line) == NUMBER.sub("#", expected)
        found = [float(number) for number in NUMBER.findall(line)]
        assert found == pytest.approx([float(number) for number in NUMBER.findall(expected)], rel=0.02, abs=1e-3)


def run_here(name, own, folder, monkeypatch):
    """Run the script in ``folder``, from a file of this rank alone: a file that another rank writes may be empty."""
    code, arguments, _, _ = script(name)
    file = own / f"{name}.py"
    file.write_text(code, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [file.name, *arguments])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")  # as outside of pytest
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_a_sentence_a_short_script_what_it_prints_and_links(name):
    text = page(name)
    _, title, sentence, rest = re.split(r"^# (.+)\n\n((?:.+\n)+)\n", text, maxsplit=1)
    assert rest.startswith("```python\n"), "the script follows the sentence"
    assert sentence.startswith("You get ")
    assert len(re.findall(r"[.:](?:\s|$)", sentence)) <= 2
    code, _, _, said = script(name)
    assert said.strip()
    assert len(code.splitlines()) <= 40
    assert max(map(len, code.splitlines())) <= 120
    assert re.search(r"\]\(\.\./concepts/|\]\(\.\./[\w/]+\.md", rest), "a link to the concept"
    assert f"[{title}]({name}.md)" in page("index")


@pytest.mark.parametrize("name", ALONE)
def test_a_script_prints_what_the_page_says(name, tmp_path, monkeypatch):
    compare(run_here(name, tmp_path, tmp_path, monkeypatch), script(name)[3])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_script_on_ranks_prints_what_the_page_says(name, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)  # the fixture has done it
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: None)
    printed = [None] * ranks.world_size
    dist.all_gather_object(printed, run_here(name, tmp_path, ranks.shared_path, monkeypatch))
    compare("".join(printed), script(name)[3])


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_as_it_is_started(name, tmp_path):
    code, arguments, ranks, said = script(name)
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    launch = partial(programs.torchrun, ranks) if ranks else programs.run
    done = launch(f"{name}.py", *arguments, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    compare(done.stdout, said)


@pytest.mark.parametrize("name", ["from_megatron", "from_torch_pipelining"])
def test_every_name_of_pipegrid_in_a_table_is_one(name):
    packages = FOLDER.parents[1] / "packages"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in packages.glob("*/src/**/*.py"))
    known = set(re.findall(r"\w+", sources)) | {"make_model"}
    rows = re.findall(r"^\| (?:[^|]|\\\|)+ \| ((?:[^|]|\\\|)+) \|", page(name), re.MULTILINE)[2:]
    assert len(rows) > 10
    used = {word for row in rows for quoted in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", quoted)}
    assert {word for word in used if len(word) > 3 and word not in known} == set()
