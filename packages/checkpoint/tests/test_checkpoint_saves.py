"""A checkpoint gives back what was saved: every tensor, optimizer state, option and generator; other ranks as well."""

from __future__ import annotations

import io
import json
import math
import random
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from checkpoint_kit.checkpoints import require_same, values_of
from pipegrid.checkpoint import Checkpoints, TrainingState, loading, whole_names
from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.stored import folder
from pipegrid.gradients import LossScale, LossScaler
from pipegrid.stages import Tie
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError
from pipegrid.topology import HyperCommGrid

WIDTH, LAYERS = 6, 4


class Block(nn.Linear):
    """A layer with a buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3))


class Part(nn.Module):
    """Some layers of a model; names are those of the whole model."""

    def __init__(self, layers, *, number=0, head=False):
        super().__init__()
        self.number = number
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in layers})
        if head:
            self.head = nn.Linear(WIDTH, 2, bias=False)


def made(parts, *, seed=1, lr=1e-2):
    """Stages that have been trained for some steps, and their state."""
    torch.manual_seed(seed)
    stages = {number: Part(layers, number=number, head=LAYERS - 1 in layers) for number, layers in parts.items()}
    for stage in stages.values():
        for name, tensor in stage.state_dict().items():  # the same for a name in every layout
            torch.manual_seed(seed + sum(map(ord, name)))
            tensor.copy_(torch.randn(tensor.shape))
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.8, 0.9),
    )
    return TrainingState(stages={"language": stages}, optimizers=[optimizer]), stages, optimizer


def train(stages, optimizer, steps):
    for step in range(steps):
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                torch.manual_seed(1000 * step + sum(map(ord, name)))
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()


ONE = {0: range(LAYERS)}


def test_one_process_loads_what_it_saved(tmp_path):
    state, stages, optimizer = made(ONE)
    train(stages, optimizer, 3)
    expected = values_of(stages.values(), optimizer)
    Checkpoints(tmp_path).save(state, step=3)
    other, others, fresh = made(ONE, seed=2, lr=5.0)
    with pytest.warns(
        UserWarning, match="lr of group 0 of optimizer 0 is 5.0 in the script and 0.01 in the checkpoint"
    ):
        found = Checkpoints(tmp_path).load(other)
    assert (found.step, found.same_layout, found.skipped, found.plan) == (3, True, (), None)
    require_same(values_of(others.values(), fresh), expected)
    assert [group["lr"] for group in fresh.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    train(stages, optimizer, 2)
    train(others, fresh, 2)
    require_same(values_of(others.values(), fresh), values_of(stages.values(), optimizer))


def test_a_directory_without_checkpoints_has_nothing_to_load(tmp_path):
    state, *_ = made(ONE)
    assert Checkpoints(tmp_path / "a" / "b").load(state) is None


def test_a_checkpoint_holds_scale_data_plan_grids_and_generators(tmp_path):
    class Reader:
        position = 7

        def state_dict(self):
            return {"epoch": 1, "position": self.position, "order": (3, 1)}

        def load_state_dict(self, saved):
            self.position = saved["position"]

    state, *_ = made(ONE)
    scaler = LossScaler(LossScale(scale=1024.0))
    reader = Reader()
    grids = {"language": HyperCommGrid([2, 3], ["dp", "pp"], rank_offset=4, world_size=10)}
    state = TrainingState(stages=state.stages, scaler=scaler, data=reader, plan="a plan", grids=grids, layout="Et*4L")
    checkpoints = Checkpoints(tmp_path)
    torch.manual_seed(5)
    random.seed(5)
    checkpoints.save(state, step=1)
    drawn = torch.rand(4), random.random(), random.gauss(0, 1)
    scaler.state, reader.position = LossScale(scale=2.0), 0
    found = checkpoints.load(state)
    assert (torch.rand(4).tolist(), random.random(), random.gauss(0, 1)) == (drawn[0].tolist(), *drawn[1:])
    assert (scaler.state.scale, reader.position) == (1024.0, 7)
    assert (found.data, found.plan, found.layout) == ({"epoch": 1, "position": 7, "order": (3, 1)}, "a plan", "Et*4L")
    assert found.grids == {"language": {"dims": {"dp": 2, "pp": 3}, "rank_offset": 4}}


def test_numbers_that_json_has_no_word_for_come_back_and_the_manifest_is_strict_json(tmp_path):
    state, *_ = made(ONE)
    data = {"best": math.inf, "worst": (-math.inf, math.nan), "$float": "nan"}
    Checkpoints(tmp_path).save(TrainingState(stages=state.stages, data=data), step=1)
    text = next(tmp_path.glob("save-*/manifest.json")).read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the manifest"))
    found = Checkpoints(tmp_path).load(TrainingState(stages=state.stages)).data
    assert (found["best"], found["worst"][0], found["$float"]) == (math.inf, -math.inf, "nan")
    assert math.isnan(found["worst"][1])


def test_a_parameter_without_optimizer_state_has_none_after_a_load(tmp_path):
    state, stages, optimizer = made(ONE)
    stages[0].head.requires_grad_(False)
    for parameter in stages[0].parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = values_of(stages.values(), optimizer)
    assert ("head.weight", "exp_avg") not in expected
    Checkpoints(tmp_path).save(state, step=1)
    other, others, fresh = made(ONE, seed=2)
    train(others, fresh, 1)
    Checkpoints(tmp_path).load(other)
    require_same(values_of(others.values(), fresh), expected)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_two_stages_is_loaded_by_one_rank_and_back(ranks):
    """Saved by two ranks with a stage each, loaded by both as replicas of the whole model, and the other way round."""
    rank = dist.get_rank()
    split = {rank: range(2 * rank, 2 * rank + 2)}
    state, stages, optimizer = made(split)
    train(stages, optimizer, 3)
    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(state, step=3)
    whole, wholes, fresh = made(ONE, seed=2)
    _, references, trained = made(ONE)
    train(references, trained, 3)
    found = checkpoints.load(whole)
    assert (found.step, found.same_layout) == (3, False)
    require_same(values_of(wholes.values(), fresh), values_of(references.values(), trained))
    checkpoints.save(whole, step=4)
    back, backs, other = made(split, seed=3)
    assert checkpoints.load(back).step == 4
    require_same(values_of(backs.values(), other), values_of(stages.values(), optimizer))
    assert [group["lr"] for group in other.param_groups] == [1e-2, 1e-2]
    checkpoints.close()


@pytest.mark.ranks(2)
def test_a_name_that_is_local_to_a_stage_is_never_stored(ranks):
    rank = dist.get_rank()
    stage = nn.Module()
    stage.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    checkpoints = Checkpoints(ranks.shared_path / "a")
    with pytest.raises(
        CheckpointMismatchError,
        match=r"'blocks\.0\.weight' of module 'language' .* it is \('stage 0'.* on rank 0 and \('stage 1'.* on rank 1",
    ):
        checkpoints.save(TrainingState(stages={"language": {rank: stage}}), step=1)
    assert list((ranks.shared_path / "a").glob("*save*")) == []
    names = {stage: whole_names(stage, layers={"blocks": [2 * rank, 2 * rank + 1]})}
    assert next(iter(names[stage])) == "blocks.0.weight"
    checkpoints.save(TrainingState(stages={"language": {rank: stage}}, names=names), step=1)
    assert checkpoints.steps() == [1]
    checkpoints.close()


@pytest.mark.ranks(2)
def test_a_tied_parameter_is_stored_once(ranks):
    rank = dist.get_rank()
    stage = nn.Module()
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    stage.register_parameter(("embedding", "head")[rank], weight)
    ties = {"language": [Tie("embedding", (0, 1), ("embedding", "head"))]}
    state = TrainingState(stages={"language": {rank: stage}}, ties=ties)
    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(state, step=1)
    expected = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    checkpoints.load(state)
    assert torch.equal(weight.detach(), expected)
    checkpoints.close()


@pytest.mark.ranks(2)
def test_ranks_that_disagree_save_nothing(ranks):
    state, *_ = made({dist.get_rank(): range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)})
    checkpoints = Checkpoints(ranks.shared_path / "a")
    with pytest.raises(CheckpointMismatchError, match="the step must be equal on all ranks; it is 0 on rank 0 and 1"):
        checkpoints.save(state, step=dist.get_rank())
    other = TrainingState(stages=state.stages, data=print if dist.get_rank() else None)
    with pytest.raises(CheckpointError, match="rank 1: the data position is <built-in function print>"):
        checkpoints.save(other, step=1)
    assert checkpoints.steps() == []
    checkpoints.close()


def test_the_last_checkpoints_are_kept(tmp_path):
    state, *_ = made(ONE)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(state, step=step)
    assert checkpoints.steps() == [3, 2]
    checkpoints.save(state, step=1)  # a run that went back: its checkpoint is the newest
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.load(state).step == 1
    assert checkpoints.load(state, step=3).step == 3
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 2; it has the steps \[1, 3\]"):
        checkpoints.load(state, step=2)


def test_leftovers_of_dead_saves_are_removed(tmp_path):
    state, *_ = made(ONE)
    Checkpoints(tmp_path).save(state, step=1)
    (tmp_path / ".saving-2-ab").mkdir()
    (tmp_path / ".saving-2-ab" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("kept")
    Checkpoints(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "save-0001-step-00000001"]


def test_a_checkpoint_that_lost_its_manifest_is_skipped_with_a_warning_and_does_not_stop_a_save(tmp_path):
    state, *_ = made(ONE)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(state, step=step)
    (tmp_path / "save-0002-step-00000002" / "manifest.json").unlink()
    with pytest.warns(
        UserWarning, match=r"skipped: save-0002-step-00000002 .*manifest\.json cannot be read: .*No such"
    ):
        assert checkpoints.load(state).step == 1
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        checkpoints.load(state, step=2)
    assert checkpoints.steps() == [1]
    checkpoints.save(state, step=2)
    assert checkpoints.steps() == [2, 1]


def test_a_folder_with_the_files_of_another_step_is_corrupt_and_not_that_step(tmp_path):
    """All files are whole, and belong together: a copied or a renamed folder."""
    state, *_ = made(ONE)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(state, step=step)
    for path in (tmp_path / "save-0001-step-00000001").iterdir():
        shutil.copy(path, tmp_path / "save-0002-step-00000002")
    with pytest.raises(CorruptCheckpointError, match=r"00000002/manifest\.json is of step 1: the folder was renamed"):
        checkpoints.load(state, step=2)
    with pytest.warns(UserWarning, match=r"skipped: save-0002-step-00000002 .* is of step 1"):
        assert checkpoints.load(state).path.name == "save-0001-step-00000001"


def test_a_directory_that_is_gone_is_no_first_start(tmp_path):
    state, *_ = made(ONE)
    checkpoints = Checkpoints(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"nothing is loaded: rank 0: \S+/a was there .* and is gone"):
        checkpoints.load(state)


@pytest.mark.ranks(2)
def test_bytes_that_a_rank_reads_otherwise_than_the_one_that_verified_them_are_an_error_on_all(ranks, monkeypatch):
    """As on two hosts, of which one has a stale or a damaged copy of a file."""
    state, *_ = made({dist.get_rank(): [2 * dist.get_rank(), 2 * dist.get_rank() + 1]})
    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(state, step=1)

    def verified_elsewhere(*arguments):
        if dist.get_rank() == 1:
            reads = folder.opened

            def damaged(path):
                with reads(path) as file:
                    data = bytearray(file.read())
                data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
                return io.BytesIO(data)

            monkeypatch.setattr(folder, "opened", damaged)
        return fill(*arguments)

    fill = loading.dcp.load
    monkeypatch.setattr(loading.dcp, "load", verified_elsewhere)
    with pytest.raises(CorruptCheckpointError, match=r"is not loaded: rank 1: \w+/\S+: checksum \w+ in \S+, saved"):
        checkpoints.load(state)
    checkpoints.close()


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path):
    state, stages, optimizer = made(ONE)
    train(stages, optimizer, 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1, blocking=False)
    expected = values_of(stages.values(), optimizer)
    train(stages, optimizer, 3)
    checkpoints.wait()
    checkpoints.load(state)
    require_same(values_of(stages.values(), optimizer), expected)
    checkpoints.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_is_one_of_torch_and_torch_says_where_each_box_is(tmp_path):
    """Read by torch alone; and the three attributes of its metadata that checksums rely on."""
    state, stages, _ = made(ONE)
    Checkpoints(tmp_path).save(state, step=1)
    folder = tmp_path / "save-0001-step-00000001"
    read = {"model/language/head.weight": torch.zeros_like(stages[0].head.weight)}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    assert torch.equal(read["model/language/head.weight"], stages[0].head.weight)
    stored = FileSystemReader(folder).read_metadata().storage_data
    (place,) = (place for index, place in stored.items() if index.fqn == "model/language/head.weight")
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        values = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    assert torch.equal(values, stages[0].head.weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda stage: stage.add_module("new", nn.Linear(1, 1)),
            "stage 0 of module 'language' has 'new.weight' as .*, and the",
        ),
        (lambda stage: delattr(stage, "head"), "no rank has the tensors language/head.weight of the checkpoint"),
        (
            lambda stage: setattr(stage, "head", nn.Linear(2, 2, bias=False)),
            r"has 'head.weight' as \('float32', \[2, 2\]\)",
        ),
        (lambda stage: stage.head.double(), "'head.weight' as .*float64.*, and the checkpoint has .*float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_a_clear_error(tmp_path, change, text):
    state, *_ = made(ONE)
    Checkpoints(tmp_path).save(state, step=1)
    _, stages, _ = made(ONE)
    change(stages[0])
    with pytest.raises(CheckpointMismatchError, match=text):
        Checkpoints(tmp_path).load(TrainingState(stages={"language": stages}))


def test_a_state_is_not_loaded_into_an_optimizer_of_another_kind(tmp_path):
    state, _, optimizer = made(ONE)
    Checkpoints(tmp_path).save(state, step=1)
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    sgd = torch.optim.SGD(groups, lr=0.1)
    text = r"group 0 of optimizer 0 is of torch.optim.SGD, and was saved by torch.optim.AdamW.*load_safetensors"
    with pytest.raises(CheckpointMismatchError, match=text):
        Checkpoints(tmp_path).load(TrainingState(stages=state.stages, optimizers=[sgd]))

    class Own(torch.optim.AdamW):
        """A subclass has the same state, also with an option more."""

    own = Own([{**group, "layer_decay": 0.9} for group in optimizer.param_groups], lr=1e-2)
    Checkpoints(tmp_path).load(TrainingState(stages=state.stages, optimizers=[own]))
    assert own.param_groups[0]["betas"] == (0.8, 0.9)


def test_an_optimizer_that_does_not_fit_is_a_clear_error(tmp_path):
    state, stages, _ = made(ONE)
    Checkpoints(tmp_path).save(state, step=1)
    one_group = torch.optim.AdamW(stages[0].parameters())
    with pytest.raises(CheckpointMismatchError, match="group 0 of optimizer 0 has .*, saved with the options"):
        Checkpoints(tmp_path).load(TrainingState(stages=state.stages, optimizers=[one_group]))
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(4))])
    with pytest.raises(CheckpointError, match=r"optimizer 0 has a parameter of shape \[4\] that is in no stage"):
        Checkpoints(tmp_path).save(TrainingState(stages=state.stages, optimizers=[stranger]), step=2)
    Checkpoints(tmp_path / "bare").save(TrainingState(stages=state.stages), step=1)
    with pytest.raises(
        CheckpointMismatchError, match="group 0 of optimizer 0 has .*, which no optimizer of the checkpoint had"
    ):
        Checkpoints(tmp_path / "bare").load(state)


def test_extra_state_of_a_module_is_an_error_and_not_lost(tmp_path):
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {"history": [1.0]}

        def set_extra_state(self, state):
            self.history = state

    state = TrainingState(stages={"head": {0: nn.Sequential(Scaled(2, 2))}})
    with pytest.raises(CheckpointError, match=r"module 'head' stage 0 has 0\._extra_state .* would lose it"):
        Checkpoints(tmp_path).save(state, step=1)
    assert Checkpoints(tmp_path).steps() == []


def test_stages_without_numbers_and_wrong_layer_ids_are_clear_errors(tmp_path):
    stage = nn.Module()
    stage.blocks = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(CheckpointError, match="module 'language' has 1 stages on this rank without numbers"):
        Checkpoints(tmp_path).save(TrainingState(stages={"language": [stage]}), step=1)
    with pytest.raises(CheckpointError, match=r"blocks has 1 layers, and 2 global ids: \[4, 5\]"):
        whole_names(stage, layers={"blocks": [4, 5]})
    with pytest.raises(AttributeError, match="Module has no attribute `layers`"):
        whole_names(stage, layers={"layers": [4]})
