"""Train the digit reader on four ranks that are killed with -9 one after the other: `python run.py`. See README.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipegrid.topology import job_store, serve_store
from pipegrid.training import RestartError
from survive import picture, reader
from survive.deaths import deaths
from survive.job import Options, train
from survive.launching import until_done

RANKS = reader.POSITIONS * reader.REPLICAS
BOUND = 1e-6
SECONDS = 900.0


def main(arguments: Sequence[str]) -> int:
    """Train twice and compare; 0 where all is as promised."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="of training (default %(default)s)")
    add("--every", type=int, default=200, help="steps from one death to the next (default %(default)s)")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    add("--out", type=Path, default=Path("runs/survive"), help="directory (default %(default)s)")
    given = parser.parse_args(arguments)
    options = Options(**vars(given))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks, which are to lose connections
    torch.set_num_threads(1)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    planned = deaths(options.steps, options.every)
    print(
        f"{options.steps} steps of the digit reader, {reader.POSITIONS} stages x {reader.REPLICAS} replicas on {RANKS} "
        "processes",
        *(f"  {death}" for death in planned),
        sep="\n",
        flush=True,  # the ranks write as well
    )
    began = time.monotonic()
    with serve_store():
        attempts = until_done(partial(_start, options=options), restarts=3, seconds=SECONDS)
    found = [torch.load(path) for rank in range(RANKS) if (path := _outcome(options.out, rank)).exists()]
    for number, codes in enumerate(attempts):
        print(f"attempt {number}: exit codes of its ranks {codes}")
    print(f"{len(found)} ranks are left after {time.monotonic() - began:.0f} s")
    if len(found) != RANKS - sum(death.attempt == len(attempts) - 1 for death in planned):
        return 1
    if len(planned) > 0 and options.steps > options.every:
        drawn = picture.draw(options.out, options.drawn, RANKS, reader.POSITIONS, planned[0].rank)
        print(f"three steps around the first death: {', '.join(drawn)} in {options.out}")
    return 0 if _as_undisturbed(found, options.steps) else 1


def _as_undisturbed(found: Sequence[dict[str, Any]], steps: int) -> bool:
    """Print and judge how far losses and weights are from those of one process without deaths."""
    whole, losses = reader.train_alone(steps)
    alone, wanted = reader.accuracy(whole), whole.state_dict()
    far = apart = 0.0
    for one in found:
        stage = {f"{one['position']}.{name}": value for name, value in one["stage"].items()}
        far = max(far, *((value - wanted[name]).abs().max().item() for name, value in stage.items()))
        apart = max(apart, *(abs(loss - losses[step - 1]) for step, loss in one["losses"].items()))
        whole.load_state_dict(stage, strict=False)
    print(f"loss per word {losses[0]:.3f} to {losses[-1]:.3f}; strips of unseen scans read without an error:")
    print(f"  with the deaths {reader.accuracy(whole):.1%}, undisturbed in one process {alone:.1%}")
    print(f"losses differ by {apart:.1e}, weights by {far:.1e} (float64, bound {BOUND:.0e})")
    return max(far, apart) < BOUND


def _outcome(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _start(attempt: int, *, options: Options) -> Sequence[BaseProcess]:
    """Start the ranks of an attempt."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pipegrid.survive", "sklearn.datasets"])
    started = []
    for rank in range(RANKS):
        _outcome(options.out, rank).unlink(missing_ok=True)
        started.append(context.Process(target=_rank, args=(rank, attempt, options, os.environ["PIPEGRID_STORE"])))
        started[-1].start()
    return started


def _rank(rank: int, attempt: int, options: Options, address: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"PIPEGRID_STORE": address, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    torch.set_num_threads(1)
    store = job_store(f"ranks {attempt}")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    try:
        found = train(options, attempt)
    except RestartError as error:
        code, text = error.exit_code, str(error)
    except RuntimeError as error:
        code, text = 1, f"rank {rank} ends: {type(error).__name__}: {error}".splitlines()[0]
    else:
        code, text = found["code"], f"rank {rank} has done all steps"
        torch.save(found | {"position": rank // reader.REPLICAS}, _outcome(options.out, rank))
    print(text, flush=True)
    os._exit(code)  # without the farewell of groups that have dead members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
