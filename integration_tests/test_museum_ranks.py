"""The table of the museum of hangs on ranks: what the page says hangs does, at its deadline, with each rank's place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .kit.museum import BACKENDS, stuck_at, table

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent
SESSIONS = 2
CELLS = {f"{name}/{model}": verdict for (name, model), verdict in table().items() if model in BACKENDS}


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of each cell that is selected, the text of its failure; "" where its ranks came to the end of their orders.

    In a few sessions side by side: a hang only waits for its deadline.
    """
    items = [item for item in request.session.items if item.module is request.module]
    cells = [item.callspec.params["cell"] for item in items if "outcomes" in item.fixturenames]
    shares = [share for number in range(SESSIONS) if (share := cells[number::SESSIONS])]
    with ThreadPoolExecutor(SESSIONS) as pool:
        found = pool.map(_ends, shares, [tmp_path_factory.mktemp("museum") for _ in shares])
        return {cell: text for share in found for cell, text in share.items()}


def _ends(cells, directory):
    """The same of ``cells``, in one session of pytest."""
    report = directory / "out.xml"
    shutil.copy(HERE / "museum_ranks.py", directory / "test_orders.py")
    settings = ("addopts = --import-mode=importlib", "ranks_preload = kit.museum anyio.pytest_plugin")
    (directory / "pytest.ini").write_text("\n".join(["[pytest]", *settings]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *(f"test_orders.py::test_orders[{cell}]" for cell in cells),
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        timeout=1800,  # against a hang of the session, not of a cell
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):
        name = re.fullmatch(r"test_orders\[(.*)\]", case.get("name"))[1]
        found[name] = "\n".join(child.get("message", "") + (child.text or "") for child in case.iter("failure"))
        assert case.find("error") is None, done.stdout
    return found


def _nightly(cell):
    """Not in every run: cells of other models where a hang is as under nccl2, and what ends on gloo, but for one."""
    name, model = cell.split("/")
    hang = name.removesuffix("-mended")
    if model == "gloo":
        in_every_run = CELLS[cell] != "ends" or name == "pytorch-172668-a"
    else:
        in_every_run = model == "nccl2" or CELLS[f"{hang}/{model}"] != CELLS[f"{hang}/nccl2"]
    return [] if in_every_run else [pytest.mark.nightly]


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=_nightly(cell)) for cell in CELLS])
def test_ranks_end_or_hang_as_the_table_of_the_page_says(cell, outcomes):
    text = outcomes[cell]
    if CELLS[cell] == "ends":
        assert text == ""
    elif CELLS[cell] == "crosses":
        assert re.search("crossed: '(activation|gradient) of rank", text)
    else:
        for rank, place in enumerate(stuck_at(*cell.split("/"))):
            assert f"rank {rank}: still running at the deadline, at position '{place}' for " in text


def test_the_table_has_hangs_and_ends_for_each_backend():
    for model in BACKENDS:
        verdicts = [verdict for cell, verdict in CELLS.items() if cell.endswith(f"/{model}")]
        assert {"hangs", "ends", "crosses"} == set(verdicts)
        assert len(verdicts) > 12
