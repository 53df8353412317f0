"""What a script changes between two runs of one directory: optimizers, options, modules."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState
from pipegrid.checkpoint.errors import CheckpointMismatchError
from pipegrid.checkpoint.state import optimizers
from pipegrid.checkpoint.stored import manifest, reading
from pipegrid.stages.errors import CheckpointError


class Stage(nn.Module):
    """A layer."""

    number = 0

    def __init__(self, value=0.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.constant_(self.layer.weight, value)


def stepped(make):
    stage = Stage()
    optimizer = make(stage.parameters())
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TrainingState(stages={"m": [stage]}, optimizers=[optimizer]), optimizer


def saved(directory, make):
    Checkpoints(directory).save(stepped(make)[0], step=1)


def loaded(directory, make):
    state, optimizer = stepped(make)
    Checkpoints(directory).load(state)
    return optimizer


class Own(torch.optim.Adam):
    """A script's Adam."""


class Momentum(torch.optim.SGD):
    """A script's SGD."""


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, parameters, lr=0.1):
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    def step(self):
        """Keep a momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.grad.clone()


class Tiger(torch.optim.Optimizer):
    """Another one, with the same options and state."""

    __init__, step = Lion.__init__, Lion.step


class Sub(Lion):
    """A subclass of the first."""


OPTIM = torch.optim
KINDS = [OPTIM.Adam, OPTIM.AdamW, OPTIM.NAdam, OPTIM.RAdam, OPTIM.Adamax, OPTIM.SGD, OPTIM.RMSprop, Lion, Tiger]


def grouped(kind):
    """An optimizer, the names of its parameters, and its groups as they are saved."""
    stage = Stage()
    names = {id(parameter): ("m", name) for name, parameter in stage.named_parameters()}
    optimizer = kind(list(stage.parameters()), lr=0.1)
    return optimizer, names, optimizers.groups([optimizer], names)


@pytest.mark.parametrize("kept", KINDS, ids=lambda kind: kind.__name__)
def test_a_state_is_loaded_into_its_own_kind_of_optimizer_alone(kept):
    _, _, entries = grouped(kept)
    for kind in KINDS:
        optimizer, names, _ = grouped(kind)
        if kind is kept:
            assert optimizers.loaded_groups([optimizer], names, entries)[0].changed == ()
            continue
        text = rf"group 0 of optimizer 0 is of \S+\.{kind.__name__}, and was saved by \S+\.{kept.__name__}, .*load_"
        with pytest.raises(CheckpointMismatchError, match=text):
            optimizers.loaded_groups([optimizer], names, entries)


@pytest.mark.parametrize("kind", [OPTIM.Adam, OPTIM.RAdam, OPTIM.SGD], ids=lambda kind: kind.__name__)
def test_a_checkpoint_of_adamw_is_not_loaded_into_another_kind(tmp_path, kind):
    saved(tmp_path, OPTIM.AdamW)
    with pytest.raises(
        CheckpointMismatchError, match=rf"is of torch\.optim\.{kind.__name__}, and was saved by torch\.opt"
    ):
        loaded(tmp_path, kind)


@pytest.mark.parametrize(("kept", "other"), [(OPTIM.Adam, Own), (Own, OPTIM.Adam), (Lion, Sub), (OPTIM.SGD, Momentum)])
def test_a_subclass_is_of_the_kind_of_its_base(tmp_path, kept, other):
    saved(tmp_path, lambda parameters: kept(parameters, lr=0.1))
    loaded(tmp_path, lambda parameters: other(parameters, lr=0.1))


@pytest.mark.parametrize("kind", ["AdamW", "", "Adam"])
def test_a_checkpoint_that_has_the_name_alone_is_compared_by_it(tmp_path, kind):
    saved(tmp_path, lambda parameters: OPTIM.AdamW(parameters, lr=0.1))
    folder = tmp_path / "save-0001-step-00000001"
    found = reading.read(folder)
    groups = tuple(evolve(group, kind=kind, defaults={}) for group in found.groups)
    manifest.write(folder, evolve(found, groups=groups))
    if kind == "Adam":
        with pytest.raises(CheckpointMismatchError, match="was saved by Adam"):
            loaded(tmp_path, lambda parameters: OPTIM.AdamW(parameters, lr=0.1))
    else:
        loaded(tmp_path, lambda parameters: OPTIM.AdamW(parameters, lr=0.1))


def told(directory, make):
    """What a load warns of, and the optimizer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = loaded(directory, make)
    return [str(one.message) for one in caught], optimizer


def adamw(**options):
    return lambda parameters: OPTIM.AdamW(parameters, **({"lr": 0.5, "weight_decay": 0.25} | options))


def test_changed_options_are_told_once_with_both_values_and_the_checkpoint_wins(tmp_path):
    saved(tmp_path, adamw())
    texts, optimizer = told(tmp_path, adamw(lr=0.125, weight_decay=0.0))
    (text,) = texts
    assert "weight_decay of group 0 of optimizer 0 is 0.0 in the script and 0.25 in the checkpoint" in text
    assert "lr of group 0 of optimizer 0 is 0.125 in the script and 0.5 in the checkpoint" in text
    assert text.endswith("the checkpoint's are used; to use the script's, set them after the load")
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    assert told(tmp_path, adamw(betas=(0.5, 0.75)))[0][0].startswith("betas of group 0")
    assert told(tmp_path, adamw())[0] == []


