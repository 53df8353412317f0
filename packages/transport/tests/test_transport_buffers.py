"""Buffers are fresh until they are given back, and are then used again."""

import pytest
import torch

from pipegrid.transport import P2PUsageError, open_lanes

from .two_ranks import THERE, config


@pytest.mark.ranks(2)
def test_released_buffers_are_used_again(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane, in_flight, messages = lanes[THERE], 2, 8
        if ranks.rank == 0:
            for n in range(messages):
                lane.isend(torch.full((4,), float(n))).wait()
            assert lane.stats.messages == lane.stats.transfers == messages
            assert lane.stats.bytes == messages * 16
        else:
            handles = [lane.irecv() for _ in range(in_flight)]
            for n in range(messages):
                handle = handles.pop(0)
                tensor = handle.result()
                assert tensor.tolist() == [n] * 4
                (tensor * 2).sum().backward()
                assert tensor.grad.tolist() == [2.0] * 4
                handle.release()
                handle.release()
                with pytest.raises(P2PUsageError, match="was released"):
                    handle.result()
                if n + in_flight < messages:
                    handles.append(lane.irecv())
                assert lane.stats.live == min(in_flight, messages - n - 1)
            # As many as were ever in use at once.
            assert lane.stats.allocations == in_flight


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
def test_a_reused_buffer_is_a_new_tensor(ranks, size):
    with open_lanes([THERE]) as lanes:
        lane, seen = lanes[THERE], []
        for n in range(4):
            if ranks.rank == 0:
                lane.isend(torch.full((size,), float(n), requires_grad=True)).wait()
                continue
            handle = lane.irecv()
            payload = handle.result()
            assert (payload.requires_grad, payload.is_leaf, payload.grad) == (True, True, None)
            assert (payload[0].item(), payload[-1].item()) == (n, n)
            payload.sum().backward()
            seen.append(payload)
            handle.release()
        if ranks.rank == 1:
            assert lane.stats.allocations == 1
            assert len({id(payload) for payload in seen}) == 4
            assert len({payload.data_ptr() for payload in seen}) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("release", [False, True])
def test_buffers_made_in_inference_mode_serve_training_too(ranks, release):
    with open_lanes([THERE], config=config()) as lanes:
        for n in range(8):
            with torch.inference_mode(n % 4 in (1, 2)):
                if ranks.rank == 0:
                    lanes[THERE].isend(torch.full((2,), float(n))).wait()
                    continue
                handle = lanes[THERE].irecv()
                received = handle.result()
                assert received.tolist() == [n, n]
                if not torch.is_inference_mode_enabled():
                    (received * 2).sum().backward()
                    assert received.grad.tolist() == [2, 2]
                if release:
                    handle.release()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
def test_payloads_that_are_kept_share_no_memory(ranks, size):
    with open_lanes([THERE]) as lanes:
        lane = lanes[THERE]
        for n in range(4):
            if ranks.rank == 0:
                lane.isend(torch.full((size,), float(n))).wait()
        if ranks.rank == 1:
            kept = [lane.irecv().result() for _ in range(4)]
            assert [payload[-1].item() for payload in kept] == [0, 1, 2, 3]
            assert lane.stats.allocations == lane.stats.live == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("provided", [False, True])
def test_what_is_under_way_cannot_be_released(ranks, provided):
    with open_lanes([THERE], config=config(), agreed={THERE: torch.ones(2)}) as lanes:
        if ranks.rank == 1:
            handle = lanes[THERE].irecv()
            if provided:  # as the verbs with overlap_p2p_comm do
                lanes[THERE].transfers.provide(handle)
            with pytest.raises(P2PUsageError, match="cannot be released before it is done"):
                handle.release()
        ranks.barrier()
        if ranks.rank == 0:
            lanes[THERE].isend(torch.ones(2)).wait()
        else:
            handle.wait()
