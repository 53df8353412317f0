"""Stages of different tensor-parallel sizes, trained by the runtime, against one process: loss and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import VTPCommunicator, VTPTopology
from pipegrid.layout import PipelineParallelLayerLayout
from pipegrid.schedules import PipelineRuntime, lower, multi_module_1f1b, verify
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.topology import GroupSpec, create_groups
from pipegrid.transport import P2PConfig

from .kit.data import normal
from .kit.models import call, chain_in_one_process, forward_step
from .kit.stages import Stage
from .kit.tensor_parallel import Block

MICROBATCHES, WIDTH = 4, 6
SHAPE = (12, 2, WIDTH)  # [sequence, batch, hidden]

# tp sizes -> other arguments of the topology
ALWAYS = [
    ([1, 2], {}),
    ([2, 1], {}),
    ([2, 3, 2], {}),
    ([1, 4], {}),
    ([2, 4, 4], {}),
    ([1, 2], {"ring": True}),
    ([2, 3], {"sequence_parallel": True}),
]
NIGHTLY = [
    ([2, 1, 2], {"ring": True}),
    ([1, 2, 1, 2], {"ring": True}),
    ([1, 1, 2, 1, 1], {"ring": True}),
    ([1, 2], {"dp": 2}),
    ([2, 1], {"dp": 2, "ring": True}),
    ([2, 4, 1], {"sequence_parallel": (False, True, False)}),
    ([4, 2, 3], {"sequence_parallel": True, "ring": True}),
]


def jobs():
    for sizes, options in [*ALWAYS, *NIGHTLY]:
        for strict in (False, True):
            always = (sizes, options) in ALWAYS and (not strict or sizes == [2, 1])
            marks = [pytest.mark.ranks(sum(sizes) * options.get("dp", 1), deadline=120)]
            marks += [] if always else [pytest.mark.nightly]
            yield pytest.param(sizes, options, strict, marks=marks, id=f"{sizes} {options} strict={strict}")


def microbatch(index, replica, device):
    """A microbatch of one replica, the same on every rank."""
    return normal(1000 * replica + index, *SHAPE, device=device)


def loss_of(y):
    return (y**2).sum() / (MICROBATCHES * SHAPE[0] * SHAPE[1] * WIDTH)


def in_one_process(num_stages, device, replica=0):
    """The losses of all microbatches, and the whole blocks with their gradients."""
    blocks = [Block(stage, WIDTH, device=device) for stage in range(num_stages)]
    data = [microbatch(index, replica, device) for index in range(MICROBATCHES)]
    return chain_in_one_process(blocks, data, 1, lambda y: (loss_of(y), loss_of(y).item())), blocks


def stage_of(comm, number, group, device, losses):
    """A plan stage: one block, and the loss on the last one, of this rank's rows where the sequence is cut."""
    cut = comm.topology.replica(comm.replica)[comm.stage].parts > 1

    def data(index):
        x = microbatch(index, comm.replica, device)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)] if cut else x

    def loss(y):
        losses.append(loss_of(y).detach())
        return loss_of(y)

    return Stage(comm.graph, number, Block(number, WIDTH, group, device=device, cut=cut), data=data, loss=loss)


def tp_group(comm):
    """The tensor-parallel group of this rank's stage; None for one rank."""
    ranks = comm.get_vtp_stage_ranks()[comm.stage]
    if len(ranks) == 1:
        return None
    spec = GroupSpec(tuple(ranks), "tp")
    return create_groups([spec])[spec]


@pytest.mark.parametrize(("sizes", "options", "strict"), list(jobs()))
def test_loss_and_every_gradient_are_those_of_one_process(ranks, sizes, options, strict):
    topology = VTPTopology(sizes, **options, sequence_length=SHAPE[0])
    config = P2PConfig(
        pipeline_dtype=torch.float64,
        strict=strict,
        staged=ranks.backend == "staged",
        deadline=60.0,
        open_deadline=60.0,
    )
    comm = VTPCommunicator(topology, config)
    plan = lower(multi_module_1f1b(comm.graph, MICROBATCHES, placement=topology.placement))
    verify(plan)
    group = tp_group(comm)
    told = []
    stages = {number: stage_of(comm, number, group, ranks.device, told) for number in comm.stages}
    runtime = PipelineRuntime(plan, stages, comm)
    runtime.eval()
    runtime.step()
    losses, blocks = in_one_process(topology.num_plan_stages, ranks.device, comm.replica)
    gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
    scale = 1e-3 * float(sum(g.norm() ** 2 for g in gradients)) ** 0.5 / len(gradients) ** 0.5
    for stage, held in stages.items():
        for name, parameter in blocks[stage].named_parameters():
            expected = held.model.share(name, parameter.grad)
            apart = (held.model.gradient(name) - expected).norm()
            assert apart < 1e-10 * max(expected.norm(), scale), (stage, name)
        if not held.out:
            assert len(told) == 2 * MICROBATCHES  # evaluated, then trained
            found = torch.stack(told)
            if held.model.cut:
                dist.all_reduce(found, group=group)
            assert found.tolist() == pytest.approx([*losses, *losses], rel=1e-10)
    comm.close()


def loss_func(y):
    loss = loss_of(y) * MICROBATCHES  # the step function divides by their number
    return loss, {"loss": loss.item()}


@pytest.mark.ranks(3)
def test_the_step_function_of_the_seeds_runs_over_it(ranks):
    layout = PipelineParallelLayerLayout.from_str("Et|tL", 2)
    config = PipelineConfig(pipeline_dtype=torch.float64)
    comm = VTPCommunicator(VTPTopology([1, 2], layout=layout), config)
    model = Block(comm.stage, WIDTH, tp_group(comm), device=ranks.device, config=config)
    step = partial(forward_step, data=lambda index: microbatch(index, 0, ranks.device), loss=loss_func)
    arguments = {"model": model, "count": MICROBATCHES, "forward_step_func": step, "p2p_communicator": comm}
    evaluated = call(forward_only=True, **arguments)
    infos = call(**arguments)
    losses, blocks = in_one_process(2, ranks.device)
    assert infos == evaluated
    if comm.stage == 1:
        assert [info["loss"] for info in infos] == pytest.approx([MICROBATCHES * loss for loss in losses], rel=1e-10)
    for name, parameter in blocks[comm.stage].named_parameters():
        torch.testing.assert_close(model.gradient(name), model.share(name, parameter.grad), rtol=1e-10, atol=1e-14)
    comm.close()
