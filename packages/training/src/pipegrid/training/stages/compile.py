"""Compile the layers of a stage, one by one: a layer compiles once for all stages of its kind."""

from __future__ import annotations

from typing import Literal

from pipegrid.schedules.autograd import compile_split
from pipegrid.topology.fields import checked
from pipegrid.training.errors import CutError
from pipegrid.training.stages.stage import Stage

Compile = Literal["whole", "split"]


def compile_layers(
    stage: Stage,
    *,
    compile: Compile = "split",  # noqa: A002 -- what is asked of torch.compile
    backend: str = "inductor",
    dynamic: bool | None = False,
) -> None:
    """Compile each layer of a stage in place, before its first forward and after `parallelize_module`.

    Args:
        stage: made by `pipeline_stage`.
        compile: ``"split"``: the backward of a layer runs in halves where the schedule has halves. ``"whole"``:
            torch's own regions, which run whole at I. Tensor-parallel layers cannot be split.
        backend: of `torch.compile`.
        dynamic: as of `torch.compile`; False compiles once for each shape.

    Raises:
        SplitBackwardError: this torch has no joint graphs (see `compile_split`). A region that cannot be split raises
            one in its first forward.
    """
    if checked(compile, Compile, "compile", CutError) == "whole":
        for name in stage.layers:
            stage.get_submodule(name).compile(backend=backend, dynamic=dynamic)
        return
    for name in stage.layers:
        compile_split(stage.get_submodule(name), backend=backend, dynamic=dynamic)
