"""The report on the code base counts what it says, and runs."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "house.py"


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", HOUSE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_circle_is_named_one_of_imports_for_types_too(house, tmp_path):
    texts = {
        "p.a": "import p.b",
        "p.b": "def later():\n    from p.c import name",
        "p.c": "import p.a",
        "p.d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.e",
        "p.e": "import p.d",
        "p.f": "from p.f.one import name",
        "p.f.one": "from p.g import name",
        "p.f.two": "",
        "p.g": "from p.g.one import name",
        "p.g.one": "import p.f.two",
    }
    modules = {}
    for name, text in texts.items():
        modules[name] = tmp_path / f"{name}.py"
        modules[name].write_text(text)
    assert {frozenset(circle) for circle in house.circles(modules)} == {
        frozenset({"p.a", "p.b", "p.c"}),
        frozenset({"p.d", "p.e"}),
        frozenset({"p.f", "p.g"}),  # of folders, though no file imports itself on any way
    }


def test_each_class_name_means_one_thing(house, tmp_path):
    assert house.twice_named(house.sources()) == []
    for name in ("one", "two"):
        (tmp_path / name).write_text("class Lane: ...\n\nclass _Other" + name + ": ...\n")
    assert house.twice_named({name: tmp_path / name for name in ("one", "two")}) == ["Lane"]


def test_lines_that_only_validate_are_told_from_work(house):
    tree = ast.parse(
        "def check(x):\n    if x < 0:\n        raise ValueError(x)\n\n"  # 3 lines: a validator
        "def root(x):\n    if x < 0:\n        raise ValueError(x)\n    return x**0.5\n\n"  # 2 of 4
        "def both(x):\n    check(x)\n    return root(x)\n"  # 1 of 3
    )
    assert len(house._validating(tree)) == 6
    assert len(house._code_lines(tree)) == 10


@pytest.mark.thorough
def test_the_report_runs():
    result = subprocess.run([sys.executable, HOUSE], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "import circles inside packages" in result.stdout
    assert "frames from step() to the backend's send, bridge" in result.stdout


def test_helpers_are_what_is_no_test(house, tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text("import os\n\n@mark\ndef made():\n    return 1\n\nclass Model: ...\n\ndef test_it():\n    made()\n")
    assert house._helpers(path) == 4
