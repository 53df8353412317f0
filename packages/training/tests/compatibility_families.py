"""The rows of the compatibility table: for each family a tiny random model, its microbatches and its prompts.

Texts have padding and masks, and labels skip it. What tests of single families have is taken from `kit.models`.
A family is imported when one of its models is made.
"""

from __future__ import annotations

import torch
import transformers
from attrs import evolve

from pipegrid.training import Names
from stages_kit import models
from stages_kit.models import MAKERS, TWO_LISTS, WORDS, LowRank, batch_of, llama, phi3, text_model

from .compatibility_family import LAYOUTS, LAYOUTS_OF_TWO, ROWS, Family
from .compatibility_seen import SEEN

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


# -- Batches.


def padded_left(seed, length):
    """Texts to go on with, of unequal lengths."""
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(12, WORDS, (ROWS, length), generator=generator)
    mask = (torch.arange(length) >= torch.randint(0, length - 1, (ROWS, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def classes(seed):
    """Padded texts, and a class for each."""
    batch = batch_of("text", seed=seed, rows=ROWS)
    generator = torch.Generator().manual_seed(seed)
    ids = batch["input_ids"] * batch["attention_mask"]
    labels = torch.randint(0, 2, (ROWS,), generator=generator)
    return {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}


def spoken(seed):
    """Spectra, and the words said."""
    generator = torch.Generator().manual_seed(seed)
    said = batch_of("text", seed=seed, rows=ROWS)
    features = torch.randn(ROWS, 5, 12, generator=generator, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": said["input_ids"], "labels": said["labels"]}


# -- Models.


def text(model, config, *, names=None, batch=None, generates=True, **options):
    """A family of texts, of the width of `kit.models`."""
    made = text_model(model, config, **options)
    prompt = padded_left if generates else None
    layers = None if names is None else Names(names)
    return Family(made, batch or _text_batch, prompt, layers)


def experts(model, config, **options):
    """A family of texts with a mixture of experts."""
    return evolve(text(model, config, **_EXPERTS, **options), dtype=torch.float32)


def _text_batch(seed):
    return batch_of("text", seed=seed, rows=ROWS)


def known(name):
    """A family that the tests of cuts have."""
    pictures = ("clip", "siglip", "vit", "vit with a head", "whisper encoder")
    generates = name not in pictures
    layouts = LAYOUTS_OF_TWO if name in TWO_LISTS else LAYOUTS
    return Family(
        MAKERS[name],
        lambda seed: batch_of(name, seed=seed, rows=ROWS),
        padded_left if generates else None,
        layouts=layouts,
    )


def whisper():
    """Whisper, its encoder and its decoder."""
    special = {"pad_token_id": 0, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.WhisperForConditionalGeneration(models.whisper(max_target_positions=40, **special))


def switch():
    """Switch Transformers, with experts in two layers of each list."""
    made = transformers.SwitchTransformersConfig(
        vocab_size=WORDS,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        num_experts=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        router_jitter_noise=0,
        dropout_rate=0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(made)


def lora():
    """A Llama of which adapters alone are trained."""
    model = llama()().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


_HALVES = ["sliding_attention", "full_attention"] * 2
_LINEAR = {
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "head_dim": 4,
}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}


def gemma3n(shared):
    """Gemma 3n: inputs of each layer from one table; the last ``shared`` layers read keys and values of others."""
    return text(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        head_dim=4,
        layer_types=_HALVES,
        sliding_window=5,
        vocab_size_per_layer_input=WORDS,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=shared,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )


FAMILIES = {
    "Llama": known("llama"),
    "Llama, tied": known("llama tied"),
    "Llama + LoRA": Family(lora, _text_batch, padded_left),
    "Llama, classes": text(
        "LlamaForSequenceClassification", "LlamaConfig", batch=classes, generates=False, num_labels=2
    ),
    "Qwen2": known("qwen2"),
    "Qwen3": known("qwen3"),
    "Qwen3, classes": text(
        "Qwen3ForSequenceClassification", "Qwen3Config", batch=classes, generates=False, num_labels=2, head_dim=4
    ),
    "Qwen3-Next": experts("Qwen3NextForCausalLM", "Qwen3NextConfig", **_LINEAR),
    "Mistral": known("mistral"),
    "Gemma 2": known("gemma2"),
    "Gemma 3, text": known("gemma3"),
    "Gemma 3n, text": gemma3n(shared=2),
    "Gemma 3n, each with its keys": gemma3n(shared=0),
    "Gemma 4, text": text(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        head_dim=4,
        global_head_dim=4,
        layer_types=_HALVES,
        sliding_window=5,
        vocab_size_per_layer_input=WORDS,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
    ),
    "Phi": text("PhiForCausalLM", "PhiConfig", partial_rotary_factor=0.5),
    "Phi-3": Family(phi3, _text_batch, padded_left),
    "Granite": text("GraniteForCausalLM", "GraniteConfig"),
    "OLMo 2": text("Olmo2ForCausalLM", "Olmo2Config"),
    "Command R7B": text("Cohere2ForCausalLM", "Cohere2Config", sliding_window=5, layer_types=_HALVES),
    "SmolLM3": text("SmolLM3ForCausalLM", "SmolLM3Config", bos_token_id=1, eos_token_id=2),
    "GLM-4": text("Glm4ForCausalLM", "Glm4Config", head_dim=4),
    "GPT-2": known("gpt2"),
    "CTRL": text(
        "CTRLLMHeadModel",
        "CTRLConfig",
        n_embd=16,
        n_layer=4,
        n_head=4,
        dff=32,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
    ),
    "GPT-J": text(
        "GPTJForCausalLM",
        "GPTJConfig",
        n_embd=16,
        n_layer=4,
        n_head=4,
        rotary_dim=2,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
    "GPT-NeoX": known("gpt_neox"),
    "GPT-Neo": text(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=5,
    ),
    "OPT": known("opt"),
    "StableLM": text("StableLmForCausalLM", "StableLmConfig", partial_rotary_factor=0.5),
    "Nemotron": text("NemotronForCausalLM", "NemotronConfig"),
    "BLOOM": text("BloomForCausalLM", "BloomConfig", n_head=4, n_layer=4, hidden_dropout=0, attention_dropout=0),
    "Falcon": text("FalconForCausalLM", "FalconConfig", alibi=False, hidden_dropout=0, attention_dropout=0),
    "Mixtral": experts("MixtralForCausalLM", "MixtralConfig"),
    # Its own generate fails, unless told to leave the routers' loss.
    "Mixtral, router loss": evolve(
        experts("MixtralForCausalLM", "MixtralConfig", output_router_logits=True),
        prompt=lambda seed, length: padded_left(seed, length) | {"output_router_logits": False},
    ),
    "Qwen2-MoE": experts("Qwen2MoeForCausalLM", "Qwen2MoeConfig", shared_expert_intermediate_size=16),
    "Qwen3-MoE": experts("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=4),
    "GPT-OSS": experts("GptOssForCausalLM", "GptOssConfig", head_dim=4, sliding_window=5),
    "DeepSeek-V3": experts("DeepseekV3ForCausalLM", "DeepseekV3Config", **_LATENT),
    "Llama 4, text": text(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **_EXPERTS,
        intermediate_size_mlp=32,
        head_dim=4,
        attention_chunk_size=5,
    ),
    "Mamba": text("MambaForCausalLM", "MambaConfig", names="backbone.layers", state_size=4),
    "RWKV": text("RwkvForCausalLM", "RwkvConfig", names="rwkv.blocks", attention_hidden_size=16, context_length=64),
    "Falcon-H1": text(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        mamba_d_ssm=16,
        mamba_n_heads=4,
        mamba_d_head=4,
        mamba_d_state=4,
        mamba_n_groups=1,
        head_dim=4,
    ),
    "Jamba": text(
        "JambaForCausalLM",
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "Zamba2": text(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=8,
        mamba_ngroups=1,
        adapter_rank=2,
        num_mem_blocks=1,
    ),
    "LFM2": text("Lfm2ForCausalLM", "Lfm2Config", layer_types=["conv", "full_attention"] * 2),
    "BERT": text("BertForMaskedLM", "BertConfig", names="bert.encoder.layer", generates=False, **_NO_DROPOUT),
    "RoBERTa": text(
        "RobertaForMaskedLM", "RobertaConfig", names="roberta.encoder.layer", generates=False, **_NO_DROPOUT
    ),
    "XLM-RoBERTa, causal": text(
        "XLMRobertaForCausalLM", "XLMRobertaConfig", names="roberta.encoder.layer", is_decoder=True, **_NO_DROPOUT
    ),
    "ModernBERT": text(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        generates=False,
        global_attn_every_n_layers=2,
        local_attention=4,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "DeBERTa-v2": text(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        generates=False,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **_NO_DROPOUT,
    ),
    "T5": known("t5"),
    "Switch Transformers": Family(switch, _text_batch, None, layouts=LAYOUTS_OF_TWO, dtype=torch.float32),
    "BART": known("bart"),
    "Whisper": Family(whisper, spoken, None, layouts=LAYOUTS_OF_TWO),
    "Whisper, encoder": known("whisper encoder"),
    "CLIP, vision": known("clip"),
    "SigLIP, vision": known("siglip"),
    "ViT": known("vit"),
    "ViT, classes": known("vit with a head"),
    **SEEN,
}
