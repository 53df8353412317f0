"""A vision tower before a language model: what tests of both share."""

from __future__ import annotations

import torch
from torch import nn

from pipegrid.training import Names

from .training_models import MAKERS, WORDS, batch_of, llama


class Tower(nn.Module):
    """A vision model and the projection of its tokens to the width of the language model."""

    def __init__(self):
        super().__init__()
        self.clip = MAKERS["clip"]()
        self.projection = nn.Linear(16, 16)

    def forward(self, pixel_values):
        return self.projection(self.clip(pixel_values=pixel_values).last_hidden_state)


VISION = Names("clip.encoder.layers", head=("projection",))


def language_with(seed):
    """A language model whose words follow from what it has seen."""
    torch.manual_seed(seed)
    model = llama()()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def image_batch(number):
    """Four images with texts of unequal lengths, padded on the left."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, WORDS, (4, 4 + number), generator=generator)
    return {
        **batch_of("clip", seed=number, rows=4),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def seen_and_text(embedding, seen, batch):
    """Image tokens before text, as embeddings with their mask."""
    embeds = torch.cat((seen, embedding(batch["input_ids"])), dim=1)
    mask = torch.cat((torch.ones(seen.shape[:2], dtype=torch.long), batch["attention_mask"]), dim=1)
    return {"inputs_embeds": embeds, "attention_mask": mask}
