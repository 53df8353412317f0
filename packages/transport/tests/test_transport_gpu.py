"""On GPUs: the self lane on one, and two ranks over NCCL, on two GPUs or (NCCL 2.31.2 and newer) on one.

Two ranks on one GPU need NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1 in the environment.
"""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import LaneSpec, P2PCommunicator, P2PConfig, P2PTimeoutError, open_lanes

from .two_ranks import GPUS, THERE, needs_two_ranks

DEADLINE = 60.0
HERE = LaneSpec(0, 0)
config = partial(P2PConfig, deadline=DEADLINE, open_deadline=DEADLINE)

needs_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def on_gpu(ranks):
    device = torch.device("cuda", ranks.rank % GPUS)
    torch.cuda.set_device(device)
    return device


@needs_gpu
@pytest.mark.ranks(1, backend="nccl")
def test_the_self_lane_orders_streams(ranks):
    device = on_gpu(ranks)
    producer, consumer = torch.cuda.Stream(device), torch.cuda.Stream(device)
    with open_lanes([HERE], config=config()) as lanes:
        for value in range(10):
            with torch.cuda.stream(producer):
                tensor = torch.zeros(1 << 22, device=device)
                for _ in range(value):
                    tensor += 1
                lanes[HERE].isend(tensor).wait()
                tensor.fill_(-1)
            with torch.cuda.stream(consumer):
                received = lanes[HERE].irecv().result()
                total = received.detach().mean()
            consumer.synchronize()
            assert total.item() == value
            assert received.device == device


@needs_two_ranks
@pytest.mark.ranks(2, backend="nccl")
def test_a_wait_orders_the_stream_and_completion_is_polled(ranks):
    # What the streamed lane counts on.
    device = on_gpu(ranks)
    tensor = torch.full((1 << 20,), float(ranks.rank), device=device)
    # The first message of two ranks connects them, and holds the host until both are there.
    first = [dist.P2POp(verb, tensor.clone(), group_peer=1 - ranks.rank) for verb in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(first):
        work.wait()
    torch.cuda.synchronize()
    verb = dist.isend if ranks.rank == 0 else dist.irecv
    if ranks.rank == 0:
        ranks.barrier()
    (work,) = dist.batch_isend_irecv([dist.P2POp(verb, tensor, group_peer=1 - ranks.rank)])
    began = time.monotonic()
    work.wait()
    assert time.monotonic() - began < DEADLINE / 2
    if ranks.rank == 1:
        assert not work.is_completed()
        ranks.barrier()
    end = time.monotonic() + DEADLINE
    while not work.is_completed():
        assert time.monotonic() < end
    work.wait()
    assert tensor[-1].item() == 0


@needs_two_ranks
@pytest.mark.ranks(2, backend="nccl")
@pytest.mark.parametrize(
    "settings",
    [{}, {"communicators": "shared"}, {"strict": True}, {"variable_seq_lengths": True}, {"batch_p2p_sync": True}],
    ids=str,
)
def test_two_ranks_over_nccl(ranks, settings):
    device = on_gpu(ranks)
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.bfloat16, **settings))
    assert communicator.device == device
    me, peer = ranks.rank, 1 - ranks.rank
    for n in range(20):
        mine = torch.full((64, 64), float(10 * n + me), dtype=torch.bfloat16, device=device)
        received = communicator.send_forward_recv_forward(mine, True, (64, 64))
        gradient = communicator.send_backward_recv_backward(-mine, True, (64, 64))
        assert received.float().mean().item() == torch.tensor(10.0 * n + peer).bfloat16().item()
        assert torch.equal(gradient.detach(), -received.detach())
    communicator.close()


@needs_two_ranks
@pytest.mark.ranks(2, backend="nccl")
def test_what_is_not_done_by_the_deadline_ends_on_the_host(ranks):
    device = on_gpu(ranks)
    with open_lanes([THERE], config=config(deadline=3.0), agreed={THERE: torch.empty(8, device="meta")}) as lanes:
        if ranks.rank == 1:
            handle = lanes[THERE].irecv()
            handle.wait()
            with pytest.raises(P2PTimeoutError):
                handle.synchronize()
        ranks.barrier()
        assert device == lanes[THERE].device
