"""`from_pretrained` in the function that makes the model: the weights of transformers' own load, and only own ones."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from pipegrid.stages import pipeline_stage
from pipegrid.stages.errors import CorruptCheckpointError, CutError
from pipegrid.stages.safetensors_files import Stored
from stages_kit.models import llama, text_model

from .test_stages_cut_values import Peak

LAYOUT = "Et|tttL"


def saved(folder, make, **options):
    torch.manual_seed(5)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.to(options.pop("dtype", torch.bfloat16)).save_pretrained(folder, **options)
    return folder


def require_values_of_one_process(make, stages=(0, 1)):
    """Every stage of ``make`` has the parameters and buffers of one process, and leaves the generator as it does."""

    def seeded(function):
        torch.manual_seed(9)
        return function(), torch.rand(3)

    whole, drawn = seeded(make)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers())
    ties = pipeline_stage(whole, LAYOUT, 0).ties
    for number in stages:
        stage, next_values = seeded(lambda n=number: pipeline_stage(make, LAYOUT, n))
        assert torch.equal(next_values, drawn)
        own = dict(stage.named_parameters(remove_duplicate=False))
        assert own
        for name, value in own.items():
            assert value.dtype == parameters[name].dtype, name
            assert torch.equal(value, parameters[name]), name
            assert value.requires_grad == parameters[name].requires_grad
        for name, value in stage.named_buffers():
            assert torch.equal(value, buffers[name]), name
        assert stage.ties == ties


@pytest.fixture
def read(monkeypatch):
    """The names of what is read."""
    names = []
    original = Stored.read
    monkeypatch.setattr(Stored, "read", lambda self: (names.append(self.name), original(self))[1])
    return names


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float32, torch.float64, "auto"])
def test_a_sharded_folder_is_loaded_at_any_dtype(tmp_path, read, stored, loaded):
    saved(tmp_path, llama(), dtype=stored, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    make = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=loaded)
    require_values_of_one_process(make, stages=(1,))
    layers = {name.split(".")[2] for name in read if ".layers." in name}
    assert layers == {"1", "2", "3"}
    assert "model.embed_tokens.weight" not in read
    assert len(read) == len(set(read))


def test_one_file_and_an_import_in_the_function_are_the_same(tmp_path, read):
    saved(tmp_path, llama())
    assert (tmp_path / "model.safetensors").is_file()

    def make():
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    require_values_of_one_process(make, stages=(0,))
    assert "lm_head.weight" not in read


def test_tied_weights_are_tied_and_read_by_both_stages(tmp_path):
    saved(tmp_path, llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    make = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    require_values_of_one_process(make)
    assert [tie.stages for tie in pipeline_stage(make, LAYOUT, 0).ties] == [(0, 1)]


def test_tied_weights_that_are_stored_twice_are_tied_where_they_are_equal(tmp_path):
    saved(tmp_path, llama(tie_word_embeddings=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    make = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    require_values_of_one_process(make)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CutError, match=r"ties lm_head.weight to model.embed_tokens.weight, .* different values"):
        pipeline_stage(make, LAYOUT, 0)
    untied = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    require_values_of_one_process(untied)


def test_the_base_model_prefix_is_added_and_a_head_that_is_not_stored_is_that_of_one_process(tmp_path):
    saved(tmp_path, lambda: llama()().model)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    require_values_of_one_process(lambda: load(tmp_path, dtype=torch.float32, num_labels=3))
    require_values_of_one_process(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))


MOE = text_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2)


def test_experts_that_transformers_stores_one_by_one_are_merged(tmp_path, read):
    saved(tmp_path, MOE, dtype=torch.float32, max_shard_size="20KB")
    stored = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in stored
    make = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    require_values_of_one_process(make, stages=(0,))
    assert not [name for name in read if name.startswith(("model.layers.1.", "model.layers.2.", "model.layers.3."))]


def test_names_of_an_older_transformers_are_renamed(tmp_path):
    key = {"^transformer.h": "model.layers"}
    saved(tmp_path, llama())
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.layers", "transformer.h"): value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    load = transformers.LlamaForCausalLM.from_pretrained
    require_values_of_one_process(lambda: load(tmp_path, dtype=torch.float32, key_mapping=key))


def test_a_change_after_the_load_is_that_of_one_process(tmp_path):
    saved(tmp_path, llama())

    def make():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        model.resize_token_embeddings(60, mean_resizing=False)
        with torch.no_grad():
            model.model.layers[3].load_state_dict(model.model.layers[0].state_dict())
            model.model.layers[2].mlp.up_proj.weight.normal_()
        return model.to(torch.bfloat16)

    require_values_of_one_process(make)


def test_missing_and_superfluous_keys_are_as_in_one_process(tmp_path):
    saved(tmp_path, llama(), dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.9.extra"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    require_values_of_one_process(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path))


def test_a_key_of_another_shape_is_named(tmp_path):
    saved(tmp_path, llama(), dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.layers.1.mlp.up_proj.weight": torch.ones(3, 4)}
    save_file(tensors, file, {"format": "pt"})
    text = r"model.layers.1.mlp.up_proj.weight is \[3, 4\] in the files and \[32, 16\] in the model"
    with pytest.raises(CutError, match=text):
        pipeline_stage(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path), LAYOUT, 0)
    load = transformers.LlamaForCausalLM.from_pretrained
    require_values_of_one_process(lambda: load(tmp_path, ignore_mismatched_sizes=True))


def test_damaged_and_lost_files_are_named(tmp_path):
    saved(tmp_path / "a", llama(), max_shard_size="10KB")
    make = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a")
    shards = sorted((tmp_path / "a").glob("model-*.safetensors"))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-5])
    with pytest.raises(CorruptCheckpointError, match=rf"{shards[1].name} is no safetensors file"):
        pipeline_stage(make, LAYOUT, 0)
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        pipeline_stage(make, LAYOUT, 0)


def test_transformers_reads_files_by_the_name_that_is_replaced(tmp_path):
    """What `pretrained` relies on: the name, one thread on request, and all tensors by slices."""
    from transformers import modeling_utils

    saved(tmp_path, llama())
    before = modeling_utils.safe_open, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    seen = []

    class Watched:
        def __init__(self, *args, **named):
            self.file = before[0](*args, **named)

        def __getattr__(self, name):
            seen.append(name)
            return getattr(self.file, name)

        def __exit__(self, *raised):
            return self.file.__exit__(*raised)

    try:
        modeling_utils.safe_open = Watched
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    finally:
        modeling_utils.safe_open = before[0]
    assert {"keys", "get_slice"} <= set(seen)
    pipeline_stage(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path), LAYOUT, 0)
    assert (modeling_utils.safe_open, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")) == before


def test_tensors_of_other_stages_take_no_memory(tmp_path):
    saved(tmp_path, llama(num_hidden_layers=12), max_shard_size="30KB")
    make = lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    largest = 4 * max(value.numel() for value in make().parameters())
    with Peak() as part:
        stage = pipeline_stage(make, "Ettttt|t|ttttttL", 1)
    share = sum(parameter.nbytes for parameter in stage.parameters())
    tables = sum(buffer.nbytes for buffer in make().buffers())
    assert share <= part.most <= share + 2 * largest + 2 * tables  # the buffer that they share, one before its cast
