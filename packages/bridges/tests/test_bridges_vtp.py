"""VTPCommunicator on real ranks: the functions of variable-TP scripts, the protocol, rings, replicas, failures."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import VTPCommunicator, VTPTopology
from pipegrid.core.edge import Edge
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.topology import GroupSpec, create_groups
from pipegrid.transport import CollectiveFailedError, P2PLaneDeadError
from pipegrid.transport.errors import P2PError, P2PUsageError
from pipegrid.transport.protocol import Handle, PipelineCommunicator, ReceiveHandle

from .vtp_ranks import B, F, config, make, part, tensor

SHAPE = (5, 2, 3)


def finish(handles):
    for handle in handles or ():
        handle.wait()


# -- the functions of variable-TP scripts -----------------------------------------------------------------


@pytest.mark.ranks(3)
def test_an_activation_and_its_gradient_through_the_asynchronous_functions():
    comm = make([2, 1])
    assert comm.get_vtp_size_list() == [2, 1]
    assert comm.get_vtp_stage_ranks() == [[0, 1], [2]]
    assert comm.get_vtp_my_stage_idx() == (0, 0, 1)[comm.rank]
    assert comm.is_vtp_stage_rank0() is (comm.rank != 1)
    there, back = tensor(SHAPE, 1), tensor(SHAPE, 2)
    if comm.stage == 0:
        handles = comm.vtp_send_forward(there)
        assert all(isinstance(handle, Handle) for handle in handles)
        got, works = comm.vtp_recv_backward(SHAPE, comm.config, async_op=True)
        assert list(works) == ["recv_next"]
        assert isinstance(works["recv_next"], ReceiveHandle)
        works["recv_next"].wait()
        works["recv_next"].wait()  # twice is harmless
        assert works["recv_next"].result() is got
        assert works["recv_next"].is_completed()
        assert torch.equal(got, back)
        assert got.requires_grad
        finish(handles)
        assert comm.vtp_send_backward(back) is None  # nobody is there
    else:
        assert comm.vtp_send_forward(there) is None
        got = comm.vtp_recv_forward(SHAPE, comm.config)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, there)
        finish(comm.vtp_send_backward(back))
    comm.close()
    comm.close()
    with pytest.raises(P2PLaneDeadError, match="make a new one"):
        comm.vtp_send_forward(there)


@pytest.mark.ranks(3)
def test_the_functions_with_guards_do_nothing_at_the_ends():
    calls = []

    def timers(name, log_level=None):
        return SimpleNamespace(start=lambda: calls.append(f"+{name}"), stop=lambda: calls.append(f"-{name}"))

    comm = make([1, 2], settings={"timers": timers})
    there, back = tensor(SHAPE, 1), tensor(SHAPE, 2)
    if comm.stage == 0:
        assert comm.recv_forward_with_reqs(SHAPE, comm.config) == (None, None)
        assert comm.send_backward(back, comm.config) is None
        assert calls == []
        assert comm.send_forward(there, comm.config) is None
        got, reqs = comm.recv_backward_with_reqs(SHAPE, comm.config)
        assert reqs is None
        assert torch.equal(got, back)
        assert calls == ["+forward-send", "-forward-send", "+backward-recv", "-backward-recv"]
    else:
        assert comm.recv_backward_with_reqs(SHAPE, comm.config) == (None, None)
        assert comm.send_forward(there, comm.config) is None
        got, reqs = comm.recv_forward_with_reqs(SHAPE, comm.config, wait_on_reqs=False)
        reqs["recv_prev"].wait()
        assert torch.equal(got, there)
        comm.send_backward(back, comm.config)
        assert calls == ["+forward-recv", "-forward-recv", "+backward-send", "-backward-send"]
    comm.close()


@pytest.mark.ranks(3)
def test_ranks_with_different_topologies_do_not_open_their_lanes():
    axis = min(dist.get_rank(), 1)
    with pytest.raises(P2PError, match=r"sequence on axis 0.*sequence on axis 1|axis 1.*axis 0|was lost while"):
        make([1, 2], sequence_parallel=(False, True), sequence_axis=axis)


@pytest.mark.ranks(2)
def test_what_a_receive_lacks_is_said_before_anything_is_sent():
    comm = make([1, 1], settings={"pipeline_dtype": None})
    told, batched = config(), config(batch_p2p_comm=True)
    if comm.stage == 1:
        for receive in (comm.vtp_recv_forward, comm.recv_forward_with_reqs):
            with pytest.raises(RuntimeError, match="^pipeline_dtype must be provided if recv_prev is True"):
                receive(SHAPE)
            with pytest.raises(
                RuntimeError,
                match=r"^tensor_shape must be specified if recv_prev is True. Common tensor_shape is \(seq_length, mic",
            ):
                receive(None, told)
            with pytest.raises(P2PUsageError, match="the shape of a receive is 'abc'; it must be the sizes"):
                receive("abc", told)
        with pytest.raises(ValueError, match="wait_on_reqs=False needs batch_p2p_comm=False"):
            comm.recv_forward_with_reqs(SHAPE, batched, wait_on_reqs=False)
        with pytest.raises(BridgeError, match="recv_next on stage 1: there is no stage on that side without ring=True"):
            comm.vtp_recv_backward(SHAPE, told)
    else:
        for receive in (comm.vtp_recv_backward, comm.recv_backward_with_reqs):
            with pytest.raises(RuntimeError, match="^dtype must be provided if recv_next is True"):
                receive(SHAPE)
            with pytest.raises(RuntimeError, match="^tensor_shape must be specified if recv_next is True. Common"):
                receive(None, told)
        with pytest.raises(BridgeError, match="recv_prev on stage 0: .* without ring=True"):
            comm.recv_forward_with_reqs(SHAPE, told, is_end_stage=True)
        with pytest.raises(BridgeError, match="send_backward on stage 0"):
            comm.send_backward(tensor(SHAPE), told, is_end_stage=True)
        with pytest.raises(TypeError, match="next_ranks"):
            comm.vtp_send_forward(tensor(SHAPE), next_ranks=1)
        with pytest.raises(ShapeError, match="carries one tensor, got None; zeros stand for no gradient"):
            comm.vtp_send_forward(None)
        with pytest.raises(ShapeError, match="carries one tensor, got None; zeros stand for no gradient"):
            comm.send_forward_recv_backward(None, SHAPE)  # the next stage would wait for it
        with pytest.raises(P2PUsageError, match="use_ring_exchange_p2p is True, but torch.distributed has no ring"):
            comm.vtp_recv_backward(SHAPE, SimpleNamespace(use_ring_exchange_p2p=True, pipeline_dtype=torch.float64))
    comm.close()


@pytest.mark.ranks(2)
def test_what_does_not_fit_together_is_refused_at_construction():
    with pytest.raises(BridgeError, match="need a world of 3, not of 2"):
        make([1, 2])
    with pytest.raises(BridgeError, match=r"need a world of 1, not of 2; in a larger one .*ranks="):
        make([1])
    ring = SimpleNamespace(layerwise_disaggregated_training=True, pipeline_dtype=torch.float64)
    with pytest.raises(P2PUsageError, match="layerwise_disaggregated_training is True, .* ring=False"):
        VTPCommunicator(VTPTopology([1, 1]), ring)
    with pytest.raises(TypeError, match="sequence_parallel"):
        VTPCommunicator(VTPTopology([1, 1]), None, sequence_parallel=True)
    comm = make([1, 1])
    with pytest.raises(P2PUsageError, match="this call's pipeline_dtype is torch.float32, but the lanes .*float64"):
        comm.vtp_recv_forward(SHAPE, config(pipeline_dtype=torch.float32))
    if comm.stage == 0:
        with pytest.raises(P2PUsageError, match="pipeline_dtype is torch.float64"):
            comm.vtp_send_forward(tensor(SHAPE).float())
    comm.close()


@pytest.mark.ranks(5)
def test_neighbours_may_be_named_by_rank_or_by_group():
    comm = make([1, 2, 2])
    whole = tensor(SHAPE)
    leaders = create_groups([GroupSpec((0, 1, 3), "leaders")]).get(GroupSpec((0, 1, 3), "leaders"))
    pair = create_groups([GroupSpec((0, 4), "pair")]).get(GroupSpec((0, 4), "pair"))
    if comm.stage == 0:
        finish(comm.vtp_send_forward(whole, next_rank=1))
        finish(comm.vtp_send_forward(whole, next_rank=[1, 2], group=leaders))
        with pytest.raises(BridgeError, match=r"names \[3\] as its next ranks, but its lanes lead to ranks \[1, 2\]"):
            comm.vtp_send_forward(whole, next_rank=3)
        with pytest.raises(BridgeError, match=r"\[4\] as its previous ranks, .* nowhere, at the end of a chain"):
            comm.vtp_send_forward(whole, prev_rank=4)
        with pytest.raises(BridgeError, match=r"names \[4\] as its next ranks"):
            comm.vtp_send_forward(whole, group=[pair])
    elif comm.stage == 1:
        assert torch.equal(comm.vtp_recv_forward(SHAPE, prev_rank=[0]), whole)
        assert torch.equal(comm.vtp_recv_forward(SHAPE, prev_rank=0, next_rank=[3, 4]), whole)
    comm.close()


# -- copies: sliced, completed beside ---------------------------------------------------------------------


@pytest.mark.ranks(6)
def test_each_byte_crosses_once_and_replicas_get_what_an_average_of_copies_would_give():
    comm = make([4, 2], settings={"pipeline_dtype": torch.float32})
    whole = tensor((8, 3)).float()
    if comm.stage == 0:
        finish(comm.vtp_send_forward(whole))
        sent = sum(lane.stats.bytes for lane in comm.lanes.values())
        assert sent == whole.nbytes // 4
    else:
        got = comm.vtp_recv_forward((8, 3))
        averaged = torch.stack([whole] * 4, dim=0).mean(dim=0, dtype=torch.float32).to(whole.dtype)
        assert torch.equal(got, averaged)
        assert sum(lane.stats.bytes for lane in comm.lanes.values()) == whole.nbytes // 2
    comm.close()


@pytest.mark.ranks(3, backend="gloo")  # whose completions start by themselves; else the plan's thread starts them
def test_copies_complete_without_anybody_waiting_and_in_the_order_of_receiving(ranks):
    comm = make([1, 2], settings={"strict": ranks.strict_sends})
    wholes = [tensor(SHAPE, seed) for seed in range(4)]
    if comm.stage == 0:
        for whole in wholes:
            finish(comm.vtp_send_forward(whole))
    else:
        receives = [comm.irecv(edge=Edge(0, 1), direction=F) for _ in wholes]
        if comm.rank == 1:
            # The other copy gets its tensors though this one only asks for them when that has all.
            ranks.store.wait(["rank 2 has all"])
            assert torch.equal(receives[0].result(), wholes[0])
        for receive, whole in reversed(list(zip(receives, wholes, strict=True))):
            assert torch.equal(receive.result(), whole)
        if comm.rank == 2:
            ranks.store.set("rank 2 has all", "yes")
    comm.close()


@pytest.mark.ranks(3)
def test_a_receive_completes_while_only_asked_whether_it_has():
    comm = make([1, 2])
    if comm.stage == 0:
        time.sleep(0.1)
        finish(comm.vtp_send_forward(tensor(SHAPE)))
    else:
        receive = comm.irecv(edge=Edge(0, 1), direction=F)
        while not receive.is_completed():
            time.sleep(0.001)
        assert torch.equal(receive.result(), tensor(SHAPE))
    comm.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strict", [False, True])
def test_shapes_may_vary_or_be_agreed_and_renewed(strict):
    varying = make([3, 1], settings={"variable_seq_lengths": True, "strict": strict}, label="varying")
    agreed = make([3, 1], settings={"strict": strict}, label="agreed")
    for seed, shape in enumerate([(4, 2), (7,), (), (3, 1, 5)]):
        for comm in (varying, agreed):
            whole = tensor(shape, seed)
            if comm.stage == 0:
                comm.send_forward(whole)
            else:
                assert torch.equal(comm.recv_forward(), whole)
        agreed.renew_shapes()
    for comm in (varying, agreed):
        comm.close()


@pytest.mark.ranks(2)
def test_a_tensor_of_another_shape_or_dtype_than_expected_is_refused():
    comm = make([1, 1], settings={"pipeline_dtype": None})
    if comm.stage == 0:
        comm.send_forward(tensor((4, 2)))
        comm.send_forward(tensor((4, 2)))
    else:
        with pytest.raises(ShapeError, match=r"rank 1 expects shape \(2, 4\), but \(4, 2\) of .* comes"):
            comm.recv_forward((2, 4))
        with pytest.raises(ShapeError, match=r"rank 1 expects .* of torch.float32, but .* of torch.float64 comes"):
            comm.vtp_recv_forward((4, 2), config(pipeline_dtype=torch.float32))
    comm.close()


# -- sequence parallelism, replicas, rings ------------------------------------------------------------------


@pytest.mark.ranks(6)
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_the_sequence_go_straight_to_who_holds_them(axis):
    comm = make([2, 4], sequence_parallel=True, sequence_axis=axis)
    shape = [3, 3, 2]
    shape[axis] = 8
    there, back = tensor(shape, 1), tensor(shape, 2)
    if comm.stage == 0:
        finish(comm.vtp_send_forward(part(there, comm, 0, axis)))
        mine = part(back, comm, 0, axis)
        assert torch.equal(comm.vtp_recv_backward(mine.shape), mine)
    else:
        mine = part(there, comm, 1, axis)
        assert torch.equal(comm.vtp_recv_forward(mine.shape), mine)
        assert sum(lane.stats.bytes for lane in comm.lanes.values()) == mine.nbytes
        finish(comm.vtp_send_backward(part(back, comm, 1, axis)))
        with pytest.raises(ShapeError, match=f"cuts axis {axis}; .* has no such axis"):
            comm.vtp_recv_forward(())
    if comm.stage == 0:
        with pytest.raises(ShapeError, match="a sequence of 6 cannot be cut in 4 equal parts .*; pad it to 8"):
            comm.vtp_send_forward(tensor([3, 3, 2]))
    comm.close()


@pytest.mark.ranks(6)
def test_replicas_of_the_pipeline_are_pipelines_of_their_own():
    comm = make([1, 2], dp=2)
    shape = (3 + comm.replica, 2)  # not even the shapes need agree
    whole = tensor(shape, comm.replica)
    if comm.stage == 0:
        comm.send_forward(whole)
    else:
        assert torch.equal(comm.recv_forward(shape), whole)
    assert comm.get_vtp_stage_ranks() == ([[0], [2, 3]], [[1], [4, 5]])[comm.replica]
    comm.close()


RINGS = {2: [1, 2], 3: [1, 2, 1], 4: [2, 1, 1, 1], 5: [1, 1, 2, 1, 1]}


def round_trip(comm, whole, back):
    """An activation once round the ring and its gradient back; every stage adds one."""
    shape = tuple(whole.shape)
    last = comm.topology.num_stages
    if comm.stage == 0:
        assert comm.recv_forward_with_reqs(shape) == (None, None)
        comm.send_forward(whole)
        got, _ = comm.recv_forward_with_reqs(shape, is_end_stage=True)
        assert torch.equal(got, whole + (last - 1))
        comm.send_forward(got, is_end_stage=True)  # nothing
        assert comm.recv_backward_with_reqs(shape, is_end_stage=True) == (None, None)
        comm.send_backward(back, is_end_stage=True)
        grad, _ = comm.recv_backward_with_reqs(shape)
        assert torch.equal(grad, back + (last - 1))
        comm.send_backward(grad)  # nothing
    else:
        got, _ = comm.recv_forward_with_reqs(shape)
        comm.send_forward(got.detach() + 1)
        grad, _ = comm.recv_backward_with_reqs(shape)
        comm.send_backward(grad.detach() + 1)


@pytest.mark.parametrize(
    "stages", [pytest.param(stages, marks=pytest.mark.ranks(sum(sizes))) for stages, sizes in RINGS.items()]
)
def test_a_ring_goes_round(stages):
    # Integers in float64: exact. In strict mode as well, on lanes of its own.
    whole, back = torch.arange(30.0, dtype=torch.float64).view(SHAPE), torch.ones(SHAPE, dtype=torch.float64)
    for strict in (False, True):
        comm = make(RINGS[stages], ring=True, settings={"strict": strict}, label=f"strict {strict}")
        assert comm.is_pp_first_stage is comm.is_pp_last_stage is (comm.stage == 0)
        assert comm.stages == ((0, stages) if comm.stage == 0 else (comm.stage,))
        assert comm.graph.num_stages == stages + 1
        for _ in range(2):
            round_trip(comm, whole, back)
        comm.close()


# -- the protocol -------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_the_verbs_of_the_protocol():
    comm = make([1, 2], settings={"batch_p2p_comm": True})
    assert isinstance(comm, PipelineCommunicator)
    assert (comm.total_stages, comm.current_stage) == (2, comm.stage)
    assert (comm.is_pp_first_stage, comm.is_pp_last_stage) == (comm.stage == 0, comm.stage == 1)
    assert [talk.peer for talk in comm.neighbours([Edge(0, 1)])] == [[1, 2], [0], [0]][comm.rank]
    first, last = comm.is_pp_first_stage, comm.is_pp_last_stage
    wholes = [tensor(SHAPE, seed) for seed in range(3)]
    if first:
        assert comm.recv_forward(SHAPE, first) is None
        assert comm.send_backward_recv_forward(wholes[0], SHAPE, first) is None
        comm.send_backward(wholes[0], first)
        for whole in wholes[:2]:
            comm.send_forward(whole, last)
        assert torch.equal(comm.send_forward_recv_backward(wholes[2], SHAPE, last), wholes[1])
        for whole in (wholes[2], wholes[0]):
            assert torch.equal(comm.recv_backward(SHAPE, last), whole)
    else:
        assert comm.recv_backward(SHAPE, last) is None
        assert comm.send_forward_recv_backward(wholes[0], SHAPE, last) is None
        comm.send_forward(wholes[0], last)
        assert torch.equal(comm.recv_forward(SHAPE, first), wholes[0])
        got = comm.recv_forward()
        for whole, following in zip(wholes[1:], [*wholes[2:], None], strict=True):
            assert torch.equal(got, whole)
            if following is not None:
                got = comm.send_backward_recv_forward(got.detach(), SHAPE, first)
        comm.send_backward(got.detach(), first)
        comm.send_backward(wholes[0])
    with pytest.raises(BridgeError, match=r"of stages \(.,\), does not send forward along edge 1>2: it has \['0>1'\]"):
        comm.isend(wholes[0], edge=Edge(1, 2), direction=F)
    with pytest.raises(BridgeError, match="does not receive"):
        comm.irecv(edge=Edge(0, 1), direction=B if last else F)
    comm.close()


@pytest.mark.ranks(2)
def test_shapes_must_be_given_where_the_config_says_so():
    comm = make([1, 1], settings={"shapes": "given"})
    if comm.stage == 0:
        comm.send_forward(tensor(SHAPE))
    else:
        with pytest.raises(P2PUsageError, match="^tensor_shape must be specified if recv_prev is True"):
            comm.recv_forward()
        assert torch.equal(comm.recv_forward(SHAPE), tensor(SHAPE))
    comm.close()


# -- failures -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, deadline=30)
def test_an_abort_ends_a_completion_that_waits_for_a_copy_that_never_comes(ranks):
    comm = make([1, 2])
    if comm.stage == 0:
        comm.vtp_send_forward(tensor(SHAPE))  # nobody waits: rank 2 never takes its slice
        ranks.store.wait(["over"])
    elif comm.rank == 1:
        receive = comm.irecv(edge=Edge(0, 1), direction=F)
        threading.Timer(0.3, comm.abort, ["rank 2 was seen to fail"]).start()
        with pytest.raises(
            CollectiveFailedError, match=r"^rank 1, boundary vtp/0>1: .* ranks \[2\] .* ended here: rank 2 was"
        ):
            receive.wait()
        with pytest.raises(CollectiveFailedError):
            receive.result()
        ranks.store.set("over", "yes")
    else:
        ranks.store.wait(["over"])
    comm.close()


@pytest.mark.ranks(3, deadline=30)
def test_a_completion_has_a_deadline(ranks):
    comm = make([1, 2])
    if comm.stage == 0:
        comm.vtp_send_forward(tensor(SHAPE))
    elif comm.rank == 1:
        receive = comm.irecv(edge=Edge(0, 1), direction=F)
        with pytest.raises(
            CollectiveFailedError, match=r"^rank 1, boundary vtp/0>1: the copies on ranks \[2\] .* not within 0\.\d+ s"
        ):
            receive.wait(0.5)
        ranks.store.set("over", "yes")
    ranks.store.wait(["over"])
    comm.close()


@pytest.mark.ranks(3, deadline=30)
@pytest.mark.fault("kill", rank=0, at="after construction")
def test_the_other_stage_hears_of_a_rank_that_died(ranks):
    comm = make([1, 2])
    ranks.reach("after construction")
    with pytest.raises(P2PError, match="lost rank 0"):
        comm.recv_forward(SHAPE)
    comm.close()


@pytest.mark.ranks(3)
def test_boundaries_have_the_lanes_and_groups_that_the_plan_uses():
    comm = VTPCommunicator(VTPTopology([1, 2]), config(), traffic=[(Edge(0, 1), F)])
    assert comm.communicators == 2  # two lanes, or one and the group in which the copies complete each other
    whole = tensor((2, 3))
    if comm.rank == 0:
        comm.isend(whole, edge=Edge(0, 1), direction=F).wait()
        with pytest.raises(BridgeError, match="backward along edge 0>1: .* less what traffic= leaves out"):
            comm.irecv(edge=Edge(0, 1), direction=B)
    else:
        assert torch.equal(comm.irecv(edge=Edge(0, 1), direction=F).result(), whole)
    dist.barrier()
    comm.close()
