"""For the tests of every package: settings of hypothesis, name lookups, READMEs, and what the fake NCCL stands for."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# The process of a TCPStore looks up the name of each that connects, and answers nobody meanwhile: where no name server
# answers, 5 s and more at a time, which is beyond deadlines of tests. Read by glibc; ranks and scripts inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The contract session has tests without properties, and no hypothesis.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Time never decides a test: on a fresh machine the first text drawn builds a table for a second.
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("day", slow, max_examples=20)
    settings.register_profile("thorough", slow, max_examples=50)
    settings.register_profile("night", slow, max_examples=200, derandomize=False)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "day"))


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of a test that are not by day: behind the first few, or with pairs of values that others have."""
    tests: dict[tuple[pytest.Item | pytest.Collector | None, str], list[Any]] = {}
    for item in items:
        marked = item.get_closest_marker("few") or item.get_closest_marker("pairs")
        if marked is not None and item.get_closest_marker("nightly") is None:
            tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for cases in tests.values():
        few = cases[0].get_closest_marker("few")
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        by_day = pairs(values) if few is None else range(few.args[0])
        for case in (case for place, case in enumerate(cases) if place not in by_day):
            case.add_marker("thorough")


def pairs(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Which of ``cases``, by number, have every value and every pair of values of two axes that any case has."""
    left = [set(itertools.combinations(sorted(case.items()), min(2, len(case)))) for case in cases]
    chosen = []
    while any(left):
        best = max(range(len(cases)), key=lambda place: len(left[place]))
        chosen.append(best)
        left = [own - left[best] for own in left]
    return chosen


@pytest.fixture(autouse=True)
def _fake_nccl2_is_known_as_nccl2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake NCCL in mode nccl2 or lazy has that backend's record in the table, where its name is not known."""
    if request.node.get_closest_marker("ranks") is None or find_spec("pipegrid.transport") is None:
        return
    device = request.getfixturevalue("ranks").fake_device
    if device is not None and device.nccl2 is not None:
        import attrs

        from pipegrid.transport.backends import kinds

        like = kinds.kind_of("nccl-lazy" if device.lazy else "nccl2")
        kind = attrs.evolve(like, name="fake_nccl", devices=("cpu",), options=False)
        monkeypatch.setitem(kinds._KINDS, "fake_nccl", kind)  # noqa: SLF001 -- as torch made it


# Before the example of a README: nothing can be imported but the package and what its metadata declares, and so on.
_ALONE = """
import importlib.abc, sys


class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        package, _, rest = name.partition(".")
        allowed = rest.split(".")[0] in {ours!r} if package == "pipegrid" and rest else package not in {foreign!r}
        if not allowed:
            raise ModuleNotFoundError(f"{{name}} is not in this project", name=name)


sys.meta_path.insert(0, Alone())
"""


def _with_its_needs(folder: Path) -> str:
    """Code after which nothing can be imported of pipegrid and torch but the package in ``folder`` and its needs."""
    names, left = {f"pipegrid-{folder.name}"}, [folder.name]
    while left:  # what it declares, and what that declares in turn
        path = folder.parent / left.pop() / "pyproject.toml"
        needs = tomllib.loads(path.read_text())["project"]["dependencies"]
        new = {re.match(r"[\w-]+", need)[0] for need in needs} - names  # type: ignore[index]
        left += [name.removeprefix("pipegrid-") for name in new if name.startswith("pipegrid-")]
        names |= new
    ours = {name.removeprefix("pipegrid-") for name in names if name.startswith("pipegrid-")}
    foreign = {"torch", "numpy", "rich", "matplotlib"} - names - ({"numpy"} if "torch" in names else set())
    return _ALONE.format(ours=ours, foreign=foreign)


@pytest.fixture
def run_alone(tmp_path: Path) -> Callable[[Path, str], str]:
    """Runs code in a folder of its own with the package in ``folder`` and its needs alone; what it prints."""

    def run(folder: Path, code: str) -> str:
        (tmp_path / "example.py").write_text(_with_its_needs(folder) + code)
        done = subprocess.run(
            [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def readme_example(request: pytest.FixtureRequest, run_alone: Callable[[Path, str], str]) -> str:
    """What the last example of the package's README prints."""
    folder = next(parent for parent in request.path.parents if parent.parent.name == "packages")
    code = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)[-1]
    return run_alone(folder, code)
