"""A runtime runs plans in which replicas differ: units skip modules, shares are uneven, units move."""

from __future__ import annotations

import pytest
import torch
from attrs import define
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators.registry import SCHEDULES
from pipegrid.plans.plan import parse_action
from pipegrid.schedules import (
    Actor,
    Forwarded,
    PipelineError,
    PipelineRuntime,
    Routes,
    StepArgumentError,
    compute_plan,
    lower,
    multi_module_1f1b,
    reroute,
    routed,
    schedule_for,
    stage_places,
)
from pipegrid.schedules.runtime.stages.edge_queues import RecvQueue, SendQueue
from pipegrid.schedules.runtime.stages.shared_calls import SharedCalls, SharedQueue, SummedQueue
from pipegrid.transport import Communicator, Direction, Edge, Verbs
from plan_kit.plans import examples, in_halves
from plan_kit.routed_plans import random_routed

from ..kit.routed_runs import Matrix, Replicas, assert_gradients_of_one_process

IMAGES = ModuleGraph({"images": 2, "text": 2}, {"images": ["text"]})
NAMED = [name for name, known in SCHEDULES.items() if known.trains and not known.sliced]


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_runs_uneven_replicas(name):
    plan = lower(routed(SCHEDULES[name].plan(2, 5), Routes([5, 2, 4])))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert not replicas.opened


@pytest.mark.parametrize("options", [{}, {"deallocate_outputs": True, "reuse_buffers": True}], ids=["", "freed"])
@pytest.mark.parametrize("placement", [None, [0, 1, 0, 1], [0, 0, 1, 1]], ids=str)
def test_units_without_images_skip_the_encoder(placement, options):
    home = multi_module_1f1b(IMAGES, 4, placement=placement)
    plan = lower(routed(home, Routes([4, 3], skips={"images": [1, 2, 4, 6]})))
    replicas = Replicas(plan, options)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert sorted(unit for held in replicas.stages if 0 in held for unit in held[0].seen) == [0, 3, 5]


def test_a_unit_may_skip_a_part_of_what_a_module_feeds():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"a": ["b", "c"], "b": ["c"]})
    plan = lower(routed(multi_module_1f1b(graph, 4), Routes([4], skips={"b": [1, 2]})))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)


@examples(day=25, night=60)
@given(st.integers(0, 10**6), st.sampled_from([{}, {"reuse_buffers": True, "deallocate_outputs": True}]))
def test_random_routes_have_the_gradients_of_one_process(seed, options):
    computes, lowering = random_routed(seed)
    assume(all(len(places) == 1 for places in computes.placement))
    replicas = Replicas(lower(computes, **lowering), options)
    replicas.run()
    assert_gradients_of_one_process(replicas)


CHAINS = [name for name in NAMED if name != "u_shape"]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_an_encoder_and_a_language_model_run_around_their_dead_actors(data):
    """As in `PipelineJob`: one dead after the other, while units skip the encoder."""
    name, pp, depth = data.draw(st.sampled_from(CHAINS)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    places = stage_places(name, pp)
    graph = ModuleGraph({"images": depth, "text": len(places)}, {"images": ["text"]})
    placement = [*range(depth), *(depth + place for place in places)]
    home = schedule_for(graph, name, 3, placement=placement)
    units = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3), st.just(3)))
    skips = data.draw(st.sets(st.integers(0, sum(units) - 1)))
    routes = Routes(units, skips={"images": skips})
    for _ in range(data.draw(st.integers(1, 3))):
        left = [
            Actor(position, replica)
            for position in range(home.num_positions)
            for replica in routes.living(position)
            if len(routes.living(position)) > 1
        ]
        routes = reroute(routes, [data.draw(st.sampled_from(left))] if left else [], plan=home)
    replicas = Replicas(lower(routed(home, routes)))
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert sorted(unit for held in replicas.stages if 0 in held for unit in held[0].seen) == sorted(
        {*range(sum(units))} - skips
    )


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_runs_around_a_dead_actor(name):
    home = SCHEDULES[name].plan(2, 4)
    stages = [stage for stage, places in enumerate(home.placement) if places == (1,)]
    moves = {(4 + m, stage): (0, 2)[m % 2] for m in range(4) for stage in stages}
    plan = lower(routed(home, Routes([4] * 3, moves=moves, dead=[Actor(1, 1)])))
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert {replica for _, _, _, replica in replicas.opened} == {0, 1, 2}


