"""The hooks for data-parallel wrappers, on real ranks: each gradient is reduced once, at the right time."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograd_kit.gradients import assert_same_gradients
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PCommunicator

from ..kit.models import Part, call, in_one_process, microbatch, step_on

MICROBATCHES = 3


def reference(stages):
    """The stages with their gradients of both lanes."""
    parts = [Part(stage) for stage in range(stages)]
    data = [microbatch(index, lane) for lane in range(2) for index in range(MICROBATCHES)]
    in_one_process(parts, data, len(data))
    return parts


@pytest.mark.ranks(2)
@pytest.mark.parametrize("no_sync", [True, False])
def test_ddp_reduces_in_the_last_backward_alone(ranks, no_sync):
    """Left in the last forward, where DDP decides; without ``no_sync_func`` it reduces every microbatch."""
    model = DistributedDataParallel(Part(0))
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(ranks.world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, count)
    model.module.config = PipelineConfig(no_sync_func=model.no_sync if no_sync else None)
    call(model=model, count=MICROBATCHES, forward_step_func=step_on(ranks.rank))
    assert len(reductions) == (1 if no_sync else MICROBATCHES)
    assert_same_gradients([model.module], reference(1))


class Averaging(nn.Module):
    """A wrapper as frameworks have it: averages a gradient over its lanes as soon as it is there, unless in no_sync."""

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group, self.silent, self.reduced, self.log = module, group, False, [], []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)

    @contextlib.contextmanager
    def no_sync(self):
        self.silent = True
        self.log.append("no_sync")
        yield
        self.silent = False
        self.log.append("sync")

    def _ready(self, parameter):
        if not self.silent:
            self.average([parameter])

    def average(self, parameters):
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad.div_(self.group.size())
            self.reduced.append(id(parameter))

    def before_forward(self, parameters):
        self.log.append(f"{len(list(parameters))} parameters")

    def forward(self, x):
        self.log.append("forward")
        return self.module(x)


def train(ranks, function, *, grad_sync=False):
    """A step of two stages on two lanes, with the gradients of one process; the wrapper of this rank's stage."""
    box = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    here = box.coords(ranks.rank)
    model = Averaging(Part(here["pp"]), dp)
    model.module.config = PipelineConfig(
        pipeline_dtype=torch.float64,
        strict=ranks.strict_sends,
        no_sync_func=model.no_sync,
        grad_sync_func=model.average if grad_sync else None,
        param_sync_func=model.before_forward,
    )
    communicator = P2PCommunicator(pp, model.module.config)
    step = step_on(here["dp"])
    call(function, model=model, count=MICROBATCHES, forward_step_func=step, p2p_communicator=communicator)
    communicator.close()
    assert sorted(model.reduced) == sorted(id(parameter) for parameter in model.module.parameters())
    assert_same_gradients([model.module], [reference(2)[here["pp"]]])
    return model


@pytest.mark.ranks(4)
@pytest.mark.parametrize("grad_sync", [True, False], ids=["grad_sync_func", "none"])
def test_a_wrapper_reduces_every_gradient_of_a_pipeline_once(ranks, grad_sync):
    """The first stage in its last backward; the others, where there is a grad_sync_func, by that, after it."""
    model = train(ranks, forward_backward_pipelining_without_interleaving, grad_sync=grad_sync)
    assert model.log[:3] == ["2 parameters", "no_sync", "forward"]
    assert model.log[-1] == "sync"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1", "zero_bubble_h2"])
def test_a_wrapper_reduces_in_the_last_backward_of_any_schedule(ranks, schedule):
    """Also where the last backward is a half, of whichever microbatch."""
    train(ranks, get_forward_backward_func(schedule=schedule))


@pytest.mark.ranks(2)
def test_ddp_in_a_pipeline_is_refused_before_anything_is_sent(ranks):
    box = HyperCommGrid([1, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    config = PipelineConfig(pipeline_dtype=torch.float64)
    model = DistributedDataParallel(Part(ranks.rank, config), process_group=dp)
    communicator = P2PCommunicator(pp, config)
    with pytest.raises(GradientError, match="decides in a forward whether the next backward reduces"):
        call(
            forward_backward_pipelining_without_interleaving,
            model=model,
            count=MICROBATCHES,
            forward_step_func=step_on(ranks.rank),
            p2p_communicator=communicator,
        )
    communicator.close()
