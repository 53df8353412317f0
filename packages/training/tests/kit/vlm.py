"""A vision tower before a language model: what tests of both share."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from pipegrid.training import Names
from stages_kit.models import MAKERS, WORDS, batch_of, llama, next_words


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


def read_images(stage, batch):
    """A forward of the language model: the first stage has image tokens before the text, the others their mask."""
    if stage.is_first:
        (seen,) = (payload for module, payload in stage.received.items() if module != stage.module)
        return stage(**seen_and_text(stage.get_submodule("model.embed_tokens"), seen, batch))
    image = torch.ones(len(batch["input_ids"]), 5, dtype=torch.long)
    return stage(attention_mask=torch.cat((image, batch["attention_mask"]), dim=1))


def after_image(output, batch):
    """`next_words` of the text."""
    return next_words(SimpleNamespace(logits=output.logits[:, -batch["input_ids"].shape[1] :]), batch)
