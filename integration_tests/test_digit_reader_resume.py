"""The digit reader goes on from a checkpoint in other grids, another layout and schedule: the same curve."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta

import attrs
import pytest
import torch
import torch.distributed as dist

from digit_reader.command_line import parse_options
from digit_reader.job import build_job
from digit_reader.samples import Position, Samples
from digit_reader.saving import SavedRun, resume, training_state
from digit_reader.strips import Split, load_scans
from digit_reader.training import _one_step, _parameter_groups
from pipegrid.training import CheckpointError, Checkpoints

SMALL = ["--batch", "16", "--microbatches", "2", "--dtype", "float64", "--steps", "100"]
SHAPES = {
    "default": [],
    "other grids": ["--language", "pp=1,dp=2", "--schedule", "gpipe"],
    "zero bubble": ["--language", "pp=2,vpp=2", "--schedule", "zero_bubble_v"],
    "other layout": ["--language", 'pp=2,layout="Et|tttL"', "--schedule", "zero_bubble_h1"],
    "colocated": ["--placement", "colocated", "--language", "pp=4"],
    "fewer lanes": ["--images", "dp=1", "--language", "pp=3,layout=Et|tt|tL"],
}
STEPS = 3


class Run:
    """One rank's part of the training, without display and report."""

    def __init__(self, arguments):
        self.job = build_job(
            parse_options([*SMALL, *arguments]), Samples(Split.TRAIN, 0, load_scans(Split.TRAIN)), torch.device("cpu")
        )
        self.optimizer = torch.optim.AdamW(_parameter_groups(self.job))
        self.run = SavedRun(every=0, steps=100, position=Position(0))
        self.state = training_state(self.job, self.optimizer, self.run.position)
        self.first = resume(self.job, self.state, None)

    def losses(self, steps):
        """Loss per word of each step; the same on every rank."""
        found = []
        for step in steps:
            tallies = _one_step(self.job, self.optimizer, step, self.run)
            dist.all_reduce(tallies)
            found.append((tallies[0] / tallies[1]).item())
        return found

    def close(self):
        self.job.monitor.close()
        self.job.communicator.destroy()


CASES = [
    pytest.param(*pair, marks=[] if pair == ("default", "other grids") else pytest.mark.nightly)
    for pair in itertools.permutations(SHAPES, 2)
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("before", "after"), CASES)
def test_a_run_goes_on_in_another_shape(ranks, before, after):
    """Three steps, a checkpoint, three more: in one piece, and resumed from its path in another shape."""
    middle, end = (Checkpoints(ranks.shared_path / name, timeout=timedelta(seconds=60)) for name in ("middle", "end"))
    with contextlib.closing(Run(SHAPES[before])) as run:
        assert run.first == 0
        run.losses(range(1, STEPS + 1))
        middle.save(run.state, step=STEPS)
        expected = run.losses(range(STEPS + 1, 2 * STEPS + 1))
        end.save(run.state, step=2 * STEPS)
    with contextlib.closing(Run([*SHAPES[after], "--resume", str(middle.directory)])) as run:
        assert run.first == STEPS
        assert run.run.position.next == STEPS * 16
        found = run.losses(range(STEPS + 1, 2 * STEPS + 1))
        assert found == pytest.approx(expected, rel=1e-10, abs=0)
        held = {(module, name): p for module, part in run.job.modules.items() for name, p in part.named_parameters()}
        trained = {place: p.detach().clone() for place, p in held.items()}
        end.load(run.state)  # the weights of the run in one piece
        for place, weight in held.items():
            assert (trained[place] - weight).norm() <= 1e-10 * weight.norm(), place
        empty = ranks.shared_path / "empty"
        empty.mkdir(exist_ok=True)
        job = attrs.evolve(run.job, options=attrs.evolve(run.job.options, resume=str(empty)))
        with pytest.raises(CheckpointError, match="empty has no checkpoint"):
            resume(job, run.state, None)
    middle.close()
    end.close()
