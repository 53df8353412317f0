"""Whole steps on real ranks whose gradients are easily wrong in silence: each is that of one process."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import (
    DisagreementError,
    GradientError,
    LossScale,
    LossScaler,
    Monitor,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    clip_grad_norm_,
    forward_backward_no_pipelining,
    lower,
    one_f_one_b,
    reduce_gradients,
    tie_parameters,
    zero_bubble_h1,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, control_store
from pipegrid.transport import P2PCommunicator, P2PConfig

from .kit.models import Part, call, chain_in_one_process, counted_loss, forward_step, require_same_gradients
from .kit.stages import Stage
from .kit.two_modules import MICROBATCHES, WIDTH, TwoModules, microbatch, norm_of, of_one_process, weights


@pytest.mark.ranks(3)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
@pytest.mark.parametrize("lanes", [(2, 1), (1, 2)], ids=str)
def test_gradients_of_two_calls_add_up(ranks, lanes, per_token):
    """Only what a call added is reduced: the first call's gradient is whole already, on every lane."""
    job = TwoModules(ranks, lanes, calculate_per_token_loss=per_token)
    calls = [range(MICROBATCHES), range(10, 10 + MICROBATCHES)]
    held = []
    for indices in calls:
        job.step(indices)
        held.append(job.stage.layer.weight.grad)
    assert held[0] is held[1], "an optimizer, or a graph, may hold the very tensor"
    reference = of_one_process(calls, per_token=per_token)
    require_same_gradients(job.stage, job.own(reference))
    job.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("lanes", [(2, 1), (1, 2)], ids=str)
def test_a_modules_own_loss_is_a_mean_over_its_own_lanes(ranks, lanes):
    """Counted by the lanes of the main loss it would weigh twice, or half."""
    job = TwoModules(ranks, lanes)
    job.step(range(MICROBATCHES), own_loss=lambda output: output.abs().mean())
    reference = [Part(0, WIDTH), Part(1, WIDTH)]
    for index in range(MICROBATCHES):
        encoded = reference[0](microbatch(index))
        (((reference[1](encoded)).square().mean() + encoded.abs().mean()) / MICROBATCHES).backward()
    require_same_gradients(job.stage, job.own(reference))
    job.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("order", [(), (0, 2, 1), (2, 1, 0)], ids=["together", "second lane last", "first lane last"])
def test_configs_that_disagree_on_per_token_losses_are_found_before_the_first_byte(ranks, order):
    """Otherwise one module waits in the count of tokens, and the other goes on to the clip.

    A lane that comes last finds it at once, where the other has seen nothing yet.
    """
    job = TwoModules(ranks, (2, 1), calculate_per_token_loss=ranks.rank == 2)
    time.sleep(order.index(ranks.rank) * 0.5 if order else 0)
    start = time.monotonic()
    with pytest.raises((DisagreementError, PipelineError)) as failed:
        job.step(range(MICROBATCHES))
    assert time.monotonic() - start < 15
    assert "with mean losses" in str(failed.value) or "with per-token losses" in str(failed.value)
    assert job.stage.layer.weight.grad is None
    ranks.barrier()  # of the store: the failed step has aborted every group of a device


@pytest.mark.ranks(2)
@pytest.mark.parametrize("about", ["per-token losses", "a finalizer", "parameters to train"])
def test_replicas_that_disagree_find_it_before_the_first_byte(ranks, about):
    """They have no edge between them, and would wait in different collectives, or sum unlike parameters as one."""
    lanes = HyperCommGrid([2], ["dp"])
    lanes.create_pg("dp")
    per_token = about == "per-token losses" and ranks.rank == 1
    finalize = (lambda *_, **__: None) if about == "a finalizer" and ranks.rank == 1 else None
    config = PipelineConfig(calculate_per_token_loss=per_token, finalize_model_grads_func=finalize, deadline=10)
    stage = Part(0, WIDTH, config).to(ranks.device)
    if about == "parameters to train":  # of as many elements on both
        stage.second = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).to(ranks.device)
        (stage.layer, stage.second)[ranks.rank].requires_grad_(False)
    start = time.monotonic()
    own = partial(counted_loss, counted=weights(0), per_token=per_token)
    with pytest.raises(DisagreementError, match=r"replicas of module 'model' .*rank 0: .*; rank 1: "):
        call(
            forward_backward_no_pipelining,
            model=stage,
            count=MICROBATCHES,
            forward_step_func=lambda _, model: (model(microbatch(0).to(ranks.device)), own),
            pg_collection=ProcessGroupCollection.from_grid(lanes),
        )
    assert time.monotonic() - start < 8
    assert stage.layer.weight.grad is None


