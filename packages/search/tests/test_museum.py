"""The museum of hangs: every command of the page prints what the page says, and every file is on it."""

import re
import shlex
from pathlib import Path

import pytest

from pipegrid.search.__main__ import main

ROOT = Path(__file__).parents[3]
MUSEUM = ROOT / "docs" / "museum"
PAGE = (MUSEUM / "index.md").read_text()
COMMANDS = re.findall(r"```console\n\$ python -m pipegrid\.schedules (.*)\n((?:.*\n)*?)```", PAGE)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_says(command, output, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(shlex.split(command))
    printed = capsys.readouterr()
    assert printed.out + printed.err == output


def test_the_page_shows_every_file():
    shown = {Path(word).name for command, _ in COMMANDS for word in shlex.split(command) if word.endswith(".json")}
    assert shown == {path.name for path in MUSEUM.glob("*.json")}


@pytest.mark.parametrize("picture", re.findall(r"^!\[[^]]+\]\(([\w-]+)\.svg\)$", PAGE, re.MULTILINE))
def test_a_picture_is_what_the_command_above_it_draws(picture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command = next(words for words, _ in COMMANDS if f"/{picture}.json" in words)
    drawn = tmp_path / "picture.svg"
    assert main([*shlex.split(command), "--svg", str(drawn)]) == 1
    assert drawn.read_text(encoding="utf-8") == (MUSEUM / f"{picture}.svg").read_text(encoding="utf-8")
    assert "never ends" in drawn.read_text(encoding="utf-8")
    assert capsys.readouterr().err.startswith("deadlock under")


@pytest.mark.parametrize(
    "row",
    re.findall(r"^\| ([\w-]+) \|((?: (?:ends|hangs|crosses) \|){6})$", PAGE, re.MULTILINE),
    ids=lambda row: row[0],
)
def test_the_table_says_under_which_models_a_hang_hangs(row, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, cells = row
    models = ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial", "nccl-connecting", "gloo")
    for model, verdict in zip(models, cells.strip(" |").split(" | "), strict=True):
        status = main(["verify", f"docs/museum/{name}.json", "--order", model])
        rule = re.search(r"\[(\w+)\]", capsys.readouterr().err)
        found = {None: "ends", "cycle": "hangs", "order": "crosses"}[rule and rule[1]]
        assert (found, status) == (verdict, int(verdict != "ends"))
