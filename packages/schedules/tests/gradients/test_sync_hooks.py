"""The hooks for data-parallel wrappers, on real ranks: each gradient is reduced once, at the right time."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PCommunicator

WIDTH, MICROBATCHES = 4, 3


class Part(nn.Module):
    def __init__(self, seed, config):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.config, self.received = config, [None]

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, x):
        return torch.tanh(self.layer(x))


def microbatch(index, lane):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * lane + index), dtype=torch.float64)


def mean_loss(output):
    return output.square().mean(), None


def reference(parts, lanes):
    for lane in range(lanes):
        for index in range(MICROBATCHES):
            x = microbatch(index, lane)
            for part in parts:
                x = part(x)
            (mean_loss(x)[0] / MICROBATCHES / lanes).backward()


COMMON = {"num_microbatches": MICROBATCHES, "seq_length": 1, "micro_batch_size": 1}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("no_sync", [True, False])
def test_ddp_reduces_in_the_last_backward_alone(ranks, no_sync):
    """Left in the last forward, where DDP decides; without ``no_sync_func`` it reduces every microbatch."""
    model = DistributedDataParallel(Part(0, None))
    reductions = []

    def count(state, bucket):
        reductions.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(ranks.world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, count)
    model.module.config = PipelineConfig(no_sync_func=model.no_sync if no_sync else None)
    forward_backward_no_pipelining(
        forward_step_func=lambda iterator, model: (model(microbatch(next(iterator), ranks.rank)), mean_loss),
        data_iterator=iter(range(MICROBATCHES)),
        model=model,
        **COMMON,
    )
    assert len(reductions) == (1 if no_sync else MICROBATCHES)
    expected = Part(0, None)
    reference([expected], lanes=2)
    for ours, theirs in zip(model.module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)


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
        return self.module(x)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("grad_sync", [True, False], ids=["grad_sync_func", "none"])
def test_a_wrapper_reduces_every_gradient_of_a_pipeline_once(ranks, grad_sync):
    """The first stage in its last backward; the others, where there is a grad_sync_func, by that, after it."""
    box = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    here = box.coords(ranks.rank)
    model = Averaging(Part(here["pp"], None), dp)
    model.module.config = PipelineConfig(
        pipeline_dtype=torch.float64,
        strict=ranks.strict_sends,
        no_sync_func=model.no_sync,
        grad_sync_func=model.average if grad_sync else None,
        param_sync_func=model.before_forward,
    )
    communicator = P2PCommunicator(pp, model.module.config)

    def step(iterator, model):
        received = model.module.received[0]
        x = microbatch(next(iterator), here["dp"]) if received is None else received
        model.log.append("forward")
        return model(x), mean_loss

    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(range(MICROBATCHES)),
        model=model,
        p2p_communicator=communicator,
        **COMMON,
    )
    communicator.close()
    assert sorted(model.reduced) == sorted(id(parameter) for parameter in model.module.parameters())
    assert model.log[:3] == ["2 parameters", "no_sync", "forward"]
    assert model.log[-1] == "sync"
    expected = [Part(0, None), Part(1, None)]
    reference(expected, lanes=2)
    for ours, theirs in zip(model.module.parameters(), expected[here["pp"]].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1", "zero_bubble_h2"])
def test_a_wrapper_reduces_in_the_last_backward_of_any_schedule(ranks, schedule):
    """Also where the last backward is a half, of whichever microbatch."""
    box = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    here = box.coords(ranks.rank)
    model = Averaging(Part(here["pp"], None), dp)
    model.module.config = PipelineConfig(pipeline_dtype=torch.float64, no_sync_func=model.no_sync)
    communicator = P2PCommunicator(pp, model.module.config)

    def step(iterator, model):
        received = model.module.received[0]
        return model(microbatch(next(iterator), here["dp"]) if received is None else received), mean_loss

    get_forward_backward_func(schedule=schedule)(
        forward_step_func=step,
        data_iterator=iter(range(MICROBATCHES)),
        model=model,
        p2p_communicator=communicator,
        **COMMON,
    )
    communicator.close()
    assert sorted(model.reduced) == sorted(id(parameter) for parameter in model.module.parameters())
    expected = [Part(0, None), Part(1, None)]
    reference(expected, lanes=2)
    for ours, theirs in zip(model.module.parameters(), expected[here["pp"]].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)


@pytest.mark.ranks(2)
def test_ddp_in_a_pipeline_is_refused_before_anything_is_sent(ranks):
    box = HyperCommGrid([1, 2], ["dp", "pp"])
    pp, dp = box.create_pgs(["pp", "dp"])
    config = PipelineConfig(pipeline_dtype=torch.float64)
    model = DistributedDataParallel(Part(ranks.rank, config), process_group=dp)
    communicator = P2PCommunicator(pp, config)
    with pytest.raises(GradientError, match="decides in a forward whether the next backward reduces"):
        forward_backward_pipelining_without_interleaving(
            forward_step_func=lambda iterator, model: (model(microbatch(0, ranks.rank)), mean_loss),
            data_iterator=None,
            model=model,
            p2p_communicator=communicator,
            **COMMON,
        )
    communicator.close()
