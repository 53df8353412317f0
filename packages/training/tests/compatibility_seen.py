"""Rows of the compatibility table: images before texts.

Image tokens are in the text, before its words; texts have padding, and images are noise.
"""

from __future__ import annotations

from functools import partial

import torch
import transformers

from pipegrid.training import Names
from stages_kit.models import WORDS

from .compatibility_family import ROWS, Family

IMAGE = 9
_WIDE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def seen(pixels, seed, *, tokens, others=7, **options):
    """Images of so many tokens each, before a text; without padding where ``others`` is a prompt's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, WORDS, (ROWS, tokens + others), generator=generator)
    ids[:, 1 : 1 + tokens] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    ids[mask == 0] = 0
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    more = {name: make(ids) for name, make in options.items()}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **pixels(generator), **more}


def asked(batch, seed, length):
    """The images of a microbatch, and the same text, unpadded."""
    del length
    made = batch(seed)
    made.pop("labels")
    ids = torch.where(made["attention_mask"] == 0, 20, made["input_ids"])
    return {**made, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def noise(*shape):
    """A function that draws images of a shape."""
    return lambda generator: {"pixel_values": torch.randn(*shape, generator=generator, dtype=torch.float64)}


def seen_family(make, batch, *, names=None):
    """A family of images and texts."""
    return Family(make, batch, partial(asked, batch), names)


def qwen_vl(kind, **vision):
    """Qwen2-VL and those after it: positions of three axes, which the model's own code makes of the ids."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    tower = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

    def make():
        config = getattr(transformers, f"{kind}Config")(
            text_config=_WIDE | {"rope_parameters": rope},
            vision_config={**tower, "in_channels": 3, **vision},
            image_token_id=IMAGE,
            video_token_id=10,
            vision_start_token_id=8,
            vision_end_token_id=7,
            tie_word_embeddings=False,
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    batch = partial(
        seen,
        noise(ROWS * 16, 96),
        tokens=4,
        image_grid_thw=lambda ids: torch.tensor([[1, 4, 4]] * ROWS),
        mm_token_type_ids=lambda ids: (ids == IMAGE).int(),
    )
    return seen_family(make, batch)


def gemma3_vlm():
    """Gemma 3 with its tower: images see themselves whole."""
    config = transformers.Gemma3Config(
        text_config=_WIDE | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config=_TOWER,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        boi_token_index=8,
        eoi_token_index=7,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma():
    """PaliGemma: images and prefix see themselves whole."""
    config = transformers.PaliGemmaConfig(
        text_config=_WIDE | {"model_type": "gemma"},
        vision_config=_TOWER | {"model_type": "siglip_vision_model", "projection_dim": 32, "vision_use_head": False},
        image_token_index=IMAGE,
        projection_dim=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def smolvlm():
    """SmolVLM: images in patches of a pixel shuffle."""
    config = transformers.SmolVLMConfig(
        text_config=_WIDE | {"model_type": "llama"}, vision_config=_TOWER, image_token_id=IMAGE, scale_factor=2
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def llava():
    """LLaVA: CLIP before Llama."""
    config = transformers.LlavaConfig(
        text_config=_WIDE | {"model_type": "llama"},
        vision_config=_TOWER | {"model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


SEEN = {
    "LLaVA": seen_family(llava, partial(seen, noise(ROWS, 3, 16, 16), tokens=16)),
    "Qwen2-VL": qwen_vl("Qwen2VL", embed_dim=32, hidden_size=32, mlp_ratio=2),
    "Qwen2.5-VL": qwen_vl(
        "Qwen2_5_VL",
        hidden_size=32,
        intermediate_size=32,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    "Qwen3-VL": qwen_vl(
        "Qwen3VL",
        hidden_size=32,
        intermediate_size=32,
        out_hidden_size=32,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1, 2],
    ),
    "Gemma 3": seen_family(
        gemma3_vlm,
        partial(seen, noise(ROWS, 3, 16, 16), tokens=4, token_type_ids=lambda ids: (ids == IMAGE).int()),
    ),
    "PaliGemma": seen_family(
        paligemma,
        partial(seen, noise(ROWS, 3, 16, 16), tokens=16, token_type_ids=lambda ids: (ids > IMAGE).int()),
    ),
    "SmolVLM": seen_family(
        smolvlm,
        partial(
            seen,
            noise(ROWS, 1, 3, 16, 16),
            tokens=4,
            pixel_attention_mask=lambda ids: torch.ones(ROWS, 1, 16, 16, dtype=torch.bool),
        ),
        names=Names("model.text_model.layers"),
    ),
}
