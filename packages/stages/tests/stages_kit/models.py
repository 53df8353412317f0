"""Tiny models of the families that Hugging Face has, made from configs, and a batch for each.

Each family is imported when one of its models is made.
"""

from __future__ import annotations

import torch
import transformers
import transformers.models.llama.modeling_llama  # ranks are forked with it: see conftest.py
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH = 50, 7
_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_TWO = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0,
}


class LowRank(nn.Module):
    """A frozen projection, and beside it one of low rank that is trained, with the names that PEFT gives them."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=5**0.5)
        nn.init.normal_(self.lora_B["default"].weight, std=0.02)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


def small_text():
    """The sizes of a tiny model of text, by the names that most configs have for them."""
    return dict(_TEXT)


def text_model(model, config, **options):
    """A function that makes a tiny model of a family."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**{**_TEXT, **options}))


def llama(**options):
    """A function that makes a tiny Llama."""
    return text_model("LlamaForCausalLM", "LlamaConfig", **options)


def gpt2(**options):
    """A function that makes a tiny GPT-2, without dropout unless asked for."""
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64}
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **rates, **options}))


def whisper(**options):
    """The config of a tiny Whisper."""
    return transformers.WhisperConfig(**_TWO, num_mel_bins=5, max_source_positions=6, **options)


def phi3():
    """A tiny Phi-3, whose frequencies change above 5 tokens."""
    parameters = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 2,
        "long_factor": [3.0] * 2,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 5,
    }
    options = {"original_max_position_embeddings": 5, "rope_parameters": parameters}
    return text_model("Phi3ForCausalLM", "Phi3Config", **options)()


MAKERS = {
    "llama": llama(),
    "llama tied": llama(tie_word_embeddings=True),
    "qwen2": text_model("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
    "qwen3": text_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=4),
    "mistral": text_model("MistralForCausalLM", "MistralConfig", sliding_window=5),
    "gemma2": text_model("Gemma2ForCausalLM", "Gemma2Config", head_dim=4, sliding_window=5),
    "gemma3": text_model("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=4, sliding_window=5),
    "gpt2": gpt2(),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            ffn_dim=32,
            word_embed_proj_dim=16,
            max_position_embeddings=64,
            dropout=0,
        )
    ),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_VISION)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_VISION)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**_VISION, hidden_dropout_prob=0)),
    "vit with a head": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**_VISION)),
    "whisper encoder": lambda: transformers.models.whisper.modeling_whisper.WhisperEncoder(
        whisper(max_target_positions=20)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=4,
            num_decoder_layers=4,
            num_heads=4,
            dropout_rate=0,
            decoder_start_token_id=0,
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**_TWO, max_position_embeddings=64)
    ),
}
TWO_LISTS = ("t5", "bart")


def batch_of(name, *, seed=0, rows=3):
    """A batch of ``rows`` samples: texts of unequal lengths with padding, images, or spectra."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("clip", "siglip", "vit", "vit with a head"):
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)}
    if name == "whisper encoder":
        return {"input_features": torch.randn(rows, 5, 12, generator=generator, dtype=torch.float64)}
    ids = torch.randint(1, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(output):
    """The loss of a model's output, for models without labels a function of all of it."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    if getattr(output, "logits", None) is not None:
        return output.logits.square().mean()
    loss = 3 * output.last_hidden_state.square().mean() + output.last_hidden_state[..., 0].mean()
    pooled = getattr(output, "pooler_output", None)
    return loss if pooled is None else loss + pooled.square().mean()


def next_words(output, batch):
    """The sum over following words, and how many they are, in the dtype of the logits."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()
