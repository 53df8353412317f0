"""The stages of a cut against the whole model, in one process, on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.training.stages.comparison import StageComparison
from pipegrid.training.stages.cutting import compare_stages
from pipegrid.training.stages.names import Names
from pipegrid.training.stages.proof import called_with


def check_stages(
    make: Callable[[], nn.Module] | nn.Module,
    layout: str | PipelineParallelLayerLayout,
    batch: Any,
    *,
    names: Names | None = None,
    carry: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> StageComparison:
    """Compare the stages of a cut with the whole model: one microbatch, its loss and every gradient, in this process.

        print(check_stages(lambda: LlamaForCausalLM(tiny_config), "Et*2|t*2L", batch))

    First the cut is proved (`prove_cut`). Then both run: the whole model by autograd alone; each stage as on a rank of
    its own, with what the stage before has sent. Random numbers are the same in both. Several
    copies of the model are in memory, so give a small config of the same family.

    Args:
        make: a function that makes the whole model: stages are made as on ranks, and their initial values are
            compared as well. Or the model, which is copied, and stays as it is.
        layout: as in `pipeline_stage`.
        batch: what the model is called with: a dict of arguments by name, or a tuple of positional ones. Tensors are
            moved to the device of the model.
        names: as in `pipeline_stage`.
        carry: as in `pipeline_stage`; stages behind the first are called without these arguments.
        loss: of what the model returns. None: the model's own loss, or a weighted sum of all that it returns.
        dtype: compute in this dtype, such as ``torch.float64``; None: as made.

    Raises:
        CutError: the cut is not proved, or values differ by more than rounding: the text names the parameters, the
            stages that hold them, and by how much.
    """
    args, kwargs = called_with(batch)
    found = compare_stages(make, layout, args, kwargs, names=names, carry=carry, loss=loss, dtype=dtype)
    found.require()
    return found
