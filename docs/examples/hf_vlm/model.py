"""The model: a LLaVA of Hugging Face from its config, small enough to learn in minutes; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_vlm.data import BEGIN, END, IMAGE, IMAGE_TOKENS, PAD, SIDE, WORDS

PATCH = 6
assert IMAGE_TOKENS == (SIDE // PATCH) ** 2


def make_model(seed: int = 0) -> LlavaForConditionalGeneration:
    """A CLIP of two layers, a projector and a Llama of two layers: the same values in every process."""
    torch.manual_seed(seed)
    width: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        # At the usual 0.02, a width of 64 would pass on next to nothing.
        "initializer_range": 0.12,
    }
    special: dict[str, Any] = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    vision = CLIPVisionConfig(**width, image_size=SIDE, patch_size=PATCH, num_channels=1)
    text = LlamaConfig(**width, **special, vocab_size=len(WORDS))
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=IMAGE_TOKENS)
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
    return model
