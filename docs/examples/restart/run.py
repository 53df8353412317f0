"""Kill a job's ranks, resume, and compare with an undisturbed run: `python run.py`. See README.md."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from rich.console import Console
from rich.table import Table

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipegrid.training import Checkpoints, TrainingState
from restart.launching import Launch
from restart.model import Stage

STEPS, MORE = 20, 28
"""Steps of the disturbed run, and with the ones in another layout."""
FAULTS = "kill@6:1,raise@11:0,hang@15:1"
BOUND = 1e-10
BAR = 30


@frozen
class Logged:
    """A step of a log: its loss, and the step after which its attempt began."""

    step: int
    loss: float
    first: int


def main(arguments: Sequence[str]) -> int:
    """Run, show, compare; 0 where all is as promised."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/restart"), help="directory (default %(default)s)")
    parser.add_argument("--agents", type=int, choices=(1, 2), default=1, help="torchruns that share the two ranks")
    given = parser.parse_args(arguments)
    shutil.rmtree(given.out, ignore_errors=True)
    console = Console(highlight=False)
    calm, disturbed = given.out / "undisturbed", given.out / "disturbed"
    launch = Launch(ranks=2 // given.agents, agents=given.agents, restarts=FAULTS.count(",") + 1)
    console.print(f"an undisturbed run: {MORE} steps, two stages on two ranks, 1F1B")
    _run(launch, calm, f"--steps={MORE}")
    console.print(f"the same with faults: {FAULTS} (kind@step:rank), a checkpoint every 4 steps")
    _run(launch, disturbed, f"--steps={STEPS}", f"--faults={FAULTS}", "--deadline=5")
    equal = _same(_saved(calm, STEPS), _saved(disturbed, STEPS))
    console.print(f"from its last checkpoint on: steps {STEPS + 1} to {MORE}, four stages on two ranks, ZB-V")
    _run(launch, disturbed, f"--steps={MORE}", "--schedule=zero_bubble_v")
    expected = {row.step: row.loss for row in _log(calm)}
    rows = _log(disturbed)
    console.print(_curve(rows))
    again = [row for row in rows if row.step <= STEPS]
    losses_equal = all(row.loss == expected[row.step] for row in again)
    difference = max(abs(row.loss - expected[row.step]) / expected[row.step] for row in rows if row.step > STEPS)
    console.print(f"losses of {len(again)} steps in 4 attempts, bit-equal to the undisturbed run: {losses_equal}")
    console.print(f"weights and optimizer states after step {STEPS}, bit-equal: {equal}")
    console.print(f"largest relative difference of a loss in the other layout: {difference:.1e} (bound {BOUND:.0e})")
    return 0 if losses_equal and equal and difference < BOUND else 1


def _run(launch: Launch, directory: Path, *options: str) -> None:
    codes, said = launch.run(directory, options)
    if any(codes):
        raise SystemExit(f"torchrun ended with {codes}; it wrote:\n{said}")


def _log(directory: Path) -> list[Logged]:
    return [Logged(**json.loads(line)) for line in (directory / "losses.jsonl").read_text().splitlines()]


def _saved(directory: Path, step: int) -> Mapping[str, torch.Tensor]:
    """Weights and optimizer states of a checkpoint, read into the whole model in this process."""
    whole = Stage(0, 1)
    optimizer = torch.optim.AdamW(whole.parameters())
    Checkpoints(directory).load(TrainingState(stages={"model": [whole]}, optimizers=[optimizer]), step=step)
    found = dict(whole.state_dict())
    for name, parameter in whole.named_parameters():
        found |= {f"{name}/{entry}": value for entry, value in optimizer.state[parameter].items()}
    return found


def _same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _curve(rows: Sequence[Logged]) -> Table:
    """A line per step, with a mark where an attempt begins."""
    table = Table(box=None, pad_edge=False)
    for column in ("step", "loss", "", ""):
        table.add_column(column, justify="right" if column else "left")
    highest = max(row.loss for row in rows)
    faults = FAULTS.split(",")
    for row, before in zip(rows, (None, *rows), strict=False):
        mark = ""
        if before is not None and (row.first, row.step) != (before.first, before.step + 1):
            why = faults.pop(0) if faults else "another layout"
            mark = f"[bold red]{why}[/]: resumed after step {row.first}"
        table.add_row(str(row.step), f"{row.loss:.5f}", "█" * round(BAR * row.loss / highest), mark)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
