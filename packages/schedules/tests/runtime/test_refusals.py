"""What a runtime or its stages are given wrongly is refused by a typed error that says where, what and what instead."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autograd_kit.gradients import assert_same_gradients
from pipegrid.schedules import (
    DataEndedError,
    Forwarded,
    GradientError,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    Recorder,
    Routes,
    SplitBackwardError,
    StageOutputError,
    StepArgumentError,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    lower,
    one_f_one_b,
    routed,
    zero_bubble_h1,
    zero_bubble_v,
)
from pipegrid.transport import Direction, Edge, P2PCommunicator, P2PConfig

from ..kit.models import Part, call, microbatch
from ..kit.stages import stages_of

ALONE, PAIR, ZB = lower(one_f_one_b(1, 2)), lower(one_f_one_b(2, 2)), lower(zero_bubble_h1(2, 3))
EDGE = Edge(0, 1)


def weight():
    return torch.ones((), requires_grad=True)


def last(loss):
    return SimpleNamespace(forward=lambda microbatch, inputs: Forwarded({}, loss()))


def cause(error, function):
    """The text of a failed step whose cause is an ``error``."""
    with pytest.raises(PipelineError) as found:
        function()
    assert type(found.value.__cause__) is error
    return str(found.value)


# What a stage returns

RESULTS = {
    "a tensor": (lambda: weight() * 2, r"a tensor of shape \(\)"),
    "None": (lambda: None, "None"),
    "a tuple": (lambda: (weight(), {}), "a tuple of 2"),
    "outputs that are no dict": (lambda: Forwarded(weight()), r"Forwarded\(outputs=tensor"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_forward_returns_what_it_made(name):
    made, described = RESULTS[name]
    runtime = PipelineRuntime(ALONE, {0: SimpleNamespace(forward=lambda microbatch, inputs: made())}, None)
    with pytest.raises(
        PipelineError, match=rf"forward of stage 0 returned {described}.* for microbatch 0; return Forw"
    ):
        runtime.step()


@pytest.mark.parametrize("verb", ["step", "eval"])
@pytest.mark.parametrize("payload", ["x", 3, [torch.ones(2), 3], {"a": ({"b": "x"},)}], ids=str)
def test_payloads_are_made_of_tensors(payload, verb, network):
    stage = SimpleNamespace(forward=lambda microbatch, inputs: Forwarded({EDGE: payload}))
    runtime = PipelineRuntime(PAIR, {0: stage}, network.communicator(2, 0))
    text = cause(StageOutputError, getattr(runtime, verb))
    assert "the output of stage 0 on edge 0>1 for microbatch 0 has " in text
    assert "; a payload is made of tensors" in text
    assert network.messages == 0


LOSSES = {
    "3.0;": lambda: 3.0,
    "a tensor of shape (3,), torch.float32, requires_grad=True;": lambda: weight() * torch.ones(3),
    "a tensor of shape (), torch.int64,": lambda: torch.tensor(3),
    "a tensor of shape (), torch.complex64,": lambda: weight().to(torch.complex64),
    "a tensor of shape (), torch.float32, requires_grad=False;": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("described", LOSSES)
def test_a_loss_can_be_differentiated(described):
    text = cause(StageOutputError, PipelineRuntime(ALONE, {0: last(LOSSES[described])}, None).step)
    assert f"the loss of stage 0 for microbatch 0 is {described}" in text


@pytest.mark.parametrize("described", LOSSES)
def test_a_scaled_loss_is_still_a_loss(described):
    runtime = PipelineRuntime(ALONE, {0: last(weight)}, None, loss_scale=lambda loss: LOSSES[described]())
    text = cause(StageOutputError, runtime.step)
    assert f"loss_scale(loss) of stage 0 for microbatch 0 is {described}" in text


def test_a_middle_stages_loss_is_looked_at_as_well(network):
    stage = SimpleNamespace(forward=lambda microbatch, inputs: Forwarded({EDGE: weight() * 2}, weight().detach()))
    runtime = PipelineRuntime(PAIR, {0: stage}, network.communicator(2, 0))
    assert "requires_grad=False; a loss" in cause(StageOutputError, runtime.step)


@pytest.mark.parametrize("verb", ["step", "eval"])
def test_data_that_end_too_early_say_where(verb):
    data = iter([1.0])
    runtime = PipelineRuntime(ALONE, {0: last(lambda: weight() * next(data))}, None)
    assert "the iterator of stage 0 ended at microbatch 1 of 2" in cause(DataEndedError, getattr(runtime, verb))


def test_a_step_functions_data_that_end_too_early_say_where():
    with pytest.raises(PipelineError, match="the iterator of stage 0 ended at microbatch 3 of 5"):
        call(model=Part(0, PipelineConfig()), count=5, data_iterator=iter(range(3)))


@pytest.mark.parametrize("view", [False, True])
def test_what_was_received_is_not_changed_in_place(view, network):
    def forward(microbatch, inputs):
        x = inputs[EDGE][:1] if view else inputs[EDGE]
        return Forwarded({}, x.mul_(2).sum())

    network.lane(EDGE, Direction.FORWARD).put(torch.ones(2, requires_grad=True))
    runtime = PipelineRuntime(PAIR, {1: SimpleNamespace(forward=forward)}, network.communicator(2, 1))
    text = cause(StageOutputError, runtime.step)
    assert "stage 1 changes a tensor in place for microbatch 0" in text
    assert "x.clone()" in text


@pytest.mark.ranks(2)
def test_a_failed_step_names_its_rank(ranks):
    communicator = P2PCommunicator(dist.group.WORLD, P2PConfig(pipeline_dtype=torch.float32))
    runtime = PipelineRuntime(
        PAIR, {ranks.rank: SimpleNamespace(forward=lambda microbatch, inputs: None)}, communicator
    )
    with pytest.raises(
        PipelineError, match=rf"(?s)^rank 0, stage 0, microbatch 0: Stage.* at position {ranks.rank}, step"
    ):
        runtime.step()
    communicator.close()


# Which graphs are split


def test_checkpointing_that_begins_with_a_later_microbatch_is_refused_by_name(network):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(microbatch, inputs):
        (x,) = inputs.values()
        y = layers[0](x)
        return Forwarded({}, (checkpoint(layers[1], y, use_reentrant=True) if microbatch else layers[1](y)).sum())

    for _ in range(3):
        network.lane(EDGE, Direction.FORWARD).put(torch.ones(1, 2, requires_grad=True))
    runtime = PipelineRuntime(ZB, {1: SimpleNamespace(forward=forward, model=layers)}, network.communicator(2, 1))
    text = cause(SplitBackwardError, runtime.step)
    assert (
        "microbatch 1: SplitBackwardError: stage 1: module '1' (Linear) is checkpointed with use_reentrant=True" in text
    )


# What a runtime is given


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"plan": None}, "plan is None; give a Plan"),
        ({"monitor": 3}, "monitor is 3; it must be a Monitor"),
        ({"failure_dir": 3}, "failure_dir is 3; it must be a string or a PathLike"),
        ({"reducers": [3]}, r"reducers is \[3\] \(list\); it must be a "),
        (
            {"stages": [last(weight)]},
            r"stages is .* \(list\); it must be a dict of this rank's stages by global number",
        ),
        ({"stages": {0: 3}}, r"stage 0 is 3, and .*forward\(microbatch, inputs\): 'int' object has no"),
        ({"stages": {0: nn.Linear(2, 2)}}, r"stage 0 is Linear\(.*forward\(microbatch, inputs\): too many"),
        ({"hooks": [3]}, r"hooks\[0\] is 3; it must be a hook with before\(action\) and after\(action\)"),
        ({"loss_scale": 1024.0}, "loss_scale is 1024.0; it must be a function from a loss"),
        ({"deadline": -1}, "deadline is -1; it must be a finite number above 0"),
    ],
)
def test_arguments_are_looked_at_when_the_runtime_is_made(arguments, text):
    given = {"plan": ALONE, "stages": {0: last(weight)}, "communicator": None, **arguments}
    with pytest.raises((StepArgumentError, StepArgumentError), match=text):
        PipelineRuntime(**given)


def test_messages_need_a_communicator():
    with pytest.raises(StepArgumentError, match="position 0 has 0SEND_F0>1, and communicator is None, without port"):
        PipelineRuntime(PAIR, {0: last(weight)}, None)


def test_a_reducer_that_nobody_would_call_is_refused(network):
    tied = lower(one_f_one_b(2, 2), tied={"embedding": [0, 1]})
    with pytest.raises(
        StepArgumentError, match=r"reducers for \['embedding', 'embeding'\]; .* the plan for \['embedding'\]"
    ):
        PipelineRuntime(
            tied,
            {0: last(weight)},
            network.communicator(2, 0),
            reducers={"embedding": print, "embeding": print},
        )


@pytest.mark.parametrize("communicates", [False, True])
def test_only_lanes_may_hold_messages(communicates, network):
    communicator = network.communicator(1, 0) if communicates else None
    text = cause(StageOutputError, PipelineRuntime(ALONE, {0: last(float)}, communicator).step)
    assert ("Lanes may hold messages" in text) == communicates
    assert "ebuild" in text


def test_named_tuples_travel_inside_a_position():
    pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 -- what people have
    plan = lower(looped_bfs(1, 2, num_chunks=2))
    w, seen = weight(), []
    first = SimpleNamespace(forward=lambda m, i: Forwarded({EDGE: pair(w * 2, w * 3)}))
    second = SimpleNamespace(forward=lambda m, i: seen.append(i[EDGE]) or Forwarded({}, i[EDGE].x * i[EDGE].y))
    PipelineRuntime(plan, {0: first, 1: second}, None).step()
    assert {type(received) for received in seen} == {pair}
    assert w.grad.item() == 2 * 12


def test_an_aside_that_fails_is_noted():
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.aside("data"):
        raise KeyError
    (aside,) = recorder.track(ALONE, rank=0, position=0).asides
    assert aside.name == "data"


# Wrappers that reduce by themselves


def loss(output, microbatch=None):
    return output.square().sum()


WRONG = {
    "two chunks": interleaved_1f1b(1, 3, num_chunks=2),
    "two chunks, breadth first": looped_bfs(1, 3, num_chunks=2),
    "two chunks, split": zero_bubble_v(1, 3),
    "all forwards first": gpipe(1, 3),
    "split": zero_bubble_h1(1, 3),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_ddp_is_refused_where_other_forwards_come_between(name, inside, process_group):
    plan = lower(WRONG[name])
    models = [Part(number) for number in range(plan.num_stages)]
    models = [nn.Sequential(model) if inside else DistributedDataParallel(model) for model in models]
    runtime = PipelineRuntime(plan, dict(enumerate(stages_of(plan.graph, models, data=microbatch, loss=loss))), None)
    if inside:  # between two steps
        runtime.step()
        for model in models:
            model[0] = DistributedDataParallel(model[0])
    where = r"model\.0" if inside else "model"
    with pytest.raises(GradientError, match=rf"stage 0 has a DistributedDataParallel \({where}\).*reduce_gradients"):
        runtime.step()
    runtime.eval()  # which reduces nothing


@pytest.mark.ranks(2)
def test_ddp_is_right_where_each_backward_follows_its_own_forward(ranks):
    plan = lower(one_f_one_b(1, 3))
    model, reference = Part(0), Part(0)
    stages = stages_of(
        plan.graph, [DistributedDataParallel(model)], data=partial(microbatch, lane=ranks.rank), loss=loss
    )
    PipelineRuntime(plan, dict(enumerate(stages)), None).step()
    for rank in range(2):
        for number in range(3):
            (loss(reference(microbatch(number, rank))) / 2).backward()
    assert_same_gradients(model, reference, rtol=1e-14)


def test_a_plan_with_routes(network):
    plan = lower(routed(one_f_one_b(2, 2), Routes([2, 1])))
    with pytest.raises(
        StepArgumentError, match=r"replica is None, and the plan has routes; give this rank's, in 0\.\.1"
    ):
        PipelineRuntime(plan, {0: SimpleNamespace(forward=lambda microbatch, inputs: None)}, network.communicator(4, 0))
    assert network.messages == 0
