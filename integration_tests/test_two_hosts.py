"""A job on two hosts: a wire that is slow, lossy or away for a moment changes nothing; one that is cut ends the job."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipegrid.schedules import Monitor, PipelineConfig
from pipegrid.stages.errors import CheckpointError
from pipegrid.testing import CUT, Wire
from pipegrid.topology import HyperCommGrid, control_store
from pipegrid.training import Pipeline

PROGRAM = Path(__file__).with_name("hosts_matrix.py")
SLACK = 20.0  # seconds beyond each promise: a test must hold on a machine that does other work
STEPS = 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, y):
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        return (h - y).square()


def batch_of(number):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": x.roll(1, 1)}


def pipeline_of(ranks, apart="stages"):
    dims = ["dp", "pp"] if apart == "stages" else ["pp", "dp"]
    return Pipeline(
        Model,
        "t|t",
        HyperCommGrid([2, 2], dims),
        config=PipelineConfig(deadline=30.0),
        num_microbatches=2,
        loss=lambda squares, _: squares.mean(),
        monitor=Monitor(control_store("hosts"), rank=ranks.rank, ranks=range(4), deadline=30.0),
    )


def losses(ranks, *, changes=lambda step: None, apart="stages"):
    found = []
    with pipeline_of(ranks, apart) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        for step in range(STEPS):
            changes(step)
            part = {name: whole.chunk(2)[pipeline.replica] for name, whole in batch_of(step).items()}
            found.append(pipeline.step(part).item())
            optimizer.step()
            optimizer.zero_grad()
    return found


def losses_of_one_process():
    model, found = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        loss = model(**batch_of(step)).mean()
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.thorough
@pytest.mark.ranks(4, hosts=2, wire=Wire(delay=0.02, loss=0.02, rate=5e6), deadline=240)
def test_a_slow_narrow_and_lossy_wire_changes_no_loss(ranks):
    assert losses(ranks) == pytest.approx(losses_of_one_process(), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.ranks(4, hosts=2, deadline=240)
@pytest.mark.parametrize("apart", ["stages", "replicas"])
def test_three_seconds_without_a_wire_change_no_loss(ranks, apart):
    def changes(step):
        if step == 3 and ranks.rank == 0:
            ranks.set_wire(CUT)
            ranks.set_wire(Wire(), after=3.0)

    assert losses(ranks, changes=changes, apart=apart) == pytest.approx(losses_of_one_process(), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.ranks(4, hosts=2, deadline=240)
def test_a_folder_of_each_host_is_an_error_before_anything_is_written(ranks):
    folder = ranks.shared_path / "run"
    folder.mkdir(exist_ok=True)
    ranks.barrier()
    if ranks.rank == 2:  # a disk of host b's own, for both of its ranks
        mounted = ctypes.CDLL(None, use_errno=True).mount(b"own", bytes(folder), b"tmpfs", 0, None)
        assert mounted == 0, ctypes.get_errno()
    ranks.barrier()
    with pipeline_of(ranks) as pipeline:
        text = (
            r"is not used: rank 2 \(also ranks \[3\]\): .* of the first rank does not exist here; all ranks share one"
        )
        with pytest.raises(CheckpointError, match=text):
            pipeline.save(folder, step=1)
    ranks.barrier()
    assert [path.name for path in folder.iterdir() if path.name.startswith("step")] == []


def judged(arguments, *, seconds):
    command = [sys.executable, PROGRAM, "--deadline", "8", "--slack", str(SLACK), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    if "not allowed here:" in result.stderr:
        pytest.skip(result.stderr.strip().splitlines()[-1])
    assert result.returncode == 0, f"{result.stdout[-20000:]}\n{result.stderr[-4000:]}"
    lines = result.stdout.splitlines()
    sys.stdout.write(result.stdout)  # the table, for those who read the night's output
    return int(re.fullmatch(r"(\d+) right, 0 wrong", lines[-1])[1])


@pytest.mark.thorough
def test_a_wire_that_is_cut_in_a_step_ends_it_on_every_rank():
    assert judged(["--only", "step", "cut"], seconds=300) == 1


@pytest.mark.nightly
def test_each_operation_and_each_fault_of_the_matrix_once():
    assert judged(["--jobs", "2"], seconds=1200) == 13


@pytest.mark.nightly
def test_the_whole_matrix_of_two_hosts():
    assert judged(["--whole", "--jobs", "2"], seconds=3600) == 90
