"""From a model of Hugging Face to a trained one, on four ranks: vision on two data lanes, language on two stages.

All the glue there is; a test counts its lines, and apart the ones that are pipegrid's, between the two rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hf_vlm.data import Batch
from hf_vlm.model import make_model


class Vision(nn.Module):
    """The vision tower and the projector of a LLaVA, under their names there."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model = whole.model
        del self.model.language_model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """``[batch, 1, side, side]`` to ``[batch, tokens, hidden]``."""
        return torch.stack(self.model.get_image_features(pixel_values=pixel_values).pooler_output)


def loss_of(output: Any, labels: Tensor) -> tuple[Tensor, Tensor, float]:
    """The sum over written words, how many they are, and the sum as a number."""
    logits, following = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, following, ignore_index=-100, reduction="sum")
    return loss, (following != -100).sum(), loss.item()


# ---- pipegrid
from pipegrid.bridges import MultiModulePipelineCommunicator  # noqa: E402
from pipegrid.schedules import PipelineConfig  # noqa: E402
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, data_lane  # noqa: E402
from pipegrid.training import Names, cut  # noqa: E402

TEXT = Names("model.language_model.layers", elsewhere=("model.vision_tower", "model.multi_modal_projector"))


def arguments_of_a_step() -> dict[str, Any]:
    """This rank's module, with what every step of the job is called with: training, evaluation and generation."""
    vision, language = HyperCommGrid([2, 1], ["dp", "pp"]), HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2)
    grids = {"vision": vision, "language": language}
    name, grid = next(item for item in grids.items() if item[1].is_current_rank_in_grid())
    grid.create_pgs(["dp", "pp"])
    groups, (lane, lanes) = ProcessGroupCollection.from_grid(grid), data_lane(grid)
    place = grid.coords(dist.get_rank())["pp"]
    config = PipelineConfig(variable_seq_lengths=True, calculate_per_token_loss=True, deadline=60.0)
    pipe = MultiModulePipelineCommunicator(grids, {"vision": ["language"]}, config)
    model = Vision(make_model()) if name == "vision" else cut(make_model, "Et|tL", place, names=TEXT, module=name)
    model.config = config

    def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        if name == "vision":
            return {name: model(batch["pixel_values"].chunk(lanes)[lane])}, None
        text = {key: batch[key] for key in ("input_ids", "attention_mask")}
        seen = {"image": SimpleNamespace(pooler_output=[model.received["vision"]])} if model.is_first else None
        return model(**text, mm_encoder_outputs=seen), lambda output: loss_of(output, batch["labels"])

    return {"forward_step_func": forward_step, "model": model, "p2p_communicator": pipe, "pg_collection": groups}


# ---- torch
def train(model: nn.Module, step: Any, steps: int) -> Iterator[float]:
    """Train, with the loss of each step on ranks that have it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.2)
    for number in range(steps):
        yield sum(step(number))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
