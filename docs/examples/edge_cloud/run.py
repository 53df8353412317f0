"""Train the digit reader over an edge and a cloud: `python run.py`, which starts three processes. See README.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROCESSES = 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a value outside its range ends the run before any process starts."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="of training (default 10)")
    parser.add_argument("--rounds", type=int, default=5, help="of timing each schedule (default 5)")
    parser.add_argument("--delay", type=float, default=0.03, help="of the link, seconds one way (default 0.03)")
    parser.add_argument("--bandwidth", type=float, default=10e6, help="of the link, bytes per second (default 10e6)")
    given = parser.parse_args(arguments)
    for name in ("microbatches", "samples", "steps", "rounds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: give at least 1")
    if given.delay < 0 or given.bandwidth <= 0:
        parser.error(
            f"--delay {given.delay} --bandwidth {given.bandwidth}: at least 0 seconds, more than 0 bytes a second"
        )
    return given


def launch(arguments: Sequence[str]) -> int:
    """Start the ranks on this machine."""
    # By address, not by the machine's name, which not every machine can look up.
    local = ("--standalone", "--local-addr=localhost", f"--nproc-per-node={PROCESSES}")
    command = [sys.executable, "-m", "torch.distributed.run", *local]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*command, __file__, *arguments], env=environment, check=False).returncode


def work(given: argparse.Namespace) -> None:
    """On a rank: train over the link, then compare the schedules."""
    import torch
    import torch.distributed as dist

    from edge_cloud.job import open_job, plans
    from edge_cloud.link import Link
    from edge_cloud.measuring import measure, message_bytes
    from pipegrid.schedules import Costs

    dist.init_process_group("gloo")
    link = Link(given.delay, given.bandwidth)
    job = open_job(link=link)
    optimizer = torch.optim.AdamW([p for module in job.modules.values() for p in module.parameters()], lr=2e-3)
    nbytes = message_bytes(given.samples, torch.float32)
    slow = Costs(latency=link.delay, message=float(nbytes), bandwidth=link.bandwidth, F=1e-3, B=2e-3)
    plan = plans(given.microbatches, slow)["u_shape"]
    size = given.microbatches * given.samples
    for step in range(given.steps):
        first = range(step * size, (step + 1) * size)
        loss, seconds = job.step(plan, [first[i : i + given.samples] for i in range(0, size, given.samples)])
        optimizer.step()
        optimizer.zero_grad()
        if job.is_edge:
            print(f"step {step + 1}: loss {loss:.3f}, {seconds:.3f} s", flush=True)
    compared = measure(job, link, microbatches=given.microbatches, samples=given.samples, rounds=given.rounds)
    if job.is_edge:
        messages = 4 * given.microbatches
        print(f"the link takes {compared[0].on_link:.3f} s for the {messages} messages of a step, one by one")
        for one in compared:
            print(
                f"{one.name:>8}: {one.with_link:.3f} s a step, {one.without:.3f} s without the link; "
                f"{one.hidden:.0%} of the link's time hidden",
                flush=True,
            )
    job.close()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Start the ranks; or, on a rank, work."""
    given = parse(arguments)
    if "RANK" not in os.environ:
        return launch(arguments)
    work(given)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
