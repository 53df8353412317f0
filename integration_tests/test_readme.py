"""The scripts of the README and the tutorial are those in docs/examples, and they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from digit_reader.command_line import parse_options
from digit_reader.opening import opening
from pipegrid.schedules.__main__ import main

from .kit.programs import blocks, torchrun

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "two_modules.py"
FIRST = ROOT / "docs" / "examples" / "quickstart.py"


@pytest.mark.parametrize("page", ["README.md", "docs/first_run.md"])
def test_the_page_shows_the_script_that_runs(page):
    (shown,) = blocks((ROOT / page).read_text())
    assert FIRST.read_text().split('"""\n', 1)[1].strip() == shown.strip()


def test_the_page_of_the_first_run_shows_the_plan_that_it_prints():
    text = opening(parse_options([]))
    page = (ROOT / "docs" / "examples" / "digit_reader" / "README.md").read_text()
    (shown,) = re.findall(r"```text\n(images.*?)\nlargest relative difference", page, flags=re.DOTALL)
    assert text.endswith(shown)


def test_the_first_run_shows_the_plan_that_its_command_prints(capsys):
    text = (ROOT / "docs" / "first_run.md").read_text()
    ((arguments, shown),) = re.findall(
        r"^    python -m pipegrid.schedules (.*)\n\n```text\n(.*?)```", text, re.MULTILINE | re.DOTALL
    )
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out.strip() == shown.strip()


def test_the_tutorial_shows_the_script_that_runs():
    shown, *_ = blocks((ROOT / "docs" / "tutorial.md").read_text())
    assert SCRIPT.read_text().split('"""\n', 1)[1].strip() == shown.strip()


@pytest.mark.parametrize(
    "script", [pytest.param(FIRST, marks=pytest.mark.thorough), SCRIPT], ids=lambda path: path.stem
)
def test_the_script_trains(script, request):
    if script == SCRIPT:  # the other by interpreters, as it is started after the README
        request.getfixturevalue("warm_ranks")
    done = torchrun(4, script)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