@pytest.mark.ranks(3)
@pytest.mark.parametrize("late", [0, 2])
def test_replicas_that_train_different_parameters_end_the_step_of_the_next_module(ranks, late):
    """Which has no lane among them, and would wait for their first message."""
    job = TwoModules(ranks, (2, 1))
    job.stage.layer.bias.requires_grad_(ranks.rank != 1)
    time.sleep(0.5 if ranks.rank == late else 0)
    start = time.monotonic()
    with pytest.raises((DisagreementError, PipelineError), match="replicas of module 'images' do not finish"):
        job.step(range(MICROBATCHES))
    assert time.monotonic() - start < 15
    ranks.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_fails_before_the_count_of_tokens_ends_it_on_the_other_ranks_of_its_sequence(ranks):
    """Through the monitor: no lane leads from one cp rank to another."""
    grid = HyperCommGrid([2], ["cp"])
    grid.create_pg(["cp"])
    monitor = Monitor(control_store("count"), rank=ranks.rank, ranks=range(2), deadline=60, interval=0.1)
    stage = Part(0, WIDTH, PipelineConfig(deadline=60, monitor=monitor)).to(ranks.device)

    def loss(output):
        if ranks.rank == 1:
            raise ValueError("bad sample")
        return counted_loss(output, weights(0).to(ranks.device), per_token=True)

    start = time.monotonic()
    with pytest.raises(PipelineError, match="^rank 1, stage 0, microbatch 0: ValueError: bad sample"):
        call(
            forward_backward_no_pipelining,
            model=stage,
            count=MICROBATCHES,
            forward_step_func=lambda _, model: (model(microbatch(0).to(ranks.device)), loss),
            pg_collection=SimpleNamespace(dp=None, cp=grid.get_pg("cp"), dp_cp=grid.get_pg("cp")),
        )
    assert time.monotonic() - start < 30
    monitor.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", ["random masks", "all on one rank", "weights", "count of the whole sequence"])
def test_under_context_parallelism_a_sequences_tokens_are_those_of_all_its_ranks(ranks, case):
    """dp 2 x cp 2: a rank that divided by its own count would be off by up to 2."""
    grid = HyperCommGrid([2, 2], ["cp", "dp"])
    grid.create_pgs(["cp", "dp"])
    grid.create_pg(["dp", "cp"])
    here = grid.coords(ranks.rank)
    cp = grid.get_pg("cp")
    stage = Part(0, WIDTH, PipelineConfig(check_replicas=True)).to(ranks.device)

    def sequence(index, lane):
        generator = torch.Generator().manual_seed(100 * lane + index)
        x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=generator)
        mask = torch.randint(0, 2, (2, 6), generator=generator).double()
        if case == "all on one rank":
            mask[:, 3:] = 0
        return x, mask * torch.rand(2, 6, dtype=torch.float64, generator=generator) * 9 if case == "weights" else mask

    def forward(iterator, model):
        x, mask = (t.chunk(2, dim=1)[here["cp"]].to(ranks.device) for t in sequence(next(iterator), here["dp"]))

        def loss(output):
            total, count = (output.square().mean(dim=-1) * mask).sum(), mask.sum()
            if case == "count of the whole sequence":  # the field's other habit: summed by the loss function itself
                dist.all_reduce(count, group=cp)
                total = total * 2
            return total, count, None

        return model(x), loss

    call(
        forward_backward_no_pipelining,
        model=stage,
        count=MICROBATCHES,
        forward_step_func=forward,
        pg_collection=ProcessGroupCollection.from_grid(grid),
    )
    reference = Part(0, WIDTH).to(ranks.device)
    for lane in range(2):
        for index in range(MICROBATCHES):
            x, mask = (t.to(ranks.device) for t in sequence(index, lane))
            total = (reference(x).square().mean(dim=-1) * mask).sum()
            (total / mask.sum().clamp(min=1) / MICROBATCHES / 2).backward()
    require_same_gradients(stage, reference)


