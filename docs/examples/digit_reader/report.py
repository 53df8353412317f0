"""What is left when the training is over: files, and a few strips with what was read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import asdict, define, evolve, field
from torch import Tensor

from digit_reader import vocabulary
from digit_reader.decoding import greedy
from digit_reader.display import Figures
from digit_reader.modules import IMAGES, LANGUAGE
from digit_reader.page import Strip
from digit_reader.vocabulary import TEXT_LENGTH
from pipegrid.schedules import (
    Recording,
    Timeline,
    position_of,
    recorded_costs,
    recording_to_json,
    simulate,
    timeline,
    write_html,
    write_perfetto,
    write_svg,
)
from pipegrid.topology import replica_samples

if TYPE_CHECKING:
    from digit_reader.job import Job
    from digit_reader.samples import Samples

SHADES = " .:-=+*#%@"
SHOWN = 4
"""Strips that are shown at the end."""


@define
class Metrics:
    """The figures of a run, in order; a run that was resumed goes on with those of before."""

    out: Path
    rows: list[Figures] = field(factory=list)
    attempt: int = 1

    @classmethod
    def after(cls, step: int, out: Path) -> Metrics:
        """Those of the first ``step`` steps, where an earlier attempt has written them to ``out``."""
        path = out / "metrics.jsonl"
        lines = path.read_text().splitlines() if step > 0 and path.exists() else []
        rows = [Figures(**json.loads(line)) for line in lines]
        attempt = 1 + max((row.attempt for row in rows), default=0)
        return cls(out, [row for row in rows if row.step <= step], attempt)

    def add(self, figures: Figures) -> None:
        """Keep one row, and write ``metrics.jsonl``: an attempt that is killed has written its own."""
        self.rows.append(evolve(figures, attempt=self.attempt))
        self.out.mkdir(parents=True, exist_ok=True)
        aside = self.out / ".metrics.jsonl"
        aside.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in self.rows))
        aside.replace(self.out / "metrics.jsonl")

    def draw(self) -> list[str]:
        """Draw ``loss.png``; returns the names of both files."""
        self._draw(self.out / "loss.png")
        return ["metrics.jsonl", "loss.png"]

    def _draw(self, path: Path) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, left = plt.subplots(figsize=(8, 4.5), layout="constrained")
        steps = [row.step for row in self.rows]
        left.semilogy(steps, [row.loss for row in self.rows], color="tab:blue", label="loss per word")
        left.set(xlabel="step", ylabel="training loss per word", title="Digit reader")
        right = left.twinx()
        tested = [(row.step, 100 * row.accuracy) for row in self.rows if row.accuracy is not None]
        right.plot([step for step, _ in tested], [share for _, share in tested], "tab:orange", label="exact match")
        right.set(ylabel="exact match on unseen strips, %", ylim=(0, 101))
        for before, row in itertools.pairwise(self.rows):
            if row.attempt != before.attempt:
                left.axvline(before.step, color="tab:gray", linestyle=":", label="resumed")
        labelled = {str(line.get_label()): line for line in (*left.get_lines(), *right.get_lines())}
        left.legend(list(labelled.values()), list(labelled), loc="center right")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def write_timelines(job: Job) -> tuple[list[str], tuple[Timeline, ...]]:
    """Draw the last step as it was measured and, above it, as planned with the measured costs.

    Every rank calls it; the last one writes ``timeline.svg``, ``timeline.html``, ``timeline.json`` and
    ``recording.json`` (for `planner what-if`), and returns their names with both timelines.
    """
    track = job.recorder.track(job.plan, rank=dist.get_rank(), position=position_of(job.plan, job.stages))
    tracks = [track] * dist.get_world_size()
    dist.all_gather_object(tracks, track)
    if dist.get_rank() != job.teller:
        return [], ()
    recording = Recording(job.plan, tracks)
    simulation = simulate(job.plan, recorded_costs(recording))
    planned = timeline(simulation, unit="s", title="planned, with measured costs")
    measured = timeline(recording, title="measured, last step")
    job.options.out.mkdir(parents=True, exist_ok=True)
    write_svg([planned, measured], job.options.out / "timeline.svg")
    write_html([planned, measured], job.options.out / "timeline.html")
    write_perfetto([planned, measured], job.options.out / "timeline.json")
    (job.options.out / "recording.json").write_text(recording_to_json(recording), encoding="utf-8")
    return ["timeline.svg", "timeline.html", "timeline.json", "recording.json"], (planned, measured)


def read_aloud(job: Job, unseen: Samples) -> Tensor:
    """What the model writes for the first batch of unseen strips, word by word, reading its own: token ids.

    Greedy decoding along the pipeline: one forward-only step for each position. Every rank calls it and gets the
    same ``[batch, TEXT_LENGTH]``.
    """
    from digit_reader.stepping import run_step

    options = job.options
    share = replica_samples(options.batch // options.microbatches, job.grids[LANGUAGE]) if job.is_last else range(0)

    def logits_of(text: Tensor) -> Tensor:
        given = evolve(unseen, texts=text)
        infos = run_step(job, given, 0, forward_only=True)
        logits = torch.zeros(options.batch, TEXT_LENGTH, vocabulary.SIZE, dtype=job.dtype, device=job.device)
        for info, microbatch in zip(
            infos, unseen.microbatches(0, batch=options.batch, microbatches=options.microbatches), strict=False
        ):
            mine = microbatch[share.start : share.stop]
            logits[mine.start : mine.stop] = info["logits"]
        dist.all_reduce(logits)  # each row comes from the one rank that has it
        return logits.cpu()

    return greedy(logits_of, options.batch)


def show_strips(job: Job, unseen: Samples) -> list[Strip]:
    """Print a few unseen strips with what was read, decoded greedily. Every rank calls it; the teller gets them."""
    job.train(training=False)
    written = read_aloud(job, unseen)
    shown = range(min(SHOWN, job.options.batch))
    pixels = unseen.strips(shown) if IMAGES in job.modules else None
    found: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, pixels)
    if dist.get_rank() != job.teller:
        return []
    drawn = next(pixels for pixels in found if pixels is not None)
    strips = [Strip(n, d.tolist(), w.tolist()) for n, d, w in zip(unseen.numbers(shown), drawn, written, strict=False)]
    for strip in strips:
        print()
        for row in strip.pixels:
            print(
                "    " + "".join(SHADES[min(int(value * len(SHADES)), len(SHADES) - 1)] * 2 for value in row).rstrip()
            )
        print(f"    {strip.number}: read as {strip.words!r}, {'right' if strip.is_right else 'wrong'}")
    print()
    return strips