@pytest.mark.parametrize("options", [{}, {"deallocate_outputs": True, "reuse_buffers": True}], ids=["", "freed"])
@pytest.mark.parametrize("placement", [None, [0, 1, 0, 1], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("every", [2, 3])
def test_one_call_of_the_encoder_serves_several_units(every, placement, options):
    home = multi_module_1f1b(IMAGES, 5, placement=placement)
    routes = Routes([5, 4], skips={"images": [1, 5, 6]}, every={"images": every})
    replicas = Replicas(lower(routed(home, routes)), options)
    replicas.run()
    assert_gradients_of_one_process(replicas)
    assert {unit for held in replicas.stages if 0 in held for unit in held[0].seen} == {*routes.calls("images")}


def test_the_units_of_a_call_may_be_on_several_replicas():
    home = multi_module_1f1b(IMAGES, 4)
    moves = {(1, 2): 1, (2, 2): 2, (3, 2): 1, (5, 2): 0, (4, 0): 2}
    plan = lower(routed(home, Routes([4, 4, 1], every={"images": 4}, moves=moves)))
    sends = [action for action in plan.actions(1) if str(action) == "1SEND_F0>2"]
    assert len(sends) == 1  # to three replicas
    replicas = Replicas(plan)
    replicas.run()
    assert_gradients_of_one_process(replicas)


@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=str)
def test_gradients_of_several_actors_come_into_the_first_half_of_a_backward(placement):
    home = multi_module_1f1b(IMAGES, 4, placement=placement)
    moves = {(1, 2): 1, (2, 2): 2, (3, 2): 1, (5, 2): 0, (4, 0): 2}
    computes = routed(home, Routes([4, 4, 1], every={"images": 4}, moves=moves))
    replicas = Replicas(lower(in_halves(computes)))
    replicas.run()
    assert_gradients_of_one_process(replicas)


def test_a_step_with_calls_of_several_units_repeats_bit_for_bit():
    moves = {(unit, 2): unit % 3 for unit in range(8)}
    plan = lower(routed(multi_module_1f1b(IMAGES, 4), Routes([4, 4, 0], every={"images": 4}, moves=moves)))
    each = []
    for _ in range(3):
        replicas = Replicas(plan)
        replicas.run()
        each.append([one.weight.grad for held in replicas.stages for one in held.values() if one.seen])
    assert all(torch.equal(one, other) for others in each[1:] for one, other in zip(each[0], others, strict=True))


class IntoTheSame(torch.autograd.Function):
    """A tensor over the same memory each time, as a captured graph returns it."""

    memory = torch.zeros(2, 3, dtype=torch.float64)

    @staticmethod
    def forward(ctx, weight, value):
        IntoTheSame.memory.data.fill_(value)
        return IntoTheSame.memory.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sum(), None


PAIR = ModuleGraph({"images": 1, "text": 1}, {"images": ["text"]})


def hand_written(actions, *, routes, forward_only=(), graph=PAIR):
    """A plan of one position."""
    return compute_plan(
        [map(parse_action, actions.split())],
        graph=graph,
        placement=[0] * graph.num_stages,
        num_microbatches=routes.num_units,
        forward_only=forward_only,
        routes=routes,
    )


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_an_encoder_may_write_each_output_into_the_same_memory(frozen):
    """Beside the stage that reads it by several units, the second of which comes after the next call."""
    forwards, backwards = "0F0 1F0 0F2 1F1 1F2 1F3 1B0 1B1 1B2 1B3", "0B0 0B2"
    routes = Routes([4], every={"images": 2})
    plan = hand_written(forwards if frozen else f"{forwards} {backwards}", routes=routes, forward_only=[0] * frozen)
    one, read = torch.ones((), dtype=torch.float64, requires_grad=True), []

    class Images:
        def forward(self, unit, inputs):
            return Forwarded({Edge(0, 1): IntoTheSame.apply(one, unit)})

    class Text:
        def forward(self, unit, inputs):
            read.append(inputs[Edge(0, 1)].sum().item())
            return Forwarded({}, (inputs[Edge(0, 1)] * one).sum())

    PipelineRuntime(plan, {0: Images(), 1: Text()}, None, replica=0).step()
    assert read == [0, 0, 12, 12]


def test_a_stage_may_write_the_output_of_a_unit_that_takes_other_edges_into_the_same_memory():
    graph = ModuleGraph({"a": 1, "b": 1, "c": 1}, {"a": ["b", "c"], "b": ["c"]})
    routes = Routes([2], skips={"b": [1]})
    plan = hand_written("0F0 0F1 1F0 2F0 2F1", routes=routes, forward_only=[0, 1, 2], graph=graph)
    memory, read = torch.zeros(2), []

    class Writes:
        def forward(self, unit, inputs):
            return Forwarded(dict.fromkeys([Edge(0, 1), Edge(0, 2)], memory.fill_(unit + 1)))

    class Reads:
        def __init__(self, number):
            self.outgoing = [edge for edge in graph.stage_edges if edge.source == number]

        def forward(self, unit, inputs):
            read.extend(value[0].item() for value in inputs.values())
            return Forwarded(dict.fromkeys(self.outgoing, torch.full((2,), 10.0)), None)

    stages = {0: Writes(), 1: Reads(1), 2: Reads(2)}
    PipelineRuntime(plan, stages, None, replica=0, clone_outputs=True).step()
    assert read == [1, 1, 10, 2]
    with pytest.raises(PipelineError, match="stage 0 wrote again into its output of microbatch 0 before edge 0>1 had"):
        PipelineRuntime(plan, stages, None, replica=0).step()


def sums(values, order, calls=None):
    """What leaves a `SummedQueue` when pieces put their gradients in ``order``, and the gradients are written after."""
    queue = SendQueue(
        Edge(0, 1),
        Direction.BACKWARD,
        Communicator(),
        local=RecvQueue(Edge(0, 1), Direction.BACKWARD, Communicator(), local=True),
    )
    summed = SummedQueue(queue, SharedCalls(calls or dict.fromkeys(values, 0)))
    for piece in order:
        gradient = torch.tensor(values[piece], dtype=torch.float32)
        summed.put(piece, {"x": gradient, "mask": None})
        gradient.zero_()
    return queue


@given(st.permutations(range(4)))
def test_gradients_are_summed_in_the_order_of_units_whatever_came_first(order):
    values = [1e8, 1.0, -1e8, 1.0]  # of which each order has a sum of its own
    expected = torch.tensor(0.0)
    for value in values:
        expected = expected + torch.tensor(value)
    found = sums(dict(enumerate(values)), order).end(0)
    assert found["x"].item() == expected.item()
    assert found["mask"] is None


@define
class Buffered:
    """A receive that has come, and counts the returns of its buffer."""

    payload: torch.Tensor
    released: int = 0

    def wait(self, timeout=None):
        pass

    def is_completed(self):
        return True

    def result(self):
        return self.payload

    def release(self):
        self.released += 1


class OneMessage(Communicator):
    def __init__(self, message):
        self.message = message

    def port(self, edge, direction):
        return Verbs(None, lambda: self.message)


@given(st.permutations(range(3)))
def test_pieces_are_lent_one_memory_which_goes_back_unless_one_of_them_has_kept_it(order):
    message = Buffered(torch.ones(2, requires_grad=True))
    queue = RecvQueue(Edge(0, 1), Direction.FORWARD, OneMessage(message))
    queue.reusable.add(0)
    shared = SharedQueue(queue, SharedCalls(dict.fromkeys(range(3), 0)))
    for kept in (True, False):
        queue.receive(0, parse_action("1RECV_F0<0"))
        shared.drop()
        taken = [shared.take(piece) for piece in order]
        assert len({id(one) for one in taken}) == 3
        assert all(one.requires_grad and one.data_ptr() == message.payload.data_ptr() for one in taken)
        del taken[kept:]
        queue.give_back(0)
        assert message.released == (not kept)


def test_a_sum_leaves_when_its_last_piece_is_there():
    queue = sums({0: 1.0, 1: 2.0, 4: 3.0}, [0, 4], {0: 0, 1: 0, 4: 4})
    assert list(queue.pending) == [4]


def test_a_step_may_follow_another_and_an_evaluation_runs_the_forwards():
    home = multi_module_1f1b(IMAGES, 4)
    moves = {(4, 2): 0, (5, 1): 0}
    replicas = Replicas(lower(routed(home, Routes([4, 3], skips={"images": [1, 6]}, moves=moves))))
    replicas.run("eval")
    assert all(one.weight.grad is None for held in replicas.stages for one in held.values())
    replicas.run(times=2)
    for stage in range(4):
        twice = replicas.gradient(stage)
        once = Replicas(replicas.plan)
        once.run()
        assert twice.allclose(2 * once.gradient(stage), rtol=1e-12)


def test_the_replica_of_a_rank_must_be_given_and_live():
    home = multi_module_1f1b(IMAGES, 2)
    moves = {(unit, 1): 0 for unit in (2, 3)}
    plan = lower(routed(home, Routes([2, 2], moves=moves, dead=[Actor(1, 1)])))
    stage = {1: Matrix(plan, 1)}
    for replica in (None, 2):
        with pytest.raises(StepArgumentError, match=rf"replica is {replica}, and the plan has routes; .* in 0\.\.1"):
            PipelineRuntime(plan, stage, None, replica=replica)
    with pytest.raises(StepArgumentError, match=r"has stages \[1\], but the plan has .*in replica 1 position 1: \[\]"):
        PipelineRuntime(plan, stage, None, replica=1)
