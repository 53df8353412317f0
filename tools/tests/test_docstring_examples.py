"""Examples in docstrings: every public class and function has one, which runs with its package alone.

Its own, or that of another name of the package which takes, makes or returns it: `from_csv(to_csv(plan))` shows both.
What takes several ranks, or torch in a package that is used without, has its example on a page, to which its row of the
reference's table links.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
LINES = 5
# An example finds the public names of its package, and runs with the one that it is from if that offers it; it leaves
# no process group to the next one.
RUN = """
import doctest, importlib, inspect, sys

package = importlib.import_module("pipegrid.{package}")
public = {{name: getattr(package, name) for name in package.__all__}}
runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
for name, one in public.items():
    if inspect.isclass(one) or inspect.isroutine(one):
        home = importlib.import_module(".".join(one.__module__.split(".")[:2]))
        if home is not package and one in (getattr(home, each) for each in home.__all__):
            continue
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


@pytest.mark.few(4)
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


def shown_in(package):
    """The words in the code and the results of a package's examples."""
    examples = (
        example
        for one in public_names(package).values()
        for example in doctest.DocTestParser().get_examples(inspect.getdoc(one) or "")
    )
    return set(re.findall(r"\w+", "".join(example.source + example.want for example in examples)))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package):
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    on_pages = {name for name, _, text in ROW.findall(page) if ".md)" in text}
    own = {name for name, one in public_names(package).items() if code_of(one)}
    assert sorted(public_names(package).keys() - own - shown_in(package) - on_pages) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_an_example_has_at_most_five_lines(package):
    assert {name: code_of(one) for name, one in public_names(package).items() if len(code_of(one)) > LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_a_reference_page_lists_is_there(package):
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    for module, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", page, re.MULTILINE):
        members = re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
        assert [name for name in members if not hasattr(importlib.import_module(module), name)] == []
