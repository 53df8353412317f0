"""What a run keeps and restores, what cannot be done again, and who takes part in an epoch."""

from __future__ import annotations

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipegrid.gradients import accumulate_in_main_grad
from pipegrid.gradients.layout import TieMark
from pipegrid.monitor import JobFailedError
from pipegrid.schedules import Actor, LossScale, LossScaler, PipelineConfig, clip_grad_norm_
from pipegrid.stages import DropoutMasks
from pipegrid.survive import (
    KeptState,
    Living,
    SurviveError,
    require_redoable,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).double()


def step(stage):
    stage(torch.randn(6, 4, dtype=torch.float64)).square().sum().backward()


def state(stage):
    """All that a step changes."""
    gradients = [p.grad if p.grad is None else p.grad.clone() for p in stage.parameters()]
    main = [getattr(p, "main_grad", None) for p in stage.parameters()]
    buffers = [b.clone() for b in stage.buffers()]
    return gradients, [m if m is None else m.clone() for m in main], buffers, torch.get_rng_state(), random.random()


def equal(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


class TestKeptState:
    @pytest.mark.parametrize("main", [False, True])
    @pytest.mark.parametrize(
        "change",
        [
            lambda parameter, place: getattr(parameter, place).mul_(1.0),
            lambda parameter, place: setattr(parameter, place, getattr(parameter, place).clone()),
            lambda parameter, place: setattr(parameter, place, None),
        ],
        ids=["written", "replaced", "dropped"],
    )
    def test_gradients_that_are_not_kept_may_be_read_alone(self, change, main):
        stage = model()
        if main:
            accumulate_in_main_grad(stage, dtype=torch.float64)
        step(stage)
        kept = KeptState(stage)
        kept.keep(gradients=False)
        clip_grad_norm_(stage, ProcessGroupCollection(), math.inf)
        kept.require_unwritten("norm 0")
        parameter = random.choice(list(stage.parameters()))
        change(parameter, "main_grad" if main else "grad")
        with pytest.raises(SurviveError, match="'norm 0' has changed the gradient of .* with keep_gradients=False"):
            kept.require_unwritten("norm 0")
        kept.keep()
        stage.zero_grad()
        kept.require_unwritten("clip 0")

    @pytest.mark.parametrize("earlier", [0, 1, 2])
    @pytest.mark.parametrize("main", [False, True])
    def test_a_step_after_restore_is_the_step_bit_for_bit(self, earlier, main):
        stage = model()
        if main:
            accumulate_in_main_grad(stage, dtype=torch.float64)
        for _ in range(earlier):
            step(stage)
        kept = KeptState(stage)
        kept.keep()
        step(stage)
        wanted = state(stage)
        step(stage)  # a second one that fails somewhere
        kept.restore()
        step(stage)
        assert equal(state(stage), wanted)

    def test_every_step_is_kept_anew(self):
        stage = model()
        kept = KeptState(stage)
        for _ in range(3):
            kept.keep()
            before = state(stage)
            kept.keep()  # random.random() of `state` has moved on
            step(stage)
            kept.restore()
            kept.drop()
            after = state(stage)
            assert equal(before[:4], after[:4])
            step(stage)

    def test_a_gradient_is_the_same_tensor_after_restore(self):
        """Buckets and optimizers may refer to it."""
        stage = model()
        step(stage)
        tensors = [p.grad for p in stage.parameters()]
        kept = KeptState(stage)
        kept.keep()
        stage.zero_grad()
        step(stage)
        kept.restore()
        assert [id(p.grad) for p in stage.parameters()] == [id(tensor) for tensor in tensors]

    def test_gradients_are_left_alone_where_they_are_not_kept(self):
        stage = model()
        step(stage)
        kept = KeptState(stage)
        kept.keep(gradients=False)
        step(stage)
        changed = [p.grad.clone() for p in stage.parameters()]
        kept.restore()
        assert equal([p.grad for p in stage.parameters()], changed)

    def test_a_loss_scaler_of_a_config_is_as_before(self):
        stage, scaler = model(), LossScaler(LossScale(growth_interval=1))
        stage.config = PipelineConfig(grad_scale_func=scaler)
        kept = KeptState(stage)
        kept.keep()
        before = scaler.state_dict()
        scaler.unscale(stage)
        scaler.state, scaler.skipped = LossScale(scale=2.0), 3
        kept.restore()
        assert scaler.state_dict() == before

    def test_a_buffer_that_a_forward_replaces_is_put_back(self):
        stage = nn.Linear(2, 2)
        stage.register_buffer("count", torch.zeros(()))
        stage.register_buffer("none", None)
        kept = KeptState(stage)
        kept.keep()
        held = stage.count
        stage.count, stage.none = stage.count + 1, torch.ones(2)
        kept.restore()
        assert stage.count is held
        assert stage.none is None


def noted(*_):
    """A hook of a script."""


class TestRequireRedoable:
    def test_a_stage_with_buffers_dropout_and_seeded_masks_is_redoable(self):
        stage = model()
        stage.layers = nn.ModuleList([nn.Linear(1, 1)])
        DropoutMasks(seed=1).apply(stage)
        accumulate_in_main_grad(stage, dtype=torch.float64)
        require_redoable(stage, [0, 1])

    @pytest.mark.parametrize(
        "add",
        [
            lambda layer: layer.register_forward_hook(noted),
            lambda layer: layer.register_forward_pre_hook(partial(noted, 1)),
            lambda layer: layer.register_full_backward_hook(noted),
            lambda layer: layer.register_full_backward_pre_hook(noted),
        ],
    )
    def test_a_hook_of_the_scripts_own_is_named_unless_it_is_allowed(self, add):
        stage = model()
        add(stage[3])
        with pytest.raises(SurviveError, match=r"'vision\.3' has .* noted, .*allow=\{'3'\}"):
            require_redoable({"vision": stage}, [0, 1])
        require_redoable(stage, [0, 1], allow={"3"})
        require_redoable(stage, [0, 1], allow={"noted"})

    @pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_a_hook_of_a_parameter_is_named(self, add):
        stage = model()
        getattr(stage[0].weight, add)(noted)
        with pytest.raises(SurviveError, match=r"'0\.weight' has .* noted"):
            require_redoable(stage, [0, 1])

    def test_a_parameter_tied_within_a_replica_is_named_and_one_over_all_replicas_is_not(self):
        stage = model()
        stage[0].weight.tied = TieMark("embedding", over_replicas=True)
        require_redoable(stage, [0, 1])
        stage[0].weight.tied = TieMark("embedding", over_replicas=False)
        with pytest.raises(SurviveError, match=r"'0\.weight' is tied as 'embedding' among the ranks of one replica"):
            require_redoable(stage, [0, 1])

    def test_allow_is_a_list_of_names(self):
        with pytest.raises(SurviveError, match=r"allow is 'layers'; it must be a list of names, such as \['layers'\]"):
            require_redoable(model(), [0, 1], allow="layers")

    def test_a_config_with_a_monitor_is_named(self):
        stage = model()
        stage.config = SimpleNamespace(monitor=object())
        with pytest.raises(SurviveError, match="the config of the stage has a monitor"):
            require_redoable(stage, [0, 1])

    def test_a_sync_batch_norm_is_named(self):
        stage = nn.SyncBatchNorm.convert_sync_batchnorm(model())
        with pytest.raises(SurviveError, match="'1' is a SyncBatchNorm"):
            require_redoable(stage, [0, 1])


@pytest.mark.ranks(2)
def test_parameters_sharded_over_replicas_are_named_and_those_over_tp_are_not(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stage = model()
    fully_shard(stage[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(SurviveError, match=r"'0\.weight' is sharded over replicas by fully_shard"):
        require_redoable(stage, [0, 1])
    require_redoable(stage, [ranks.rank, 7])  # a mesh of tensor-parallel ranks of one replica


class TestLiving:
    grid = HyperCommGrid([2, 3, 2], ["tp", "dp", "pp"], world_size=12)

    def test_all_take_part_while_all_live(self):
        living = Living(self.grid, range(12))
        assert (living.dead, living.ranks) == ((), tuple(range(12)))
        assert (living.positions, living.replicas) == (2, 3)

    def test_the_tensor_parallel_peer_of_a_dead_rank_retires(self):
        living = Living(self.grid, {*range(12)} - {9})
        assert living.dead == (Actor(1, 1),)
        assert living.ranks == tuple(sorted({*range(12)} - {8, 9}))
        assert living.group("dp", 6) == (6, 10)
        assert living.group(("tp", "dp"), 6) == (6, 7, 10, 11)
        assert living.group("pp", 2) == (2,)

    def test_a_position_without_a_living_replica_ends_the_job(self):
        living = Living(self.grid, {*range(12)} - {7, 8, 10})
        with pytest.raises(JobFailedError, match="position 1 of the pipeline is dead in all 3 replicas"):
            living.require_every_position()
