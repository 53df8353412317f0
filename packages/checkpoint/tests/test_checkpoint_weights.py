"""Weights out of a checkpoint as one file, into a run from one, and the command line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState, export_safetensors, load_safetensors
from pipegrid.checkpoint.__main__ import main
from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.stages import pipeline_stage
from pipegrid.stages.errors import CheckpointError
from stages_kit.models import llama

MAKE = llama(tie_word_embeddings=True)


def whole(seed=1):
    torch.manual_seed(seed)
    return MAKE()


@pytest.mark.ranks(2)
def test_a_file_out_of_stages_is_the_whole_model_and_stages_start_from_it(ranks):
    rank = dist.get_rank()
    torch.manual_seed(1)
    stage = pipeline_stage(MAKE, "Et|tttL", rank)
    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(TrainingState(stages={"language": [stage]}), step=7)
    target = ranks.shared_path / "model.safetensors"
    if rank == 0:
        export_safetensors(checkpoints.directory / "save-0001-step-00000007", target)
    ranks.barrier()
    stored = load_file(target)
    expected = dict(whole().named_parameters())
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], value) for name, value in expected.items())
    other = [stage.half() for stage in pipeline_stage(whole(seed=2), "Ett|ttL", [1 - rank])]
    load_safetensors(TrainingState(stages={"language": other}), target)
    for name, parameter in other[0].named_parameters():
        name = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        assert torch.equal(parameter.detach(), stored[name].half()), name
    checkpoints.close()


def mixed():
    torch.manual_seed(1)
    module = nn.Module()
    module.register_buffer("flags", torch.tensor([True, False, True]))
    module.register_buffer("count", torch.tensor(5))
    module.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    module.narrow = nn.Parameter(torch.randn(7).bfloat16())
    module.empty = nn.Parameter(torch.empty(0, 4))
    return module


def test_tensors_of_all_types_and_shapes_are_exported(tmp_path):
    module, head = mixed(), nn.Linear(2, 2)
    state = TrainingState(stages={"language": {0: module}, "vision": {0: head}})
    Checkpoints(tmp_path / "a").save(state, step=1)
    names = export_safetensors(f"{tmp_path}/a/save-0001-step-00000001", f"{tmp_path}/both.safetensors")
    both = load_file(tmp_path / "both.safetensors")
    expected = {f"language.{name}": value for name, value in module.state_dict().items()}
    expected |= {f"vision.{name}": value for name, value in head.state_dict().items()}
    assert set(names) == both.keys() == expected.keys()
    for name, value in expected.items():
        assert both[name].dtype == value.dtype
        assert torch.equal(both[name], value)
    with torch.no_grad():
        for tensor in (*module.state_dict().values(), *head.parameters()):
            tensor.zero_()
    load_safetensors(state, tmp_path / "both.safetensors")
    assert all(torch.equal(value, both[f"language.{name}"]) for name, value in module.state_dict().items())
    export_safetensors(tmp_path / "a" / "save-0001-step-00000001", tmp_path / "one.safetensors", module="vision")
    assert load_file(tmp_path / "one.safetensors").keys() == {"weight", "bias"}
    with pytest.raises(CheckpointError, match="has no module 'audio'; it has language, vision"):
        export_safetensors(tmp_path / "a" / "save-0001-step-00000001", tmp_path / "x", module="audio")


def test_a_file_of_another_model_is_a_clear_error(tmp_path):
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "m.safetensors")
    with pytest.raises(
        CheckpointMismatchError, match=r"m\.safetensors has no bias, nor vision\.bias, for module 'vision'"
    ):
        load_safetensors(TrainingState(stages={"vision": {0: nn.Linear(2, 2)}}), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"weight has shape \[2, 2\] in the file, and \[3, 2\] in module"):
        state = TrainingState(stages={"vision": {0: nn.Linear(2, 3, bias=False)}})
        load_safetensors(state, tmp_path / "m.safetensors")


def test_the_command_shows_verifies_and_exports(tmp_path, capsys):
    module = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, betas=(0.8, 0.9))
    state = TrainingState(stages={"head": {0: module}}, optimizers=[optimizer], data={"sample": 64}, plan="a plan")
    Checkpoints(tmp_path / "a").save(state, step=3)
    assert main(["show", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "save-0001-step-00000003: step 3, saved by 1 ranks" in shown
    assert "module head: 2 tensors, 16 values" in shown
    assert "2 parameters: " in shown
    assert "betas=(0.8, 0.9), " in shown
    assert "lr=0.5" in shown
    assert 'data: {"sample": 64}' in shown
    assert main(["verify", str(tmp_path / "a")]) == 0
    assert "all bytes as saved" in capsys.readouterr().out
    target = tmp_path / "head.safetensors"
    assert main(["export", str(tmp_path / "a"), str(target)]) == 0
    assert torch.equal(load_file(target)["weight"], module.weight.detach())
    written = next((tmp_path / "a").glob("*/*.distcp"))
    content = bytearray(written.read_bytes())
    content[len(content) // 2] ^= 1
    written.write_bytes(content)
    assert main(["verify", str(tmp_path / "a")]) == 1
    assert "save-0001-step-00000003: the tensor" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["show", str(tmp_path / "b")])
