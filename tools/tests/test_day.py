"""What runs by day and what does not: the pages, the sessions, `.ci/run` and the planted mistakes say the same."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
NOXFILE = (ROOT / "noxfile.py").read_text()


def test_the_pages_say_one_number_of_minutes():
    said = {page: re.findall(r"about (\d+) minutes on two cores", (ROOT / page).read_text()) for page in PAGES}
    assert {len(numbers) for numbers in said.values()} == {1}
    assert len({number for (number,) in said.values()}) == 1


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_one_command_in_a_block(page):
    assert re.search(r"^    python -m nox( +#.*)?$", (ROOT / page).read_text(), re.MULTILINE)


def test_the_cpu_seconds_of_a_day_are_those_of_the_session():
    (seconds,) = re.findall(r"^DAY_CPU_SECONDS = (\d+)$", NOXFILE, re.MULTILINE)
    assert (
        f"all of a day have about {int(seconds):,}, and three times that is an error"
        in (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert "if spent > 3 * DAY_CPU_SECONDS:\n        session.error(" in NOXFILE


def test_all_that_is_not_nightly_runs_before_a_merge():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-2:] == [".nox/ci/bin/python -m nox", ".nox/ci/bin/python -m nox -s thorough"]
    (day,), (rest,) = (re.findall(rf'^{name} = "(.*)"$', NOXFILE, re.MULTILINE) for name in ("DAY", "THOROUGH"))
    for marks in ({"thorough"}, {"hypothesis"}, {"thorough", "hypothesis"}, set()):
        chosen = [
            eval(one, {name: name in marks for name in ("nightly", "thorough", "hypothesis")}) for one in (day, rest)
        ]
        assert any(chosen)
        assert chosen[0] is ("thorough" not in marks)


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAIRS = _module(ROOT / "conftest.py").pairs


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, unique=True))
def test_by_day_are_cases_with_every_pair_of_values(values):
    cases = [dict(zip("abc", each, strict=True)) for each in values]
    chosen = PAIRS(cases)
    assert len(set(chosen)) == len(chosen)

    def seen(some):
        return {pair for case in some for pair in itertools.combinations(sorted(case.items()), 2)}

    assert seen(cases[number] for number in chosen) == seen(cases)


def test_a_product_of_three_axes_needs_as_many_cases_as_its_two_longest_have():
    cases = [dict(zip("abc", each, strict=True)) for each in itertools.product(range(4), range(3), range(2))]
    assert len(PAIRS(cases)) == 12
    assert PAIRS([{"a": 1}, {"a": 2}]) == [0, 1]


def test_the_cases_that_are_not_by_day_are_marked(pytester):
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    marks = ["few: first", "pairs: axes", "thorough: rest", "nightly: night"]
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {mark}\n" for mark in marks))
    pytester.makepyfile("""
        import pytest

        @pytest.mark.few(2)
        @pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.nightly), 1, 2, 3])
        def test_few(a): pass

        @pytest.mark.pairs
        @pytest.mark.parametrize("a", "xy")
        @pytest.mark.parametrize("b", "xy")
        @pytest.mark.parametrize("c", "xy")
        def test_pairs(a, b, c): pass
    """)
    pytester.runpytest("-m", "not nightly and not thorough").assert_outcomes(passed=2 + 4, deselected=2 + 4)
    pytester.runpytest("-m", "thorough").assert_outcomes(passed=1 + 4, deselected=3 + 4)


def test_the_planted_mistakes_are_for_the_tests_of_the_day():
    mutations = _module(ROOT / "tools" / "mutations.py")
    assert f'DAY = "{mutations.DAY[-1]}"\n' in NOXFILE