@pytest.mark.ranks(4)
def test_a_second_loss_with_a_count_of_its_own_is_written_in_tokens_of_the_first(ranks):
    """Multi-token prediction under cp 2 x dp 2: each loss is a mean over its own tokens of the whole sequence."""
    grid = HyperCommGrid([2, 2], ["cp", "dp"])
    grid.create_pgs(["cp", "dp"])
    grid.create_pg(["dp", "cp"])
    here = grid.coords(ranks.rank)
    stage = Part(0, WIDTH, PipelineConfig(check_replicas=True)).to(ranks.device)

    def sequence(index, lane):
        generator = torch.Generator().manual_seed(100 * lane + index)
        x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=generator)
        return x, *torch.randint(0, 2, (2, 2, 6), generator=generator).double()

    def sums(output, masks):
        return (output.square().mean(dim=-1) * masks[0]).sum(), (output.abs().mean(dim=-1) * masks[1]).sum()

    def forward(iterator, model):
        x, *masks = sequence(next(iterator), here["dp"])
        x, *own = (tensor.chunk(2, dim=1)[here["cp"]].to(ranks.device) for tensor in (x, *masks))
        ratio = masks[0].sum() / masks[1].sum()  # of the whole sequence, never of this rank's part

        def loss(output):
            first, second = sums(output, own)
            return first + 0.3 * second * ratio, own[0].sum(), None

        return model(x), loss

    call(
        forward_backward_no_pipelining,
        model=stage,
        count=MICROBATCHES,
        forward_step_func=forward,
        pg_collection=ProcessGroupCollection.from_grid(grid),
    )
    reference = Part(0, WIDTH).to(ranks.device)
    for lane in range(2):
        for index in range(MICROBATCHES):
            x, *masks = (tensor.to(ranks.device) for tensor in sequence(index, lane))
            first, second = sums(reference(x), masks)
            ((first / masks[0].sum() + 0.3 * second / masks[1].sum()) / MICROBATCHES / 2).backward()
    require_same_gradients(stage, reference)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("monitored", [False, True], ids=["deadline", "monitor"])
def test_the_other_replica_of_a_failed_one_does_not_wait_in_the_reduction(ranks, monitored):
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    deadline = 20.0 if monitored else 3.0
    monitor = None
    if monitored:
        monitor = Monitor(control_store("failed lane"), rank=ranks.rank, ranks=range(4), deadline=deadline)
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=deadline, monitor=monitor)
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    here = grid.coords(ranks.rank)

    stage = Part(here["pp"], WIDTH, config).to(ranks.device)

    def forward(iterator, model):
        index = next(iterator)
        if ranks.rank == 3 and index == 1:
            raise ZeroDivisionError("boom")
        return forward_step(iter([index]), model, data=lambda index: microbatch(index).to(ranks.device))

    start = time.monotonic()
    with pytest.raises(PipelineError) as failed:
        call(
            model=stage,
            count=MICROBATCHES,
            forward_step_func=forward,
            p2p_communicator=communicator,
            pg_collection=ProcessGroupCollection.from_grid(grid),
        )
    assert time.monotonic() - start < (10 if monitored else deadline + 2)
    if monitored:
        assert "boom" in str(failed.value)
        monitor.close()
    elif here["dp"] == 0:
        # Where one stream plays all kernels, the reduction that does not end holds up the message behind it as well.
        serial = ranks.fake_device is not None and ranks.fake_device.serial
        late = "a reduction of gradients did not end within the deadline of 3 s", "waited 3 s for"
        assert any(text in str(failed.value) for text in late[: 1 + serial])
    communicator.abort("the test is over")


