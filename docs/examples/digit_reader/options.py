"""The options of a training run: one value, the same on every rank. No torch.

`digit_reader.command_line` reads them, `digit_reader.fitting` checks that they fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from digit_reader.modules import LANGUAGE, together
from pipegrid.core.graph import ModuleGraph
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import SCHEDULES, stage_places
from pipegrid.topology import HyperCommGrid, place

BACKENDS = ("gloo", "nccl", "staged", "fake_nccl", "fake_nccl_serial")
"""Of the default group: ``staged`` is gloo through host memory, the fakes are NCCL's rules on a CPU."""

SCHEDULE_NAMES: Final = tuple(name for name, known in SCHEDULES.items() if known.trains and not known.sliced)
"""What ``--schedule`` takes."""


def num_stages(schedule: str, pp: int, vpp: int) -> int:
    """Stages of the language model: ``vpp`` on each of ``pp`` places, and one more in a U."""
    return pp * vpp + (schedule == "u_shape")


class OptionsError(ValueError):
    """An option outside its range, or one that contradicts another; the text is one line."""


@frozen(kw_only=True)
class Options:
    """A training run, whole: the same on every rank.

    ``grids`` has a size per dimension and module, the encoders first; ``layout`` and ``vpp`` are the language
    model's: how it is cut into stages, and how many of them each place of its pipeline holds. ``batch`` samples
    make a step, shared by ``microbatches``. ``deadline`` is in seconds. ``backend`` None leaves it to the machine.
    ``checkpoint_every`` is in steps, 0 saves nothing; ``resume`` is ``auto``, ``never``, or a directory of checkpoints.
    ``control`` is the address of the launcher's store for the ranks' positions; None: torchrun's own store.
    """

    grids: Mapping[str, Mapping[str, int]]
    layout: str
    vpp: int
    graph: tuple[tuple[str, str], ...]
    placement: str
    schedule: str
    processes: int
    microbatches: int
    batch: int
    steps: int
    seed: int
    dtype: str
    deadline: float
    backend: str | None
    check: bool
    checkpoint_every: int
    checkpoints: Path
    resume: str
    out: Path
    control: str | None

    @property
    def guarded(self) -> bool:
        """Whether the run is saved or resumed."""
        return self.checkpoint_every > 0 or self.resume != "never"

    @property
    def encoders(self) -> tuple[str, ...]:
        """The modules that feed the language model, in the order in which it reads their tokens."""
        return tuple(name for name in self.grids if name != LANGUAGE)

    def place(self) -> dict[str, HyperCommGrid]:
        """Every module's grid. All have the dimensions tp, dp, pp, the fastest first."""
        return place(self.grids, world_size=self.processes, together=together(self.placement, tuple(self.grids)))

    def num_stages(self) -> int:
        """How many stages the schedule makes of the language model."""
        return num_stages(self.schedule, self.grids[LANGUAGE]["pp"], self.vpp)

    def stages(self) -> PipelineParallelLayerLayout:
        """The language model's layout over its stages, wherever these lie."""
        return PipelineParallelLayerLayout(self.layout, self.num_stages())

    def modules(self) -> ModuleGraph:
        """The graph of modules with their depths."""
        depths = {name: dims["pp"] for name, dims in self.grids.items()}
        return ModuleGraph({**depths, LANGUAGE: self.num_stages()}, self.graph)

    def stage_placement(self) -> dict[str, tuple[int, ...]]:
        """Per module the place in its pipeline of each of its stages, where the schedule says that."""
        return {LANGUAGE: stage_places(self.schedule, self.grids[LANGUAGE]["pp"], self.vpp)}
