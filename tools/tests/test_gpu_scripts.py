"""The scripts of a GPU session: valid shell, and a dry run of each that measures something on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ("packages/*/tests", "integration_tests", "tools/tests")
SCRIPTS = sorted((ROOT / "tools/gpu").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_shell_documented_and_bounded(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert script.name == "common.sh" or f"| `{script.name}" in (ROOT / "tools/gpu/README.md").read_text()
    seconds = [int(limit) for limit in re.findall(r"^ *(?:[A-Z_]+='' )?(?:run|tests) (\d+) ", text, re.MULTILINE)]
    assert sum(seconds) <= 600


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("1_facts.sh", ("exchange 4 of 1 MB", "split backwards (ZB-H1)")),
        ("2_transport.sh", ("test_two_ranks_over_nccl",)),
        pytest.param("3_integration.sh", ("3 passed",), marks=pytest.mark.nightly),  # 0_staged.sh with another backend
        pytest.param(  # its benches run in every run, too
            "5_survive.sh", ("2 x 2, rank 3 killed at its second B: again after",), marks=pytest.mark.nightly
        ),
        pytest.param("4_ratios.sh", ("overlap/after",), marks=pytest.mark.nightly),
        ("0_staged.sh", ("3 passed",)),
        ("6_trace.sh", ("1f1b-computing-stream-rank-1.json",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dry_run_measures_something(tmp_path, script, printed):
    done = subprocess.run(
        ["bash", str(ROOT / "tools/gpu" / script)],
        env={
            **os.environ,
            "DRY_RUN": "1",
            "OUT": str(tmp_path),
            "KEPT": str(tmp_path / "kept"),
            "PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # A ratio may miss its bound here, where nothing is measured in earnest.
    assert done.returncode == 0 or script == "4_ratios.sh", done.stdout + done.stderr
    assert all(text in done.stdout for text in printed)
    assert (tmp_path / script.replace(".sh", ".log")).stat().st_size


def spin(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "tools/gpu",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@pytest.mark.thorough
def test_a_dry_run_of_the_spinning_kernel_answers_every_question():
    """With calls that wait as is assumed: a row's answer is what it assumes."""
    rows = [line.strip("| ").split(" | ") for line in spin("7_spin.py", DRY_RUN="1").splitlines() if line[:1] == "|"]
    assert len(rows) > 35
    assumed = [(answer, last.strip(" |")) for _, answer, *rest in rows[2:] for last in rest if last.strip(" |")]
    assert {word for _, word in assumed} == {"waits", "returns"}
    assert all(answer.startswith(word) for answer, word in assumed)
    source = (ROOT / "tools/gpu/7_spin.py").read_text()
    questions = re.findall(r'^    "(.*)": (?:WAITS|RETURNS|""),$', source, re.MULTILINE)
    assert len(questions) > 12
    assert all(source.count(f'"{question}"') > 1 for question in questions)  # each has a call for a GPU
    assert f"| `{'7_spin.py'}`" in (ROOT / "tools/gpu/README.md").read_text()


@pytest.mark.thorough
def test_what_is_packed_holds_the_library_under_the_name_that_the_scripts_look_for(tmp_path):
    (tmp_path / "some.xz").write_bytes(b"x")
    subprocess.run(
        ["bash", str(ROOT / "tools/gpu/pack.sh"), str(tmp_path / "carried"), str(tmp_path / "some.xz")],
        env={**os.environ, "DRY_RUN": "1"},
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "carried/libnccl.so.2.xz").exists()


def test_the_tests_that_the_pages_on_gpus_name_exist():
    pages = ("docs/concepts/gpus.md", "tools/gpu/README.md")
    named = {name for page in pages for name in re.findall(r"`(test_\w+)(?:\.py)?`", (ROOT / page).read_text())}
    files = [path for folder in TESTS for path in ROOT.glob(f"{folder}/**/test_*.py")]
    known = {path.stem for path in files}
    for path in files:
        known |= set(re.findall(r"def (test_\w+)\(", path.read_text()))
    assert len(named) > 50
    assert named <= known


@pytest.mark.thorough
def test_the_transport_that_works_outlives_the_folder_of_results(tmp_path):
    """Which is a new one for each script, where results are brought home from another machine."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "transport.env").write_text("NCCL_P2P_DISABLE=1\nNCCL_SOCKET_IFNAME=lo\n")
    source = f'. "{ROOT}/tools/gpu/common.sh"; echo "$NCCL_P2P_DISABLE $NCCL_SOCKET_IFNAME"'
    done = subprocess.run(
        ["bash", "-c", source],
        env={**os.environ, "DRY_RUN": "1", "OUT": str(tmp_path / "new"), "KEPT": str(kept)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1 lo\n"


@pytest.mark.thorough
def test_the_machines_own_plugins_and_warnings_do_not_stop_the_tests(tmp_path):
    """A plugin that warns as soon as it is loaded, as those of other projects on the machine do."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/loud_plugin.py").write_text("import warnings\nwarnings.warn('old', DeprecationWarning)\n")
    info = tmp_path / "other/loud-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pytest11]\nloud = loud_plugin\n")
    (tmp_path / "test_loud.py").write_text("import warnings\ndef test_loud():\n    warnings.warn('mine')\n")
    source = f'. "{ROOT}/tools/gpu/common.sh"; "$PYTHON" -m pytest "${{pytest[@]}}" -c pyproject.toml {tmp_path}'
    done = subprocess.run(
        ["bash", "-c", source],
        env={
            **os.environ,
            "DRY_RUN": "1",
            "OUT": str(tmp_path / "out"),
            "KEPT": str(tmp_path / "kept"),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(tmp_path / "other"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "loud" not in re.sub(r".*test_loud.*", "", done.stdout)
