"""From a model of Hugging Face to a trained one, on four ranks: vision on two replicas, language on two stages.

All the glue there is; a test counts its lines, and apart the ones that are pipegrid's, between the two rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPooling

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


def loss_of(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum over written words, and how many they are."""
    logits, following = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, following, ignore_index=-100, reduction="sum")
    return loss, (following != -100).sum()


# ---- pipegrid
from pipegrid.schedules import PipelineConfig  # noqa: E402
from pipegrid.topology import HyperCommGrid  # noqa: E402
from pipegrid.training import Names, Pipeline, PipelineModule  # noqa: E402

TEXT = Names("model.language_model.layers", elsewhere=("model.vision_tower", "model.multi_modal_projector"))


def read(stage: Any, batch: Batch) -> Any:
    """The language model, with what the vision module has sent in place of the images."""
    images: Any = [stage.received["vision"]] if stage.is_first else None
    seen = {"image": BaseModelOutputWithPooling(pooler_output=images)} if stage.is_first else None
    return stage(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], mm_encoder_outputs=seen)


def pipeline_of_job() -> Pipeline:
    """Vision on two replicas, language on two stages."""
    grids = HyperCommGrid([2, 1], ["dp", "pp"]), HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2)
    vision = PipelineModule(
        lambda: Vision(make_model()), None, grids[0], forward=lambda model, batch: model(batch["pixel_values"])
    )
    language = PipelineModule(make_model, "Et|tL", grids[1], TEXT, read)
    modules, config = {"vision": vision, "language": language}, PipelineConfig(variable_seq_lengths=True, deadline=60.0)
    return Pipeline(modules, topology={"vision": ["language"]}, config=config, loss=loss_of)


# ---- torch
def train(pipeline: Any, batches: Iterator[list[Batch]], steps: int) -> Iterator[float]:
    """Train, with the mean loss of each step."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.2)
    for _, batch in zip(range(steps), batches, strict=False):
        yield pipeline.step(batch).item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
