"""Examples in docstrings: each runs with its package alone, and every name in the table of a reference page has one."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
LINES = 5
# An example finds the public names of its package; it leaves no process group to the next one.
RUN = """
import doctest, importlib, inspect, sys

package = importlib.import_module("pipegrid.{package}")
public = {{name: getattr(package, name) for name in package.__all__}}
runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
for name, one in public.items():
    if (inspect.isclass(one) or inspect.isroutine(one)) and one.__module__.startswith(package.__name__):
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(one) or "", dict(public), name, None, 0)
        runner.run(test)
        if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
            sys.modules["torch.distributed"].destroy_process_group()
assert not runner.failures
print(runner.tries)
"""
ROW = re.compile(r"^\| \[`(\w+)`\]\[([\w.]+)\] \| (.+) \|$", re.MULTILINE)


def public_names(package):
    """The classes and functions that a package offers."""
    module = importlib.import_module(f"pipegrid.{package}")
    offered = {name: getattr(module, name) for name in module.__all__}
    return {name: one for name, one in offered.items() if inspect.isclass(one) or inspect.isroutine(one)}


def code_of(one):
    """The lines of code of a docstring's example."""
    return re.findall(r"^ *(?:>>>|\.\.\.) .+", inspect.getdoc(one) or "", re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_of_a_package_run_with_what_it_declares(package, run_alone):
    assert int(run_alone(ROOT / "packages" / package, RUN.format(package=package)).splitlines()[-1]) > 0


@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_begins_with_the_most_used_names_and_each_has_an_example(package):
    page = ROOT / "docs" / "reference" / f"{package}.md"
    offered = public_names(package)
    rows = ROW.findall(page.read_text())
    plain = [one for one in offered.values() if not getattr(one, "_is_protocol", False)]
    values = [one for one in plain if not (inspect.isclass(one) and issubclass(one, Exception))]
    assert min(10, len(values)) <= len(rows) <= 10
    for name, target, text in rows:
        assert name in offered
        assert target.rpartition(".")[2] == name
        link = re.search(r"\(([^)\s]+\.md)\)$", text)
        if link is None:
            assert code_of(offered[name]), f"{package}.{name} has no example"
        else:  # it takes several ranks: a page has it
            assert re.search(rf"\b{name}\b", (page.parent / link[1]).read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_an_example_has_at_most_five_lines(package):
    assert {name: code_of(one) for name, one in public_names(package).items() if len(code_of(one)) > LINES} == {}
