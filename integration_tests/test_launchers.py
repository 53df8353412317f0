"""docs/launchers.md: every template parses and has what a launcher must give; torchrun's two agents run the script."""

from __future__ import annotations

import ast
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .kit.programs import blocks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "docs" / "examples" / "launchers" / "train.py"
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
NAMES = [name for name in SECTIONS if name not in ("The script", "Which launchers let survivors live")]


def block(name, language):
    (found,) = blocks(SECTIONS[name], language)
    return found


def test_the_page_shows_the_script_that_runs():
    assert block("The script", "python").strip() == SCRIPT.read_text(encoding="utf-8").strip()


def test_the_table_has_every_launcher_and_says_restart_or_survive():
    rows = re.findall(r"^\| (\w[\w ]+?) \|(.+)\|$", PAGE.split("## ")[0], re.MULTILINE)[1:]
    assert [name for name, _ in rows] == NAMES
    assert all(re.search("restart: |survive: |the job ends", row) for _, row in rows)


@pytest.mark.parametrize("name", ["torchrun", "Slurm"])
def test_a_shell_template_parses(name):
    assert subprocess.run(["bash", "-n"], input=block(name, "bash"), text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["Ray Train", "Monarch"])
def test_a_python_template_compiles_and_runs_the_script(name):
    tree = ast.parse(block(name, "python"))
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and "train.py" in ast.unparse(node))
    assert ast.unparse(call).startswith("subprocess.run([sys.executable, 'train.py', '/runs/a'], env={**os.environ, ")


def test_the_slurm_template_requeues_a_run_that_was_stopped_by_its_signal():
    from pipegrid.training.restart import PREEMPTED

    text = block("Slurm", "bash")
    assert f'"$code" -eq {PREEMPTED} ' in text
    assert {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"} <= set(re.findall(r"SLURM_\w+", SCRIPT.read_text()))
    assert all(f"export {name}=" in text for name in ("MASTER_ADDR", "MASTER_PORT"))


def test_the_yaml_templates_parse():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(block("Kubeflow TrainJob", "yaml"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["trainer"]["command"][:2] == ["torchrun", "train.py"]
    task = yaml.safe_load(block("SkyPilot", "yaml"))
    assert task["num_nodes"] == 2
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0


@pytest.mark.nightly
def test_two_agents_on_one_machine_run_the_torchrun_line(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    line = block("torchrun", "bash").replace("node0:29500", f"localhost:{port}").replace("train.py", str(SCRIPT))
    options = shlex.split(line)[1:]
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=localhost", *options]
    agents = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [int(step) for step in re.findall(r"step (\d+) of 8", "".join(said))] == list(range(1, 9))
