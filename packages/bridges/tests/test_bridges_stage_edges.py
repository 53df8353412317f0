"""Edges of stages, as a runtime uses them: virtual stages, a V, modules on common ranks, collectives."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.core.edge import Direction, Edge
from pipegrid.reshard.errors import BridgeError
from pipegrid.transport.config import P2PConfig
from reshard_kit.grids import grid

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)
F, B = Direction.FORWARD, Direction.BACKWARD
make = partial(MultiModulePipelineCommunicator, config=CONFIG)


@pytest.mark.ranks(3)
def test_virtual_stages_talk_along_their_own_edges():
    """enc (1 rank) -> llm with two chunks on two ranks: stages 0 | 1 2 3 4 at ranks 0 | 1 2 1 2."""
    grids = {"enc": grid(0), "llm": grid(1, pp=2)}
    comm = make(grids, {"enc": ["llm"], "llm": []}, stage_placement={"llm": (0, 1, 0, 1)})
    assert comm.graph.num_stages == 5
    assert comm.stages == ((0,), (1, 3), (2, 4))[comm.rank]
    for microbatch in range(2):
        value = torch.full((1, 1, 1), float(microbatch + 1))
        sends = []
        for stage in range(5):
            if stage in comm.stages:
                if stage:
                    value = comm.irecv(edge=Edge(stage - 1, stage), direction=F).result()
                    assert value.item() == (microbatch + 1) * 10.0**stage
                if stage < 4:
                    sends.append(comm.isend(value.detach() * 10, edge=Edge(stage, stage + 1), direction=F))
        for stage in reversed(range(5)):
            if stage in comm.stages:
                if stage < 4:
                    value = comm.irecv(edge=Edge(stage, stage + 1), direction=B).result()
                    assert value.item() == 4 - stage
                else:
                    value = torch.zeros(1, 1, 1)
                if stage:
                    sends.append(comm.isend(value.detach() + 1, edge=Edge(stage - 1, stage), direction=B))
        for handle in sends:
            handle.wait()
    if comm.rank:
        with pytest.raises(BridgeError, match="'llm' has 4 stages on 2 places"):
            comm.recv_forward()
    comm.destroy()


@pytest.mark.ranks(4, fake_nccl="streams")  # rank 1, which has no batch, sends before it receives
def test_stages_placed_as_a_v_end_where_they_began():
    grids = {"llm": grid(0, pp=2), "gen": grid(2, dp=2)}
    comm = make(grids, {"llm": ["gen"], "gen": []}, stage_placement={"llm": (0, 1, 1, 0)})
    assert comm.stages == ((0, 3), (1, 2), (4,), (4,))[comm.rank]
    with comm.batch() if comm.rank != 1 else contextlib.nullcontext():
        handles = []
        for stage in range(4):
            edge = Edge(stage, stage + 1)
            if stage in comm.stages:
                handles.append(comm.isend(torch.full((2, 1, 1), float(stage)), edge=edge, direction=F))
        received = [
            (edge, comm.irecv(edge=edge, direction=F))
            for edge in comm.graph.stage_edges
            if edge.destination in comm.stages
        ]
    for edge, handle in received:
        assert torch.equal(handle.result().unique(), torch.tensor([float(edge.source)]))
        assert handle.result().shape == ((1, 1, 1) if edge.destination == 4 else (2, 1, 1))
    for handle in handles:
        handle.wait()
    comm.destroy()


@pytest.mark.ranks(2)
def test_a_colocated_encoder_reaches_a_pipelined_language_model_along_edges():
    """enc dp2 on both ranks, llm pp2 on the same ranks: rank 0 is on both ends of the bridge."""
    grids = {"enc": grid(0, dp=2), "llm": grid(0, pp=2)}
    comm = make(grids, {"enc": ["llm"], "llm": []})
    rank = dist.get_rank()
    assert comm.stages == ((0, 1), (0, 2))[rank]
    for step in range(2):
        sends = [comm.isend(torch.full((1, 1, 1), float(10 * step + rank)), edge=Edge(0, 1), direction=F)]
        if rank == 0:
            whole = comm.irecv(edge=Edge(0, 1), direction=F).result()
            assert whole.flatten().tolist() == [10.0 * step, 10.0 * step + 1]
            sends.append(comm.isend(whole.detach(), edge=Edge(1, 2), direction=F))
            grad = comm.irecv(edge=Edge(1, 2), direction=B).result()
            sends.append(comm.isend(grad.detach(), edge=Edge(0, 1), direction=B))
        else:
            got = comm.irecv(edge=Edge(1, 2), direction=F).result()
            sends.append(comm.isend(3 * got.detach(), edge=Edge(1, 2), direction=B))
        assert comm.irecv(edge=Edge(0, 1), direction=B).result().item() == 3 * (10 * step + rank)
        for handle in sends:
            handle.wait()
    with pytest.raises(BridgeError, match="rank 0 holds 'enc' as well as 'llm', which it feeds"):
        comm.recv_forward()
    comm.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("grids", "flow", "text"),
    [
        ({"enc": grid(1), "llm": grid(0, pp=2)}, {"enc": ["llm"]}, "rank 1 holds 'enc' as well as 'llm'"),
        ({"a": grid(0), "b": grid(1), "c": grid(0)}, {"a": ["b"], "b": ["c"]}, "rank 0 holds 'a' as well as 'c'"),
        ({"a": grid(0), "b": grid(1), "c": grid(1)}, {"a": ["b", "c"]}, "rank 1 holds 'b' and 'c', which 'a' feeds"),
    ],
)
def test_verbs_that_would_wait_for_their_own_rank_or_merge_two_entries_are_an_error_on_all_ranks(grids, flow, text):
    comm = make(grids, flow)
    with pytest.raises(BridgeError, match=text):
        comm.recv_forward()
    comm.destroy()


@pytest.mark.ranks(2)
def test_a_collective_is_the_bridge_of_all_ranks_at_once():
    """Transposed layouts of the same ranks: enc dp2, llm tp2. Every rank gives and gets, both ways."""
    strict = P2PConfig(deadline=20.0, open_deadline=20.0, strict=True)
    grids = {"enc": grid(0, dp=2), "llm": grid(0, tp=2), "gen": grid(0, dp=2)}
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": ["gen"], "gen": []}, strict)
    assert comm.positions.placement == ((0,), (0,), (0,))
    assert comm.collective_edges == (Edge(0, 1), Edge(1, 2))
    with comm.in_order():  # as in the steps of a plan
        for step in range(3):
            mine = torch.full((1, 1, 1), float(10 * step + comm.rank))
            sending, receiving = comm.collective(mine, edge=Edge(0, 1), direction=F)
            whole = receiving.result()
            assert whole.flatten().tolist() == [10.0 * step, 10.0 * step + 1]
            sending.wait()
            _, receiving = comm.collective(2 * whole.detach(), edge=Edge(0, 1), direction=B)
            assert torch.equal(receiving.result(), 2 * mine)
    with pytest.raises(BridgeError, match=r"no edge 0>2 ends at"):
        comm.collective(mine, edge=Edge(0, 2), direction=F)
    comm.destroy()
