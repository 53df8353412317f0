"""Train a LLaVA of Hugging Face on four processes: `python run.py`. See README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The examples are folders of modules, not installed packages; their parent makes them importable by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROCESSES = 4


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training (default 400)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step (default 4)")
    parser.add_argument("--samples", type=int, default=16, help="of a microbatch, an even number (default 16)")
    parser.add_argument("--unseen", type=int, default=256, help="samples that are written at the end (default 256)")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_vlm"), help="for weights (default: %(default)s)")
    given = parser.parse_args(arguments)
    for name, least in (("steps", 10), ("microbatches", 1), ("samples", 2), ("unseen", 2)):
        if getattr(given, name) < least:
            parser.error(f"--{name} {getattr(given, name)}: give at least {least}")
    if given.samples % 2 or given.unseen % (given.samples * given.microbatches):
        parser.error(
            f"--samples {given.samples} --unseen {given.unseen}: vision has two replicas, and unseen samples are "
            f"written in whole steps of {given.samples * given.microbatches}"
        )
    return given


def launch(arguments: Sequence[str]) -> int:
    """Start the ranks on this machine; then ask the saved weights in a process of plain transformers."""
    given = parse(arguments)
    # By address, not by the machine's name, which not every machine can look up.
    local = ("--standalone", "--local-addr=localhost", f"--nproc-per-node={PROCESSES}")
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = {**quiet, **os.environ}
    command = [sys.executable, "-m", "torch.distributed.run", *local, __file__, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        return code
    plain = [sys.executable, str(Path(__file__).with_name("ask.py")), str(given.out)]
    return subprocess.run(plain, env=environment, check=False).returncode


def work(given: argparse.Namespace) -> None:
    """On a rank: train, write captions of unseen images, save."""
    import torch
    import torch.distributed as dist

    from hf_vlm.data import END, PAD, batch_of, captions_of, prompts_of, truth_of
    from hf_vlm.glue import pipeline_of_job, train
    from hf_vlm.saving import save

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipeline, size = pipeline_of_job(), given.samples

    def numbers(step: int) -> list[range]:
        first = step * size * given.microbatches
        return [range(at, at + size) for at in range(first, first + size * given.microbatches, size)]

    last, start = dist.get_rank() == PROCESSES - 1, time.perf_counter()
    batches = ([batch_of(part) for part in numbers(step)] for step in itertools.count())
    for number, loss in enumerate(train(pipeline, batches, given.steps)):
        if last and (number % 50 == 0 or number == given.steps - 1):
            seconds = time.perf_counter() - start
            print(f"step {number}: loss per word {loss:.3f}, {seconds:.0f} s", flush=True)

    answers: list[str] = []
    for step in range(given.unseen // (size * given.microbatches)):
        prompts = [prompts_of(batch_of(part, unseen=True)) for part in numbers(step)]
        tokens = pipeline.generate(prompts, max_new_tokens=8, eos_token_id=END, pad_token_id=PAD)
        answers += [] if tokens is None else captions_of(tokens)
    save(pipeline, given.out, step=given.steps)
    if last:
        truth = truth_of(batch_of(range(given.unseen), unseen=True))
        exact = sum(answer == text for answer, text in zip(answers, truth, strict=True))
        for answer, text in list(zip(answers, truth, strict=True))[:4]:
            print(f"  it reads {answer!r}; it is {text!r}")
        print(f"exact captions of unseen images: {exact} of {len(truth)} ({exact / len(truth):.1%})")
        (given.out / "answers.json").write_text(json.dumps(answers))
    dist.barrier()
    pipeline.close()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Start the ranks; or, on a rank, work."""
    if "RANK" not in os.environ:
        return launch(arguments)
    work(parse(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
