"""docs/pretrained.md: its code and its command run as they stand, on a model with as many layers and other sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pipegrid.checkpoint.__main__ import main

from .kit.programs import blocks

PAGE = (Path(__file__).parents[1] / "docs" / "pretrained.md").read_text(encoding="utf-8")
CODE = blocks(PAGE)
(COMMAND,) = re.findall(r"```shell\npython -m pipegrid\.checkpoint (.*?)\n```", PAGE)


@pytest.mark.nightly
@pytest.mark.ranks(4)
def test_the_page_loads_saves_and_exports(ranks, monkeypatch):
    monkeypatch.chdir(ranks.shared_path)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # the fixture has done it
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    if dist.get_rank() == 0:
        config = LlamaConfig(**sizes, num_hidden_layers=80, vocab_size=32, dtype="bfloat16")
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("llama-70b", max_shard_size="20KB")
        assert Path("llama-70b/model.safetensors.index.json").is_file()
    ranks.barrier()
    names = {"__name__": "page"}
    for code in CODE:
        exec(compile(code, "pretrained.md", "exec"), names)  # the page's own code
    assert {parameter.dtype for parameter in names["stage"].parameters()} == {torch.float32}
    if dist.get_rank() == 0:
        assert main(shlex.split(COMMAND)) == 0
        made, found = AutoModelForCausalLM.from_pretrained("my-llama", output_loading_info=True)
        assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        expected = LlamaForCausalLM.from_pretrained("llama-70b", dtype=torch.float32).state_dict()
        assert made.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in made.state_dict().items())
    ranks.barrier()
