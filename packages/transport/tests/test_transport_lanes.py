"""Lanes on real ranks: what goes in comes out, in order, and gradients flow back for what was marked."""

import pytest
import torch

from pipegrid.transport import LaneSpec, P2PUsageError, open_lanes

from .two_ranks import BACK, THERE, config, equal, values

PAYLOADS = {
    "none": None,
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "five dimensions": values((2, 1, 3, 1, 2)),
    "list": [values((2,)), values((3,), torch.int64)],
    "tuple with none": (None, values((2, 2), torch.bool), None),
    "dict": {"hidden": values((2, 3), torch.bfloat16), "mask": values((2,), torch.bool), 4: None},
    "nested": [{"a": (values((2,)), [None, torch.zeros(0)])}, []],
    "only empties": [torch.zeros(0), torch.zeros(0, 3, dtype=torch.int8)],
    "nothing at all": {},
    "complex": values((3,), torch.complex64),
    "float8": values((3,)).to(torch.float8_e4m3fn),
    "float8 scalar": torch.tensor(2.0).to(torch.float8_e4m3fn),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communicators", ["separate", "shared"])
@pytest.mark.parametrize("shapes", ["agreed", "header"])
@pytest.mark.parametrize("staged", [False, True])
def test_every_payload_arrives_as_it_was_sent(ranks, shapes, communicators, staged):
    specs = {name: LaneSpec(0, 1, name) for name in PAYLOADS}
    with open_lanes(specs.values(), config=config(shapes=shapes, communicators=communicators, staged=staged)) as lanes:
        for name, payload in PAYLOADS.items():
            for _ in range(3):
                if ranks.rank == 0:
                    lanes[specs[name]].isend(payload).wait()
                else:
                    assert equal(payload, lanes[specs[name]].irecv().result()), name


@pytest.mark.ranks(2)
def test_received_tensors_are_fresh_leaves_and_floats_require_grad(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane = lanes[THERE]
        if ranks.rank == 0:
            for _ in range(2):
                lane.isend([torch.ones(2), torch.ones(2, dtype=torch.int64)]).wait()
        else:
            first, second = (lane.irecv().result() for _ in range(2))
            assert [t.requires_grad for t in first] == [True, False]
            assert first[0].is_leaf
            assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.ranks(2)
def test_gradients_flow_back_only_for_what_the_sender_marked(ranks):
    with open_lanes([THERE, BACK], config=config()) as lanes:
        if ranks.rank == 0:
            x, mask = torch.ones(2, requires_grad=True), torch.ones(2)
            y = x * 3
            lanes[THERE].isend({"y": y, "mask": mask}).wait()
            grads = lanes[BACK].irecv().result()
            assert grads["mask"] is None
            y.backward(grads["y"])
            assert x.grad.tolist() == [6.0, 6.0]
        else:
            received = lanes[THERE].irecv().result()
            assert received["y"].requires_grad
            assert not received["mask"].requires_grad
            (received["y"] * received["mask"] * 2).sum().backward()
            lanes[BACK].isend({name: tensor.grad for name, tensor in received.items()}).wait()


@pytest.mark.ranks(2)
def test_what_requires_grad_may_not_grow_without_a_renewal(ranks):
    # The receiver was told with the first message, and would send no gradient for what is unfrozen later.
    def payload(*marks):
        return [torch.ones(2, requires_grad=mark) for mark in marks]

    with open_lanes([THERE, BACK], config=config()) as lanes:
        lane, received = lanes[THERE], []
        marks = [(True, False), (False, False), (True, False)]  # training, evaluation, training
        for sent in marks:
            if ranks.rank == 0:
                lane.isend(payload(*sent)).wait()
            else:
                received.append([tensor.requires_grad for tensor in lane.irecv().result()])
        if ranks.rank == 0:
            with pytest.raises(P2PUsageError, match=r"message 3.*tensor 1 requires grad.*without.* or renew\(\)"):
                lane.isend(payload(True, True))
            with pytest.raises(P2PUsageError, match="tensor 1 requires grad"), lanes.batch():
                refused, other = lane.isend(payload(True, True)), lanes[BACK].irecv()
            assert other.sequence == -1
            with pytest.raises(P2PUsageError, match="tensor 1 requires grad"):
                refused.wait()
            lane.isend(payload(False, False)).wait()
        else:
            received.append([tensor.requires_grad for tensor in lane.irecv().result()])
        lane.renew()
        if ranks.rank == 0:
            lane.isend(payload(True, True)).wait()
            assert lanes[BACK].irecv().result().tolist() == [1.0]
        else:
            received.append([tensor.requires_grad for tensor in lane.irecv().result()])
            assert received == [[True, False]] * 4 + [[True, True]]
            lanes[BACK].isend(torch.ones(1)).wait()


@pytest.mark.ranks(2)
def test_messages_keep_their_order_whoever_is_waited_for_first(ranks):
    with open_lanes([THERE], config=config()) as lanes:
        lane, count = lanes[THERE], 20
        if ranks.rank == 0:
            handles = [lane.isend(torch.full((3,), float(n))) for n in range(count)]
            for handle in reversed(handles):
                handle.wait()
        else:
            handles = [lane.irecv() for _ in range(count)]
            for n in (7, 3, 19, *range(count)):
                assert handles[n].result().tolist() == [n] * 3
            assert [handle.sequence for handle in handles] == list(range(count))