@pytest.mark.ranks(4)
def test_a_tied_parameter_accumulates_and_an_overflow_on_one_rank_is_everybodys(ranks):
    """dp 2 x pp 2, the same weight on both stages; the second of three calls overflows on one rank only."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    here = grid.coords(ranks.rank)

    stage = Part(0, WIDTH).to(ranks.device)
    tied = tie_parameters("weight", {here["pp"]: stage.layer.weight}, stages=[0, 1], grids=grid)
    scaler = LossScaler(LossScale(scale=2.0, growth_interval=100))
    stage.config = PipelineConfig(
        pipeline_dtype=torch.float64, deadline=30, tied_parameters=(tied,), grad_scale_func=scaler, check_replicas=True
    )
    communicator = P2PCommunicator(grid.get_pg("pp"), stage.config)
    collection = ProcessGroupCollection.from_grid(grid)

    def own_data(index):
        return microbatch(index).chunk(2)[here["dp"]].to(ranks.device)

    def step(first, *, overflow=False):
        def forward(iterator, model):
            y, loss = forward_step(iterator, model, data=own_data)
            if overflow and ranks.rank == 1:
                y.register_hook(lambda gradient: gradient * float("inf"))
            return y, loss

        call(
            model=stage,
            count=MICROBATCHES,
            data_iterator=iter(range(first, first + MICROBATCHES)),
            forward_step_func=forward,
            p2p_communicator=communicator,
            pg_collection=collection,
        )

    step(0)
    step(10)
    assert scaler.unscale(stage)
    reference = [Part(0, WIDTH), Part(0, WIDTH)]
    reference[1].layer.weight = reference[0].layer.weight
    steps = *range(MICROBATCHES), *range(10, 10 + MICROBATCHES)
    chain_in_one_process(reference, map(microbatch, steps), MICROBATCHES)
    require_same_gradients(stage, reference[here["pp"]].to(ranks.device))
    torch.testing.assert_close(
        clip_grad_norm_(stage, collection, 1e3).cpu(), norm_of(reference).cpu(), rtol=1e-11, atol=0.0
    )
    before = scaler.state.scale
    stage.zero_grad()
    stage.config = PipelineConfig(
        pipeline_dtype=torch.float64, deadline=30, tied_parameters=(tied,), grad_scale_func=scaler
    )
    step(20, overflow=True)
    assert not scaler.unscale(stage), "no rank may step"
    assert scaler.state.scale == before / 2
    communicator.close()


@pytest.fixture
def fsdp2(ranks):
    """FSDP2 finds its collectives by the device type of its tensors; those of the fake NCCL are on the CPU."""
    if ranks.backend == "fake_nccl":
        pytest.skip("torch's dispatcher finds no collectives of the fake NCCL for tensors on the CPU: use gloo or nccl")


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("fsdp2")
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "tokens"])
def test_a_module_that_fully_shard_averages_has_the_gradients_of_one_process(ranks, per_token):
    """FSDP2 on two replicas before a loss on one: its mean is half of what the loss asks for, or far from a sum."""
    from torch.distributed.fsdp import fully_shard

    job = TwoModules(ranks, (2, 1), calculate_per_token_loss=per_token)
    mesh = dist.device_mesh.DeviceMesh(ranks.device.type, [0, 1])
    if job.name == "images":
        fully_shard(job.stage, mesh=mesh)
    calls = [range(MICROBATCHES), range(10, 10 + MICROBATCHES)]
    for indices in calls:
        job.step(indices)
    reference = of_one_process(calls, per_token=per_token)
    for mine, other in zip(job.stage.parameters(), job.own(reference).parameters(), strict=True):
        found = mine.grad.full_tensor() if job.name == "images" else mine.grad
        torch.testing.assert_close(found, other.grad, rtol=1e-11, atol=1e-14)
    norm = clip_grad_norm_({job.name: job.stage}, {job.name: job.groups}, 1e3)
    torch.testing.assert_close(norm.cpu(), norm_of(reference).cpu(), rtol=1e-11, atol=0.0)
    job.close()


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("fsdp2")
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
def test_pipeline_stages_that_fully_shard_has_sharded(ranks, schedule):
    """dp 2 x pp 2: microbatches' reduce-scatters in the order of the plan. A split backward is right, or an error."""
    from torch.distributed.fsdp import fully_shard

    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    here = grid.coords(ranks.rank)
    stage = Part(here["pp"], WIDTH).to(ranks.device)
    lanes = dist.get_process_group_ranks(grid.get_pg("dp"))
    for ends in ([0, 1], [2, 3]):
        mesh = dist.device_mesh.DeviceMesh(ranks.device.type, ends)
        if ends == lanes:
            fully_shard(stage, mesh=mesh)
    communicator = P2PCommunicator(grid.get_pg("pp"), P2PConfig(pipeline_dtype=torch.float64, deadline=60))
    plan = lower({"one_f_one_b": one_f_one_b, "zero_bubble_h1": zero_bubble_h1}[schedule](2, MICROBATCHES))
    part = Stage(
        plan.graph,
        here["pp"],
        stage,
        data=lambda index: microbatch(index).chunk(2)[here["dp"]].to(ranks.device),
        loss=lambda y: y.square().mean() / MICROBATCHES,
    )
    PipelineRuntime(plan, {here["pp"]: part}, communicator).step()
    reduce_gradients(stage, ProcessGroupCollection.from_grid(grid))
    reference = [Part(0, WIDTH), Part(1, WIDTH)]
    chain_in_one_process(reference, map(microbatch, range(MICROBATCHES)), MICROBATCHES)
    for mine, other in zip(stage.parameters(), reference[here["pp"]].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor().cpu(), other.grad, rtol=1e-11, atol=1e-14)
    communicator.close()


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("fsdp2")
def test_gradients_that_fsdp2_has_averaged_are_not_divided_by_tokens(ranks):
    """By hand, in a finalizer, they came out half: FSDP2 averages over its lanes, and per-token losses are sums."""
    from torch.distributed.fsdp import fully_shard

    if ranks.device.type == "cpu":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    else:
        mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (2,))
    config = PipelineConfig(calculate_per_token_loss=True, finalize_model_grads_func=lambda *_, **__: None)
    stage = Part(0, WIDTH, config).to(ranks.device)
    fully_shard(stage.layer, mesh=mesh)
    with pytest.raises(GradientError, match="divided by the tokens of the job, but fully_shard averages over them"):
        call(
            forward_backward_no_pipelining,
            model=stage,
            count=MICROBATCHES,
            forward_step_func=lambda _, model: (
                model(microbatch(0)),
                partial(counted_loss, counted=weights(0), per_token=True),
            ),
        )
