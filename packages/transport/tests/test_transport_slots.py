"""Slots: memory of a caller for messages of any lanes, one after the other."""

import pytest
import torch

from pipegrid.transport import P2PUsageError, open_lanes
from pipegrid.transport.messages.slot import Slot

from .two_ranks import BACK, THERE, config


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [4, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("known", [False, True], ids=["agreed", "known"])
def test_messages_of_several_lanes_come_to_one_address(ranks, size, known):
    """Rank 0 sends, and has each message back in the one slot of all its receives; so does rank 1."""
    agreed = dict.fromkeys((THERE, BACK), torch.ones(size)) if known else None
    with open_lanes([THERE, BACK], config=config(), agreed=agreed) as lanes:
        slot, addresses = Slot(), set()
        out, back = (THERE, BACK) if ranks.rank == 0 else (BACK, THERE)
        for n in range(6):
            if ranks.rank == 0:
                lanes[out].isend(torch.full((size,), float(n))).wait()
            handle = lanes[back].irecv(slot=slot)
            payload = handle.result()
            assert (payload[0].item(), payload[-1].item()) == (n, n)
            assert (payload.requires_grad, payload.is_leaf, payload.grad) == (True, True, None)
            (payload * 2).sum().backward()
            addresses.add(payload.data_ptr())
            if ranks.rank == 1:
                lanes[out].isend(payload.detach().clone()).wait()
            handle.release()
        assert len(addresses) == lanes[back].stats.allocations == 1
        assert slot.nbytes == size * 4
        assert lanes[back].stats.live == 0


@pytest.mark.ranks(2)
def test_a_slot_takes_one_message_at_a_time_and_forms_of_its_own_apart(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            for shape in ((3,), (2, 2)):
                lanes[THERE].isend(torch.ones(shape)).wait()
                lanes[THERE].renew()
            ranks.barrier()
            return
        slot = Slot()
        first = lanes[THERE].irecv(slot=slot)
        with pytest.raises(P2PUsageError, match="a slot whose message is not released"):
            lanes[THERE].irecv(slot=slot)
        one = first.result()
        first.release()
        lanes[THERE].renew()
        second = lanes[THERE].irecv(slot=slot)
        assert second.result().shape == (2, 2)
        assert second.result().data_ptr() != one.data_ptr()
        assert slot.nbytes == 3 * 4 + 4 * 4
        slot.leave()
        assert slot.nbytes == 0
        assert second.result().tolist() == [[1.0, 1.0], [1.0, 1.0]]
        lanes[THERE].renew()
        ranks.barrier()


@pytest.mark.ranks(2)
def test_where_shapes_vary_a_lane_takes_no_slot(ranks):
    with open_lanes([THERE], config=config(variable_seq_lengths=True, shapes="header")) as lanes:
        if ranks.rank == 1:
            assert not lanes[THERE].takes_slots
            with pytest.raises(P2PUsageError, match="needs shapes that stay"):
                lanes[THERE].irecv(slot=Slot())
        ranks.barrier()
