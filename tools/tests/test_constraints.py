"""What is pinned is all that a session installs; the table of other releases counts what touches each."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from constraints import (  # noqa: E402  -- a script beside this folder, not an installed package
    FILE,
    MARKS,
    MODULE,
    PAGE,
    TOUCHING,
    declared,
    failures,
    install_table,
    lowest,
    module_table,
    name_of,
    pins,
    requirements,
    table,
    to_test,
    touching,
)


def test_all_that_a_session_installs_is_pinned():
    needed = {name_of(one) for one in requirements((ROOT / "noxfile.py").read_text())}
    assert {"torch", "attrs", "hatchling", "editables", "nbclient", "ruff", "zensical", "pyside6-webengine"} <= needed
    pinned = pins(FILE.read_text())
    assert needed <= pinned.keys(), "run python tools/constraints.py"
    assert {"pluggy", "filelock", "sympy", "griffelib"} <= pinned.keys(), "what these need is pinned as well"
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pinned.values())


def test_the_page_has_the_versions_that_are_pinned():
    pinned = pins(FILE.read_text())
    made = install_table(pinned)
    assert re.search(r"^\| transformers \| >=(5\.\d+) \| \1 to 5\.\d+ \| 5\.\d", made, re.MULTILINE)
    for path, text in ((PAGE, made), (MODULE, module_table(pinned))):
        begin, end = MARKS[path]
        assert f"{begin}{text}{end}" in path.read_text(), "run python tools/constraints.py"


def test_a_new_requirement_of_a_session_is_seen():
    made = 'EVERY_TEST = ("pytest", "newcomer")\ndef one(session):\n    install(session, ALL, "late", *EVERY_TEST)\n'
    assert {"newcomer", "late"} <= requirements(made)


def test_lowest_versions_are_those_of_the_metadata():
    assert lowest()["torch"] == "2.11"
    assert lowest()["cattrs"] == "24.1"
    assert "numpy" not in lowest()


def test_the_table_counts_the_cases_that_touch_a_dependency(tmp_path):
    pinned = pins(FILE.read_text())
    installed = {**pinned, "rich": "99.0", "hypothesis": "99.0", "torch": "3.0"}
    files = to_test(installed, {"torch"})
    assert set(files) == {"rich", "hypothesis"}
    smallest = next(path for path in files["hypothesis"] if "packages/layout/" in path.as_posix())
    assert "hypothesis" in smallest.read_text()
    (rich, *_) = files["rich"]
    one, other = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (rich, smallest))
    junit = tmp_path / "cases.xml"
    junit.write_text(
        "<testsuites><testsuite>"
        f'<testcase classname="{one}" name="a"/>'
        f'<testcase classname="{one}.TestIt" name="b"><failure/></testcase>'
        f'<testcase classname="" name="{other}"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    rows = table("newest", installed, {"torch"}, junit).splitlines()
    assert f"| rich | {pinned['rich']} | 99.0 | 2 | 1 |" in rows
    assert f"| hypothesis | {pinned['hypothesis']} | 99.0 | 1 | 1 |" in rows
    assert f"| torch | {pinned['torch']} | 3.0 (held back) | not run | 0 |" in rows
    assert f"| attrs | {pinned['attrs']} | {pinned['attrs']} | as tested | 0 |" in rows
    assert failures(junit) == 2


def test_what_touches_a_dependency_is_there():
    for name, stems in TOUCHING.items():
        assert len(touching(name, ())) == len(stems), f"{name}: a file of tests was renamed, or two have one name"
    needed = {name_of(one) for needs in declared().values() for one in needs}
    assert TOUCHING.keys() <= needed


def test_each_night_runs_with_the_newest_and_the_oldest_releases(monkeypatch):
    sessions = {}

    def session(function=None, *, name=None, **_options):
        if function is None:
            return lambda function: session(function, name=name)
        sessions[name or function.__name__] = function
        return function

    # The session that runs this test has no nox.
    monkeypatch.setitem(sys.modules, "nox", SimpleNamespace(session=session, options=SimpleNamespace()))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path = ROOT / "noxfile.py"
    names = {"__file__": str(path), "__name__": "noxfile"}
    exec(compile(path.read_text(), path, "exec"), names)
    names["install"] = lambda *_: None
    notified = []
    given = SimpleNamespace(posargs=["-k", "one"], run=lambda *_: None)
    given.notify = lambda name, posargs: notified.append((name, posargs))
    sessions["nightly"](given)
    assert notified == [("newest", []), ("oldest", [])], "without the options of the other session's pytest"
    assert {"newest", "oldest"} <= sessions.keys()


@pytest.mark.parametrize(("given", "name"), [("PyYAML>=6", "pyyaml"), ("mkdocstrings[python]", "mkdocstrings")])
def test_names_are_normalized(given, name):
    assert name_of(given) == name
