"""What the ranks did in three steps, as one picture: undisturbed, with a death in it, and after it."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from attrs import define, evolve, field

from pipegrid.schedules import (
    Recorder,
    Recording,
    Span,
    Timeline,
    recording_to_json,
    timeline,
    write_html,
    write_svg,
)
from pipegrid.survive import PipelineWorld
from pipegrid.timeline import recording_from_json
from pipegrid.timeline.recording import Aside


@define(eq=False)
class Camera:
    """Writes what a rank measured in ``steps``: a file for each run of a step, one that a death has ended as well.

    All ranks are on one machine, so their clocks are one.
    """

    folder: Path
    rank: int
    steps: range
    recorder: Recorder = field(factory=Recorder)
    step: int = 0
    world: PipelineWorld | None = None
    _failed: float = 0.0
    _agreed: float = 0.0
    _between: tuple[Aside, ...] = ()

    def start(self, step: int, world: PipelineWorld) -> None:
        """The step begins, or begins again in another world."""
        again = self.step == step and self.world is not None
        now = time.perf_counter()
        self._between = ()
        if again:
            self._between = (Aside("vote", self._failed, self._agreed), Aside("new groups", self._agreed, now))
        self.step, self.world = step, world
        self.recorder.start(0.0)

    def failed(self) -> None:
        """This rank has noticed that the step does not end."""
        self._failed = time.perf_counter()
        self.write()

    def agreed(self) -> None:
        """The ranks that live have agreed who is dead."""
        self._agreed = time.perf_counter()

    def write(self) -> None:
        """Write what was measured since `start`."""
        if self.world is None or self.step not in self.steps:
            return
        plan, actor = self.world.plan, self.world.actor
        position = actor.position + (actor.replica * plan.positions_each if plan.num_replicas > 1 else 0)
        track = self.recorder.track(plan, rank=self.rank, position=position)
        recording = Recording(plan, [evolve(track, asides=(*self._between, *track.asides))])
        name = f"step{self.step}.epoch{self.world.epoch}.rank{self.rank}.json"
        (self.folder / name).write_text(recording_to_json(recording), encoding="utf-8")


def draw(folder: Path, steps: range, ranks: int, positions: int, victim: int) -> list[str]:
    """Draw ``steps``, of which the second has the death of ``victim``; the names of the files."""
    before, disturbed, after = (_panel(folder, step, ranks, positions) for step in steps)
    panels = [
        evolve(before, title=f"step {steps[0]}, undisturbed"),
        evolve(_without(disturbed, victim), title=f"step {steps[1]}: rank {victim} is killed, the others do it again"),
        evolve(_without(after, victim), title=f"step {steps[2]}, without rank {victim}"),
    ]
    write_svg(panels, folder / "three_steps.svg", width=1000.0)
    write_html(panels, folder / "three_steps.html")
    return ["three_steps.svg", "three_steps.html"]


def _panel(folder: Path, step: int, ranks: int, positions: int) -> Timeline:
    """A row for each rank, with all its runs of a step."""
    by_epoch: dict[str, list[Recording]] = defaultdict(list)
    for path in sorted(folder.glob(f"step{step}.epoch*.json")):
        by_epoch[path.name.split(".")[1]].append(recording_from_json(path.read_text(encoding="utf-8")))
    spans = []
    for found in by_epoch.values():
        recording = Recording(found[0].plan, [track for one in found for track in one.tracks])
        at = [track.rank for track in recording.tracks]
        spans += [evolve(span, row=at[span.row]) for span in timeline(recording).spans]
    each = ranks // positions
    return Timeline(
        rows=[f"rank {rank}: stage {rank // each}, replica {rank % each}" for rank in range(ranks)],
        spans=spans,
        unit="s",
    )


def _without(panel: Timeline, rank: int) -> Timeline:
    """The row of ``rank`` says so where it is dead."""
    end = max((span.end for span in panel.on_row(rank)), default=panel.start)
    return evolve(panel, spans=(*panel.spans, Span(rank, end, panel.end, "dead", label="dead")))
