"""The training loop of one rank. Every rank runs this, with a different part of the model."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from digit_reader.backend import process_group
from digit_reader.check import BOUNDS, first_step_difference
from digit_reader.display import Display, Figures, display
from digit_reader.job import Job, build_job
from digit_reader.options import Options
from digit_reader.page import RunPage
from digit_reader.report import Metrics, show_strips, write_timelines
from digit_reader.samples import Samples
from digit_reader.saving import SavedRun, saved_run
from digit_reader.stepping import run_step
from digit_reader.strips import Split, load_scans
from pipegrid.schedules import DisagreementError, JobFailedError, PipelineError, clip_grad_norm_
from pipegrid.training import RestartError

LEARNING_RATE = 2e-3
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1
WARMUP = 50
MAX_NORM = 1.0
REPORT_EVERY = 20
TEST_EVERY = 200
TEST_STEPS = 8
"""Steps of test strips in the last measurement; the ones before look at a quarter of them."""


def train(options: Options) -> int:
    """Train, test, report. Returns the exit code: 1 where `--check` found a difference past its bound."""
    torch.manual_seed(options.seed)
    # Comparable with one process to float32: no TensorFloat-32 behind its name.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    with process_group(options.backend, deadline=options.deadline) as device:
        grids = options.place()
        # Every rank compares its gradients with those of the whole model, once; unseen strips are the encoders' alone.
        samples = Samples(Split.TRAIN, options.seed, load_scans(Split.TRAIN))
        reads = any(dist.get_rank() in grids[name].ranks for name in options.encoders)
        unseen = Samples(Split.TEST, options.seed, load_scans(Split.TEST) if reads else None)
        job = build_job(options, samples, device)
        with contextlib.closing(job.monitor):
            try:
                code = _check(job, samples) if options.check else _train(job, unseen)
            except RestartError as error:
                if dist.get_rank() == 0:
                    print(error, file=sys.stderr, flush=True)
                return error.exit_code
            except Exception as error:
                if _is_own(error, job):
                    raise
                return 1
        job.communicator.destroy()
    return code


def _is_own(error: Exception, job: Job) -> bool:
    """Whether this rank's failure was the job's first; else the launcher reports it."""
    if not isinstance(error, (PipelineError, DisagreementError, JobFailedError)):  # of these, all know already
        job.monitor.failed(f"{type(error).__name__}: {error}")
    first = job.control.failure()
    if first is None or first.rank == dist.get_rank():
        return True
    if job.options.control is None:  # torchrun is the launcher, which knows nothing of plans
        print(f"rank {dist.get_rank()} was stopped: {error}", file=sys.stderr)
    return False


def _check(job: Job, samples: Samples) -> int:
    return 0 if _gradients_from_one_process(job, samples) < BOUNDS[job.options.dtype] else 1


def _gradients_from_one_process(job: Job, samples: Samples) -> float:
    """The `first_step_difference`, which rank 0 prints; gradients stay as the step has left them."""
    options = job.options
    difference = first_step_difference(job, samples)
    bound = BOUNDS[options.dtype]
    if dist.get_rank() == 0:
        verdict = "within" if difference < bound else "PAST"
        print(
            f"largest relative difference of any gradient from one process: {difference:.2e} "
            f"({options.dtype}; {verdict} the bound {bound:.0e})",
            flush=True,
        )
    return difference


def _train(job: Job, unseen: Samples) -> int:
    """Train to the last step, or until a signal stops the run; the exit code."""
    optimizer = torch.optim.AdamW(_parameter_groups(job), lr=LEARNING_RATE, betas=BETAS)
    with saved_run(job, optimizer) as run:
        code = _loop(job, unseen, optimizer, run)
    return code if run.attempt is None else run.attempt.exit_code


def _loop(job: Job, unseen: Samples, optimizer: torch.optim.Optimizer, run: SavedRun) -> int:
    options = job.options
    metrics, files = Metrics.after(run.first, options.out), list[str]()
    page = RunPage(options, metrics.rows)
    if run.first == 0:
        page.difference = _gradients_from_one_process(job, job.samples)
        optimizer.zero_grad()
    if dist.get_rank() == job.teller:
        page.write(done=False)
    accuracy: float | None = None
    with _shown(job) as shown:
        since, tallies, counted = time.perf_counter(), torch.zeros(4, dtype=torch.float64), 0
        for step in range(run.first + 1, options.steps + 1):
            last = step == options.steps
            job.recorder.start(_common_now(job) if last else None)
            tallies, counted = tallies + _one_step(job, optimizer, step, run), counted + 1
            if last:
                files, page.timelines = write_timelines(job)
            if step % TEST_EVERY == 0 or last:
                accuracy = measure(job, unseen, TEST_STEPS if last else TEST_STEPS // 4)
            if step % REPORT_EVERY == 0 or last:
                loss, tokens, busy, whole = _over_job(tallies, job)
                figures = Figures(
                    step=step,
                    loss=loss / max(tokens, 1.0),
                    samples_per_second=counted * options.batch / (time.perf_counter() - since),
                    accuracy=accuracy,
                    # On a GPU the recorder sees when the host issued an action, not how long it ran.
                    bubble=None if job.device.type == "cuda" else 1.0 - busy / whole,
                )
                if shown is not None:
                    metrics.add(figures)
                    shown.show(figures)
                    page.write(done=False)
                since, tallies, counted = time.perf_counter(), torch.zeros(4, dtype=torch.float64), 0
            if run.completed(step):
                return 0
    if accuracy is None:
        accuracy = measure(job, unseen, TEST_STEPS)  # all steps were done before
    if dist.get_rank() == job.teller:
        files += metrics.draw()
    page.strips = show_strips(job, unseen)
    if dist.get_rank() == job.teller:
        files.append(page.write(done=True))
        print(f"exact match on {TEST_STEPS * options.batch} strips of unseen scans: {100 * accuracy:.1f}%")
        print(f"written to {options.out}: {', '.join(sorted(files))}", flush=True)
    return 0


def _one_step(job: Job, optimizer: torch.optim.Optimizer, step: int, run: SavedRun) -> torch.Tensor:
    """Train on the next batch; loss, tokens, seconds computing and seconds in the pipeline, of this rank."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * _rate(step - 1, job.options.steps)
    start = job.recorder.now
    infos = run_step(job, job.samples, run.position.next)
    run.position.next += job.options.batch
    whole, busy = job.recorder.now - start, job.recorder.computing
    with job.recorder.aside("optimizer"):
        clip_grad_norm_(job.modules, job.groups, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    loss = sum(info["loss"].item() for info in infos)
    tokens = sum(info["tokens"].item() for info in infos)
    return torch.tensor([loss, tokens, busy, whole], dtype=torch.float64)


def _common_now(job: Job) -> float:
    """The latest clock of all ranks, for the step that is drawn: one zero for all of its rows."""
    now = torch.tensor(time.perf_counter(), dtype=torch.float64, device=job.device)
    dist.all_reduce(now, op=dist.ReduceOp.MAX)
    return now.item()


def _parameter_groups(job: Job) -> list[dict[str, Any]]:
    """Matrices decay; gains and biases do not."""
    decay: list[torch.nn.Parameter] = []
    keep: list[torch.nn.Parameter] = []
    for parameter in job.parameters():
        (decay if parameter.ndim > 1 else keep).append(parameter)
    return [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": keep, "weight_decay": 0.0}]


def _rate(step: int, steps: int) -> float:
    """Linear warmup under half a cosine, down to a fiftieth."""
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * step / steps)))


def measure(job: Job, unseen: Samples, steps: int) -> float:
    """The share of unseen strips that are read exactly; the same on every rank."""
    job.train(training=False)
    found = torch.zeros(2, dtype=torch.float64)
    for number in range(steps):
        for info in run_step(job, unseen, number * job.options.batch, forward_only=True):
            found += torch.stack((info["exact"], info["samples"].to(info["exact"].device))).double().cpu()
    job.train(training=True)
    exact, all_of_them = _over_job(found, job)
    return exact / all_of_them


def _over_job(tallies: torch.Tensor, job: Job) -> list[float]:
    """Sums over all ranks of the job. Ranks without the loss add nothing to what only the loss knows."""
    total = tallies.to(job.device, copy=True)
    dist.all_reduce(total)
    return [float(value) for value in total]


@contextlib.contextmanager
def _shown(job: Job) -> Iterator[Display | None]:
    if dist.get_rank() != job.teller:
        yield None
        return
    with display(job.options.steps) as shown:
        yield shown
