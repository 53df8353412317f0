"""A Hugging Face language model on two ranks by torch.distributed.pipelining: all the glue."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble, schedules
from transformers.masking_utils import create_causal_mask

from hf_parts.job import Batch, Make, loss_of
from pipegrid.stages.transformers_compat import cache_name


class Part(nn.Module):
    """Layers of a Llama, with its embedding or its head: the model's forward, written again for a part of it."""

    def __init__(self, whole: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config, self.rotary = whole.config, whole.model.rotary_emb
        self.cache = cache_name(whole) or "cache"
        self.layers = nn.ModuleList(whole.model.layers[layer] for layer in layers)
        self.embedding = whole.model.embed_tokens if first else None
        self.norm = whole.model.norm if last else None
        self.head = whole.lm_head if last else None

    def forward(self, hidden: Tensor, *, attention_mask: Tensor) -> Tensor:
        """Ids or hidden states to hidden states or logits."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        no_cache: dict[str, Any] = {self.cache: None}
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            **no_cache,
            position_ids=positions,
        )
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class Peer:
    """A step: gradients of the mean over all words of the batch, in the parameters of this rank's stages."""

    def __init__(self, make: Make, bounds: list[int], name: str, microbatches: int, *, compiled: bool) -> None:
        rank, count = dist.get_rank(), len(bounds) - 1
        kind = getattr(schedules, name)
        v_shaped = kind is ScheduleZBVZeroBubble
        numbers = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, 2))
        self.whole = make()
        parts = {
            number: Part(self.whole, range(*bounds[number : number + 2]), first=number == 0, last=number == count - 1)
            for number in numbers
        }
        if compiled:
            for part in parts.values():
                for layer in part.layers:
                    layer.compile(backend="aot_eager", dynamic=False)
        group = dist.new_group(timeout=timedelta(seconds=20))
        stages = [PipelineStage(part, n, count, torch.device("cpu"), group=group) for n, part in parts.items()]
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        self.schedule = kind(stages if several else stages[0], microbatches, loss_fn=self.loss, scale_grads=False)
        self.numbers, self.last, self.parts = numbers, count - 1, parts

    def step(self, batches: list[Batch]) -> None:
        """Train on one batch, given as microbatches."""
        ids, mask = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "attention_mask"))
        target = torch.stack((ids, mask), dim=-1)
        self.schedule.step(
            *((ids,) if 0 in self.numbers else ()),
            attention_mask=mask,
            target=target if self.last in self.numbers else None,
            return_outputs=False,
        )
        words = mask[:, 1:].sum()
        for part in self.parts.values():
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad /= words

    @staticmethod
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        """The sum over words."""
        return loss_of(logits, {"input_ids": target[..., 0], "attention_mask": target[..., 1]})[0]
