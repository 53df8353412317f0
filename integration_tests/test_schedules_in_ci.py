"""The check for other projects' CI: the action's steps as a runner runs them, the hook, what is installed for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import venv
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action" / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
BAD = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
PLANNING = ("core", "plans", "timeline", "search")


def run_step(name, folder, **given):
    """Run a step as a composite action does, in ``folder``, with this Python first on the path."""
    (step,) = (one for one in ACTION["runs"]["steps"] if one["name"] == name)
    inputs = {key: value.get("default", "") for key, value in ACTION["inputs"].items()} | given
    values = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: inputs[m[1]], text) for key, text in step["env"].items()
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sources = os.pathsep.join(str(ROOT / "packages" / one / "src") for one in PLANNING)
    environment = {**os.environ, "PATH": path, "PYTHONPATH": sources, **values}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "good.csv").write_text(GOOD)
    return tmp_path


def test_the_actions_step_passes_on_good_files_and_fails_on_a_bad_one(project):
    done = run_step("Verify", project, files="schedules/*.csv")
    assert done.returncode == 0, done.stderr
    (project / "schedules" / "bad.csv").write_text(BAD)
    done = run_step("Verify", project, files="schedules/*.csv", options="--order nccl2", report="out")
    assert done.returncode == 1
    assert "2 positions wait for each other in a cycle" in done.stderr
    assert sorted(path.name for path in (project / "out").iterdir()) == ["bad.svg", "junit.xml"]
    assert ET.parse(project / "out" / "junit.xml").getroot()[0].get("failures") == "1"


def test_the_artifact_is_the_folder_of_the_report():
    install, verify, report = ACTION["runs"]["steps"]
    assert install["if"] == "inputs.install != ''"
    assert report["if"] == "always()"
    assert report["with"]["path"] == verify["env"]["REPORT"] == "${{ inputs.report }}"


def test_the_hook_verifies_the_files_that_it_is_given(project):
    (project / "schedules" / "bad.csv").write_text(BAD)
    pattern = re.compile(HOOK["files"])
    files = [
        name
        for name in ("schedules/good.csv", "schedules/bad.csv", "src/good.csv", "schedules/a.py")
        if pattern.search(name)
    ]
    assert files == ["schedules/good.csv", "schedules/bad.csv"]
    command = [sys.executable, *HOOK["entry"].split()[1:]]
    assert subprocess.run([*command, files[0]], cwd=project, capture_output=True, check=False).returncode == 0
    assert subprocess.run([*command, *files], cwd=project, capture_output=True, check=False).returncode == 1


def test_what_is_installed_for_it_needs_attrs_and_cattrs_alone():
    needs = set()
    for name in PLANNING:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
        needs |= {re.split(r"[<>=~\[ ]", need)[0] for need in project["dependencies"]}
    assert needs == {"attrs", "cattrs", *(f"pipegrid-{name}" for name in PLANNING if name != "search")}


@pytest.mark.nightly
def test_it_runs_in_an_environment_with_nothing_else(project, record_property):
    begun = time.monotonic()
    venv.create(project / "env", with_pip=True)
    python = project / "env" / "bin" / "python"
    folders = [str(ROOT / "packages" / name) for name in PLANNING]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *folders], check=True)
    record_property("installed in", f"{time.monotonic() - begun:.1f} s")
    command = [python, "-m", "pipegrid.search", "verify", "schedules/good.csv"]
    assert subprocess.run(command, cwd=project, capture_output=True, check=False).returncode == 0
    found = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout
    names = {line.partition("==")[0].lower().replace("_", "-") for line in found.split()} - {"pip", "setuptools"}
    assert names == {"attrs", "cattrs", "typing-extensions", *(f"pipegrid-{name}" for name in PLANNING)}
