"""Where stages lie: neighbours, edges and placements."""

import inspect

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, LaneSpec, P2PCommunicator, P2PUsageError, PipelineCommunicator

from .stages import (
    BACKWARD,
    FORWARD,
    MODES,
    SHAPE,
    activation,
    assert_received,
    config,
    gradient,
    in_turn,
    on_one_stream,
)


class TestPlace:
    @pytest.mark.ranks(4)
    def test_neighbours_are_cyclic_global_ranks_of_the_group(self, ranks):
        members = [[3, 1], [0, 2]]
        mine = next(group for group in members if ranks.rank in group)
        unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
        groups = [dist.new_group(group, **unsorted) for group in members]  # torch 2.11 sorts always
        group = groups[members.index(mine)]
        mine = dist.get_process_group_ranks(group)
        communicator = P2PCommunicator(group, config(virtual_pipeline_model_parallel_size=2))
        place = mine.index(ranks.rank)
        assert communicator.current_stage == place
        assert communicator.total_stages == 2
        assert communicator.next_rank == communicator.prev_rank == mine[1 - place]
        assert communicator.is_pp_first_stage == (place == 0)
        assert communicator.is_pp_last_stage == (place == 1)
        assert communicator.virtual_pipeline_model_parallel_size == 2
        assert communicator.device == torch.device("cpu")
        with in_turn(ranks, communicator):
            received = communicator.send_forward_recv_forward(activation(ranks.rank), True, SHAPE)
        assert_received(received, activation(mine[1 - place]))
        communicator.close()

    @pytest.mark.ranks(2)
    def test_it_is_what_schedules_ask_for(self, ranks, communicator):
        assert isinstance(communicator, PipelineCommunicator)

    @pytest.mark.ranks(3)
    def test_every_lane_is_there_before_the_first_step(self, ranks, communicator):
        me, after, before = ranks.rank, (ranks.rank + 1) % 3, (ranks.rank - 1) % 3
        assert set(communicator.lanes) == {
            LaneSpec(me, after, "forward"), LaneSpec(before, me, "forward"),
            LaneSpec(me, before, "backward"), LaneSpec(after, me, "backward"),
        }  # fmt: skip


class TestEdges:
    @pytest.mark.ranks(3)
    @MODES
    def test_stages_lie_on_ranks_in_turn(self, ranks, communicator):
        # Two chunks: stages 0, 3 on rank 0; 1, 4 on rank 1; 2, 5 on rank 2.
        me, edges = ranks.rank, [Edge(stage, stage + 1) for stage in range(5)]
        with communicator.lanes.batch(by_lane=on_one_stream(ranks)):  # all send first
            sends = [
                communicator.isend(activation(edge.source), edge=edge, direction=FORWARD)
                for edge in edges
                if edge.source % 3 == me
            ] + [
                communicator.isend(gradient(edge.destination), edge=edge, direction=BACKWARD)
                for edge in edges
                if edge.destination % 3 == me
            ]
            receives = [
                (communicator.irecv(edge=edge, direction=FORWARD, shapes=SHAPE), activation(edge.source))
                for edge in edges
                if edge.destination % 3 == me
            ] + [
                (communicator.irecv(edge=edge, direction=BACKWARD, shapes=SHAPE), gradient(edge.destination))
                for edge in edges
                if edge.source % 3 == me
            ]
        for handle, expected in receives:
            assert_received(handle.result(), expected)
        for handle in sends:
            handle.wait()

    @pytest.mark.ranks(2)
    def test_a_v_shaped_placement(self, ranks):
        placement = (0, 1, 1, 0)
        communicator = P2PCommunicator(dist.group.WORLD, config(), placement=placement)
        assert communicator.is_pp_first_stage == communicator.is_pp_last_stage == (ranks.rank == 0)
        for source in range(3):
            edge = Edge(source, source + 1)
            ends = [placement[source], placement[source + 1]]
            for direction in (FORWARD, BACKWARD):
                sender, receiver = ends if direction is FORWARD else reversed(ends)
                handle = None
                if sender == ranks.rank:
                    handle = communicator.isend(activation(source), edge=edge, direction=direction)
                if receiver == ranks.rank:
                    assert_received(communicator.irecv(edge=edge, direction=direction).result(), activation(source))
                if handle is not None:
                    handle.wait()
        with pytest.raises(P2PUsageError, match="the edge is 3>4; it must be an Edge of this pipeline"):
            communicator.irecv(edge=Edge(3, 4), direction=FORWARD)
        communicator.close()

    @pytest.mark.ranks(3)
    def test_that_are_none_or_of_others_are_refused(self, ranks, communicator):
        for edge in (Edge(0, 2), Edge(1, 0), Edge(-1, 0)):
            with pytest.raises(P2PUsageError, match=f"the edge is {edge}; it must be an Edge of this pipeline"):
                communicator.isend(activation(0), edge=edge, direction=FORWARD)
        if ranks.rank == 2:
            with pytest.raises(P2PUsageError, match=r"edge 0>1 needs lane 0>1\[.*\], which rank 2 is no end of"):
                communicator.irecv(edge=Edge(0, 1), direction=FORWARD)
        if ranks.rank == 0:
            with pytest.raises(P2PUsageError, match="rank 0 cannot receive on lane 0>1"):
                communicator.irecv(edge=Edge(0, 1), direction=FORWARD)

    @pytest.mark.ranks(1)
    def test_one_stage_talks_to_itself(self, ranks, communicator):
        assert communicator.is_pp_first_stage
        assert communicator.is_pp_last_stage
        received = communicator.send_forward_recv_forward(activation(0), True, SHAPE)
        assert_received(received, activation(0))
        sent = communicator.isend(gradient(1), edge=Edge(0, 1), direction=BACKWARD)
        assert_received(communicator.irecv(edge=Edge(0, 1), direction=BACKWARD).result(), gradient(1))
        sent.wait()
