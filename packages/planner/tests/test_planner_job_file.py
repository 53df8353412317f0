"""The page of a job file's keys has those that are read, in their order and with their defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import NOTHING, Factory, fields

from pipegrid.planner import Device, Job, Layers, Measured, ModuleCosts, Network, Training

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "job_file.md"
TABLES = re.findall(r"^## (.+)\n+((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8") + "\n", flags=re.MULTILINE)
CLASSES = {
    "The job": Job,
    "A module": ModuleCosts,
    "Layers": Layers,
    "Measured seconds": Measured,
    "The device": Device,
    "The links": Network,
    "Training": Training,
}


def default_of(attribute):
    """As the page writes it: JSON, or ``required``."""
    if attribute.default is NOTHING:
        return "required"
    table = isinstance(attribute.default, Factory)
    return f"`{json.dumps({} if table else attribute.default)}`"


def test_every_class_has_a_table():
    assert [title for title, _ in TABLES] == list(CLASSES)


@pytest.mark.parametrize(("title", "table"), TABLES)
def test_the_keys_are_those_that_are_read(title, table):
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    expected = [(f"`{each.name}`", default_of(each)) for each in fields(CLASSES[title])]
    assert [(key, default) for key, default, *_ in rows] == expected
