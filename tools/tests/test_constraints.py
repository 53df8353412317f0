"""What is pinned is all that a session installs; the table of other releases counts what touches each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from constraints import (  # noqa: E402  -- a script beside this folder, not an installed package
    FILE,
    PAGE,
    declared,
    failures,
    install_table,
    lowest,
    name_of,
    pins,
    requirements,
    table,
    to_test,
)


def test_all_that_a_session_installs_is_pinned():
    needed = {name_of(one) for one in requirements((ROOT / "noxfile.py").read_text())}
    assert {"torch", "attrs", "hatchling", "editables", "nbclient", "ruff", "zensical", "pyside6-webengine"} <= needed
    pinned = pins(FILE.read_text())
    assert needed <= pinned.keys(), "run python tools/constraints.py"
    assert {"pluggy", "filelock", "sympy", "griffelib"} <= pinned.keys(), "what these need is pinned as well"
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pinned.values())


def test_the_page_has_the_versions_that_are_pinned():
    made = install_table(pins(FILE.read_text()))
    assert re.search(r"^\| transformers \| >=5\.0 \| \d", made, re.MULTILINE)
    assert made in PAGE.read_text(), "run python tools/constraints.py"


def test_a_new_requirement_of_a_session_is_seen():
    made = 'EVERY_TEST = ("pytest", "newcomer")\ndef one(session):\n    install(session, ALL, "late", *EVERY_TEST)\n'
    assert {"newcomer", "late"} <= requirements(made)


def test_lowest_versions_are_those_of_the_metadata():
    assert lowest()["torch"] == "2.11"
    assert lowest()["cattrs"] == "24.1"
    assert "numpy" not in lowest()


def test_the_table_counts_the_cases_that_touch_a_dependency(tmp_path):
    pinned = pins(FILE.read_text())
    installed = {**pinned, "rich": "99.0", "torch": "3.0"}
    users = to_test(installed, {"torch"})
    assert set(users) == {package for package, needs in declared().items() if "rich" in map(name_of, needs)}
    junit = tmp_path / "cases.xml"
    junit.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="packages.planner.tests.test_a" name="a"/>'
        '<testcase classname="packages.planner.tests.test_a" name="b"><failure/></testcase>'
        '<testcase classname="packages.layout.tests.test_a" name="c"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    rows = table("newest", installed, {"torch"}, junit).splitlines()
    assert f"| rich | {pinned['rich']} | 99.0 | 2 | 1 |" in rows
    assert f"| torch | {pinned['torch']} | 3.0 (held back) | not run | 0 |" in rows
    assert f"| attrs | {pinned['attrs']} | {pinned['attrs']} | as tested | 0 |" in rows
    assert failures(junit) == 2


@pytest.mark.parametrize(("given", "name"), [("PyYAML>=6", "pyyaml"), ("mkdocstrings[python]", "mkdocstrings")])
def test_names_are_normalized(given, name):
    assert name_of(given) == name
