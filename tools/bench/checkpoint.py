"""What saving the digit reader's state costs the training step.

    python tools/bench/checkpoint.py [--pairs 15] [--layers 1]

An asynchronous save blocks the step while the state is copied; the rest happens in the background. Printed are the
median seconds that ``save(blocking=False)`` blocks, of a bare `torch.save` of the same tensors to the same disk, and of
their ratio over interleaved pairs, with its quartiles and its bound; beside them the seconds until the checkpoint is
on the disk, checksums and fsync included. The state: all modules of the digit reader in one process, with AdamW.
``--layers`` repeats the model, for larger states.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))

from digit_reader.command_line import parse_options
from digit_reader.parts import whole_of
from pipegrid.training import Checkpoints, TrainingState

BOUND = 0.25


def state_of(copies: int) -> TrainingState:
    """The state of a run of the digit reader after its first step."""
    options = parse_options([])
    modules = {f"{name}{copy}": whole_of(options, name) for copy in range(copies) for name in options.grids}
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return TrainingState(
        stages={name: {0: module} for name, module in modules.items()}, optimizers=[optimizer], data={"sample": 64}
    )


def tensors_of(state: TrainingState) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint holds."""
    found = {}
    for slot in state.slots():
        found[slot.held.key] = slot.tensor().detach()
        for entry, value in state.optimizers[0].state[slot.tensor()].items():
            found[f"{slot.held.key}/{entry}"] = value
    return found


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row; 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="of timed runs, at least 2: quartiles need two")
    parser.add_argument("--layers", type=int, default=1, help="copies of the model in the state")
    given = parser.parse_args(arguments)
    if given.pairs < 2:
        parser.error(f"--pairs is {given.pairs}; quartiles need at least 2")
    torch.set_num_threads(1)
    state = state_of(given.layers)
    tensors = tensors_of(state)
    size = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(Path(directory) / "run")
        rows = []
        for step in range(given.pairs + 2):
            blocked = seconds(lambda step=step: checkpoints.save(state, step=step, blocking=False))  # type: ignore[misc]
            written = blocked + seconds(checkpoints.wait)
            bare = seconds(lambda: torch.save(tensors, Path(directory) / "bare.pt"))
            rows.append((blocked, bare, written, blocked / bare))
        checkpoints.close()
    blocked, bare, written, ratio = (statistics.median(column) for column in zip(*rows[2:], strict=True))
    low, _, high = statistics.quantiles([row[-1] for row in rows[2:]])
    print(f"{len(tensors)} tensors, {size / 1e6:.2f} MB; medians of {given.pairs} interleaved pairs")
    print(f"  blocked by an asynchronous save {1000 * blocked:>9.2f} ms")
    print(f"  bare torch.save                 {1000 * bare:>9.2f} ms")
    print(f"  until it is on the disk         {1000 * written:>9.2f} ms")
    verdict = "<=" if ratio <= BOUND else "> "
    print(f"  blocked / bare                  {ratio:>9.3f} {verdict} {BOUND} [{low:.3f}, {high:.3f}]")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