def scheduled(make, schedule, *, steps):
    """An optimizer some steps into a schedule, if it has one."""

    def made(parameters):
        optimizer = make(parameters)
        if schedule is not None:
            running = schedule(optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps in another order
                for _ in range(steps):
                    running.step()
        return optimizer

    return made


SCHEDULES = {
    "cosine": partial(OPTIM.lr_scheduler.CosineAnnealingLR, T_max=10),
    "warm-up": partial(OPTIM.lr_scheduler.LinearLR, start_factor=0.25),
    "one cycle": partial(OPTIM.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=10),  # which has a lr of its own
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("again", [False, True])
def test_what_a_schedule_changes_is_no_change_of_the_script(tmp_path, name, again):
    """Whether the schedule is made before the load or after it."""
    saved(tmp_path, scheduled(adamw(), SCHEDULES[name], steps=4))
    fresh = partial(scheduled, schedule=SCHEDULES[name] if again else None, steps=0)
    assert told(tmp_path, fresh(adamw()))[0] == []
    (text,) = told(tmp_path, fresh(adamw(weight_decay=0.5)))[0]
    assert text.startswith("weight_decay")
    if name != "one cycle":
        (text,) = told(tmp_path, fresh(adamw(lr=0.75)))[0]
        assert text.startswith("lr of group 0 of optimizer 0 is 0.75 in the script and 0.5 in the checkpoint")


def test_what_a_script_sets_by_a_rule_of_its_own_is_no_change_of_the_script(tmp_path):
    def halfway(parameters):
        optimizer = adamw()(parameters)
        optimizer.param_groups[0]["lr"] = 0.0625
        return optimizer

    saved(tmp_path, halfway)
    assert told(tmp_path, adamw())[0] == []
    (text,) = told(tmp_path, adamw(weight_decay=0.5))[0]
    assert text.startswith("weight_decay")
    (text,) = told(tmp_path, adamw(lr=0.75))[0]
    assert text.startswith("lr of group 0 of optimizer 0 is 0.75 in the script and 0.5 in the checkpoint")


def test_how_a_step_is_computed_stays_the_choice_of_the_script(tmp_path):
    saved(tmp_path, adamw(foreach=False))
    texts, optimizer = told(tmp_path, adamw(foreach=None, fused=True))
    assert texts == []
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (None, True)


@pytest.mark.ranks(2)
def test_changed_options_of_any_rank_are_told_on_the_first(ranks):
    rank = dist.get_rank()

    def state(lr):
        stage = nn.ModuleDict({f"part{rank}": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(stage.parameters(), lr=lr)
        return TrainingState(stages={"m": {rank: stage}}, optimizers=[optimizer])

    checkpoints = Checkpoints(ranks.shared_path / "a")
    checkpoints.save(state(0.5), step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.load(state(0.5 - 0.25 * rank))
    assert [str(one.message)[:22] for one in caught] == ([] if rank else ["lr of group 0 of optim"])
    other = state(0.5)
    if rank:
        other = TrainingState(
            stages=other.stages, optimizers=[torch.optim.Adam(next(iter(other.stages["m"].values())).parameters())]
        )
    with pytest.raises(CheckpointMismatchError, match="rank 1: group 0 of optimizer 0 is of torch.optim.Adam, and was"):
        checkpoints.load(other)
    checkpoints.close()


def found_after(checkpoints, step):
    stage = Stage(-1.0)
    assert checkpoints.load(TrainingState(stages={"m": [stage]})).step == step
    return stage.layer.weight[0, 0].item()


@pytest.mark.parametrize(
    "change",
    [
        lambda stage: setattr(stage, "layer", Stage(7.0).layer),
        lambda stage: setattr(stage.layer, "weight", nn.Parameter(torch.full((4, 4), 7.0))),
        lambda stage: setattr(stage.layer.weight, "data", torch.full((4, 4), 7.0)),
    ],
    ids=["module", "parameter", "data"],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_module_or_parameter_in_anothers_place_is_saved(tmp_path, change, blocking):
    stage = Stage(1.0)
    state = TrainingState(stages={"m": [stage]})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1, blocking=blocking)
    change(stage)
    checkpoints.save(state, step=2, blocking=blocking)
    assert found_after(checkpoints, 2) == 7.0
    with torch.no_grad():
        stage.layer.weight.fill_(8.0)
    checkpoints.save(state, step=3, blocking=blocking)
    assert found_after(checkpoints, 3) == 8.0
    checkpoints.close()


def test_a_new_parameter_has_its_own_optimizer_state(tmp_path):
    state, optimizer = stepped(adamw())
    (stage,) = state.stages["m"]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, step=1)
    stage.layer = nn.Linear(4, 4)
    with pytest.raises(CheckpointError, match="that is in no stage of this rank"):
        checkpoints.save(state, step=2)
    optimizer.param_groups[0]["params"] = list(stage.parameters())
    checkpoints.save(state, step=3)
    assert checkpoints.steps() == [3, 1]
    checkpoints.close()
