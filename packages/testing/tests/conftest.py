"""A pytest session of its own, run to its end, for tests of the plugin from outside."""

import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from functools import partial

import attrs
import pytest


@attrs.frozen
class Session:
    """The end of a pytest session: what it printed, and each test's outcome, message and text by name."""

    status: int
    printed: str
    outcomes: dict[str, str]
    texts: dict[str, str]


def run_session(folders: pytest.TempPathFactory, source: str, *options: str, ini: str = "") -> Session:
    directory = folders.mktemp("session")
    # No GPU is offered: these sessions run on gloo, whatever the machine has.
    (directory / "test_inner.py").write_text(textwrap.dedent(source))
    (directory / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib --strict-markers\n"
        "filterwarnings =\n    error\n    ignore:Failed to initialize NumPy:UserWarning\n" + ini
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--junitxml=out.xml",
            "test_inner.py",
            *options,
        ],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,  # against a hang, not a busy machine
        check=False,
    )
    outcomes, texts = {}, {}
    report = directory / "out.xml"
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        found = {child.tag: child.text or child.get("message") or "" for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in found), "passed")
        outcomes[case.get("name")] = outcome
        texts[case.get("name")] = "\n".join(found.values())
    return Session(status=done.returncode, printed=done.stdout, outcomes=outcomes, texts=texts)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run a session: ``session(source, *options, ini="")``."""
    return partial(run_session, tmp_path_factory)
