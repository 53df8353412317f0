"""A checkpoint as a folder that transformers reads: no key is missing or superfluous, and every bit is as trained."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState, export_safetensors, load_safetensors
from pipegrid.checkpoint.__main__ import main
from pipegrid.stages import pipeline_stage
from pipegrid.stages.errors import CheckpointError
from stages_kit.models import llama, text_model

MOE = text_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2)
MODELS = {
    "Llama": llama(),
    "tied": llama(tie_word_embeddings=True),
    "experts": MOE,
    "bfloat16": lambda: llama(dtype="bfloat16")().to(torch.bfloat16),
}


def pretrained_folder(folder, make):
    """What a run starts from: weights, config, generation config and the files of a tokenizer."""
    torch.manual_seed(1)
    model = make()
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"of": name}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return model


def checkpoint_of(model, directory):
    Checkpoints(directory).save(TrainingState(stages={"language": pipeline_stage(model, "Et|tttL", [0, 1])}), step=4)
    return next(directory.glob("save-*"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_transformers_reads_every_bit_of_the_export(tmp_path, name, size):
    model = pretrained_folder(tmp_path / "source", MODELS[name])
    saved = checkpoint_of(model, tmp_path / "run")
    folder = tmp_path / "export"
    export_safetensors(saved, folder, source=tmp_path / "source", max_shard_size=size)
    made, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]
    expected = model.state_dict()
    assert made.state_dict().keys() == expected.keys()
    for key, value in made.state_dict().items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key
    assert made.generation_config.max_new_tokens == 17
    shards = sorted(folder.glob("*.safetensors"))
    if size == "5GB":
        assert [shard.name for shard in shards] == ["model.safetensors"]
        assert not (folder / "model.safetensors.index.json").exists()
    else:
        assert len(shards) > 1
        for shard in shards:
            tensors = load_file(shard)
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {key: shard.name for shard in shards for key in load_file(shard)}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in dict(model.named_parameters()).values())
    for beside in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / beside).read_bytes() == (tmp_path / "source" / beside).read_bytes()


def test_tied_weights_have_the_names_that_transformers_writes(tmp_path):
    model = pretrained_folder(tmp_path / "source", MODELS["tied"])
    names = export_safetensors(checkpoint_of(model, tmp_path / "run"), tmp_path / "export", source=tmp_path / "source")
    assert set(names) == load_file(tmp_path / "source" / "model.safetensors").keys()


def test_the_config_has_the_dtype_of_the_weights(tmp_path):
    pretrained_folder(tmp_path / "source", MODELS["bfloat16"])
    assert json.loads((tmp_path / "source" / "config.json").read_text())["dtype"] == "bfloat16"
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1 / 3)
    export_safetensors(checkpoint_of(model, tmp_path / "run"), tmp_path / "export", source=tmp_path / "source")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert made.dtype == torch.float32
    assert torch.equal(made.lm_head.weight, model.lm_head.weight)


def test_a_config_with_infinity_is_copied_and_one_that_is_no_json_is_an_error(tmp_path):
    model = pretrained_folder(tmp_path / "source", MODELS["Llama"])
    saved, config = checkpoint_of(model, tmp_path / "run"), tmp_path / "source" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"time_step_limit": [0.0, math.inf]}))
    export_safetensors(saved, tmp_path / "export", source=tmp_path / "source")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["time_step_limit"] == [0.0, math.inf]
    for text in ('{"dtype": ', '{"dtype": 1, "dtype": 2}', "[]"):
        config.write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is no"):
            export_safetensors(saved, tmp_path / "another", source=tmp_path / "source")


@pytest.mark.ranks(2)
def test_from_a_folder_over_ranks_and_back_into_a_folder(ranks):
    rank, source, folder = dist.get_rank(), ranks.shared_path / "source", ranks.shared_path / "export"
    if rank == 0:
        pretrained_folder(source, MODELS["tied"])
    ranks.barrier()
    stage = pipeline_stage(lambda: transformers.AutoModelForCausalLM.from_pretrained(source), "Et|tttL", rank)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(2)
    checkpoints = Checkpoints(ranks.shared_path / "run")
    checkpoints.save(TrainingState(stages={"language": [stage]}), step=1)
    checkpoints.close()
    if rank == 0:
        command = ["export", str(ranks.shared_path / "run"), str(folder), "--source", str(source)]
        assert main([*command, "--max-shard-size", "8KB"]) == 0
        whole = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
        made = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(value, 2 * whole[key]) for key, value in made.items())
    ranks.barrier()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    load_safetensors(TrainingState(stages={"language": [stage]}), folder)
    assert all(parameter.any() for parameter in stage.parameters())


def test_a_folder_that_is_in_use_and_a_source_without_config_are_errors(tmp_path):
    Checkpoints(tmp_path / "run").save(TrainingState(stages={"head": {0: nn.Linear(3, 4)}}), step=1)
    saved = next((tmp_path / "run").glob("save-*"))
    export_safetensors(saved, tmp_path / "export")
    for options, text in (
        ({}, "export has weights already; give a new folder"),
        ({"source": tmp_path / "run"}, "run has no config.json"),
        ({"max_shard_size": "5 apples"}, "max_shard_size is '5 apples'; give bytes, or a text such as '5GB'"),
        ({"max_shard_size": 0}, "max_shard_size is 0; give bytes"),
    ):
        with pytest.raises(CheckpointError, match=text):
            export_safetensors(saved, tmp_path / "export", **options)
    with pytest.raises(CheckpointError, match=r"target is the file a\.safetensors; a config goes beside weights"):
        export_safetensors(saved, tmp_path / "a.safetensors", source=tmp_path)
