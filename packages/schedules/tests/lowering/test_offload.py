"""Activations on the host: within the limit by proof, hidden behind computes in simulation, and the same gradients."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from autograd_kit.random_stages import gradients_of, program
from pipegrid.plans.plan import OFFLOADING
from pipegrid.schedules import (
    SCHEDULES,
    ActionKind,
    Costs,
    PlanError,
    forward_only,
    from_json,
    from_text,
    gpipe,
    lower,
    offload,
    one_f_one_b,
    seq1f1b,
    simulate,
    timeline,
    to_json,
    verify,
    zero_bubble_v,
)
from pipegrid.schedules.runtime.stages.offload import Offload
from pipegrid.timeline import svg
from plan_kit.plans import GENERATORS

from ..kit.live import weighty_stages

TRAINING = [name for name, schedule in SCHEDULES.items() if schedule.trains and not schedule.sliced]


def computes(plan):
    return [[a for a in plan.actions(p) if a.kind not in OFFLOADING] for p in range(plan.num_positions)]


@given(
    name=st.sampled_from(TRAINING),
    positions=st.integers(1, 4),
    count=st.integers(1, 9),
    limit=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    prefetch=st.integers(0, 3),
    bandwidth=st.sampled_from([0.3, 1.0, 8.0]),
)
@settings(max_examples=60, deadline=None)
def test_any_plan_keeps_to_the_limit_in_the_order_it_had(name, positions, count, limit, prefetch, bandwidth):
    plan = lower(GENERATORS[name](positions, count))
    try:
        offloaded = offload(plan, limit, prefetch=prefetch)
    except PlanError as error:
        assert "the least that works there is" in str(error)
        return
    proof = verify(offloaded, memory_limit=limit)
    assert max(proof.peak_live) <= limit
    assert computes(offloaded) == computes(plan)
    costs = Costs(latency=0.1, offload_bandwidth=bandwidth)
    slow, free = simulate(offloaded, costs), simulate(offloaded, evolve(costs, offload_bandwidth=float("inf")))
    assert slow.peak() <= limit + 1e-9
    assert simulate(plan, costs).makespan <= free.makespan + 1e-9 <= slow.makespan + 2e-9
    assert from_text(str(offloaded)) == offloaded == from_json(to_json(offloaded))


def test_a_plan_within_the_limit_stays_as_it_is():
    plan = lower(one_f_one_b(4, 8))
    assert offload(plan, 4) is not None
    assert offload(plan, 4) == plan


def test_half_the_memory_costs_no_time_where_a_copy_takes_no_longer_than_a_forward_and_a_backward():
    plan = lower(one_f_one_b(8, 16))
    length = simulate(plan).makespan
    assert verify(plan).peak_live[0] == 8
    offloaded = offload(plan, 4)
    assert max(verify(offloaded, memory_limit=4).peak_live) == 4
    lengths = [simulate(offloaded, Costs(offload_bandwidth=speed)).makespan for speed in (4.0, 0.5, 0.1)]
    assert lengths[:2] == [length, length]
    assert lengths[2] > length


def test_what_is_offloaded_is_not_live():
    plan = from_text("microbatches 2\nmodules model:1\nplacement 0\n0: 0F0 0OFFLOAD0 0RELEASE0 0F1 0B1 0RELOAD0 0B0\n")
    simulation = simulate(plan, Costs(offload_bandwidth=2))
    assert verify(plan).peak_live == (1,)
    assert simulation.live(0) == ((0, 1), (1.5, 0), (1.5, 1), (4.5, 0), (4.5, 1), (7.0, 0))
    assert simulation.makespan == 7.0  # two waits of half a forward
    assert simulate(plan, Costs()).makespan == 6.0


def test_the_copies_are_drawn_beside_the_computes():
    drawn = svg(timeline(simulate(offload(lower(one_f_one_b(3, 6)), 2), Costs(offload_bandwidth=2))))
    assert "OFFLOAD activations" in drawn
    assert "RELOAD activations" in drawn


GOOD = "0F0 0OFFLOAD0 0F1 0RELEASE0 0B1 0RELOAD0 0B0"


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("0OFFLOAD0 0F0 0F1 0RELEASE0 0B1 0RELOAD0 0B0", "0OFFLOAD0 needs 0F0 before it"),
        ("0F0 0F1 0RELEASE0 0B1 0RELOAD0 0B0", "0RELEASE0 needs 0OFFLOAD0 before it"),
        ("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0", "0RELOAD0 needs 0RELEASE0 before it"),
        ("0F0 0OFFLOAD0 0F1 0RELEASE0 0B1 0B0", "0B0 needs 0RELOAD0 before it; its activations are on the host"),
        ("0F0 0OFFLOAD0 0F1 0B1 0B0", "0B0 needs 0RELOAD0 before it; its activations are going out"),
        (f"{GOOD} 0OFFLOAD0", "0OFFLOAD0: the activations are back already"),
        (
            "0F0 0OFFLOAD0 0OFFLOAD0 0F1 0RELEASE0 0B1 0RELOAD0 0B0",
            "0OFFLOAD0: the activations are going out already",
        ),
        (f"{GOOD} 0OFFLOAD7", "a microbatch in 0..1"),
        (f"{GOOD} 3OFFLOAD0", "3OFFLOAD0"),
    ],
)
def test_a_copy_that_is_missing_late_or_twice_is_a_fault(steps, text):
    head = "microbatches 2\nmodules model:1\nplacement 0\n0: "
    verify(from_text(head + GOOD + "\n"))
    with pytest.raises(PlanError) as raised:
        verify(from_text(f"{head}{steps}\n"))
    assert text in str(raised.value)


def test_the_memory_limit_counts_what_is_on_the_device():
    head = "microbatches 2\nmodules model:1\nplacement 0\n0: "
    early = from_text(f"{head}0F0 0OFFLOAD0 0RELEASE0 0F1 0RELOAD0 0B1 0B0\n")
    with pytest.raises(PlanError, match=r"2 microbatches are live at once; the limit is 1"):
        verify(early, memory_limit=1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: offload(lower(gpipe(2, 4)), 0.5), r"memory_limit 0.5 does not hold what position 0 computes with"),
        (lambda: offload(offload(lower(gpipe(2, 4)), 2), 2), r"the plan offloads already"),
        (
            lambda: offload(seq1f1b(2, 4, num_slices=2), 4),
            r"the plan has 2 slices; offload a plan of whole microbatches",
        ),
        (lambda: lower(offload(gpipe(2, 4), 2)), r"the plan communicates or offloads already"),
        (lambda: offload(lower(gpipe(2, 4)), 2, sizes=[1]), r"sizes has 1 numbers and the plan 2 stages"),
        (
            lambda: verify(
                from_text("microbatches 1\nmodules model:1\nplacement 0\nforward_only 0\n0: 0F0 0OFFLOAD0\n")
            ),
            r"stage 0 has no backward, and keeps nothing",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_named(call, text):
    with pytest.raises(PlanError, match=text):
        call()


def test_an_evaluation_has_nothing_to_offload():
    plan = lower(forward_only(2, 4))
    assert offload(plan, 1) == plan


# On the device


def through_the_host(edges, held):
    """What a graph saved goes to the host and back."""
    copies = Offload(edges, held)
    copies.out()
    copies.free()
    copies.back()
    copies.wait()


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 2_000), marks=pytest.mark.nightly)], ids=str)
def test_gradients_of_random_stages_are_those_without_offload(seeds):
    """Of whole backwards bit for bit."""
    offloaded = partial(gradients_of, before=through_the_host)
    for seed in seeds:
        steps, outputs = program(random.Random(seed))
        reference = gradients_of(steps, outputs)
        for mine, theirs in zip(offloaded(steps, outputs, halves=False), reference, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs), f"seed {seed}: {steps} -> {outputs}"
        for mine, theirs in zip(offloaded(steps, outputs, halves=True), reference, strict=True):
            if mine is not None and theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_free_lets_the_memory_go_and_one_storage_comes_back_once():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8, requires_grad=True)
    made = (x @ weight).exp()
    y = (made * made.t()).sum()  # the same storage, saved three times
    refs = [StorageWeakRef(made.untyped_storage())]
    del made
    copies = Offload([get_gradient_edge(y)], [])
    copies.out()
    assert not refs[0].expired()
    assert len(copies._blocks) == 1
    copies.free()
    assert refs[0].expired()
    copies.back()
    copies.wait()
    y.backward()
    expected = torch.autograd.grad(((x @ weight).exp() * (x @ weight).exp().t()).sum(), [x, weight])
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_memory_goes_and_the_gradients_stay():
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)])
    model.to(device)
    x = torch.randn(4096, 512, device=device)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss = model(x).square().sum()
    live = torch.cuda.memory_allocated()
    copies = Offload([get_gradient_edge(loss)], [x], (torch.cuda.Stream(), torch.cuda.Stream()))
    copies.out()
    copies.free()
    assert torch.cuda.memory_allocated() <= live - 8 * x.nbytes
    copies.back()
    copies.wait()
    loss.backward()
    assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))


def test_a_saved_tensor_that_was_modified_in_place_is_torchs_own_error():
    x = torch.randn(4, requires_grad=True)
    y = x * 2
    z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Offload([get_gradient_edge(z)], []).out()


@pytest.mark.parametrize(("schedule", "limit"), [(one_f_one_b, 2), (gpipe, 2), (zero_bubble_v, 2.5)])
def test_a_step_that_offloads_has_the_gradients_of_one_that_does_not(schedule, limit, network):
    found, most = [], []
    plain = lower(schedule(3, 7))
    for plan in (plain, offload(plain, limit)):
        stages, watches = weighty_stages(plan)
        network.run(plan, stages, hooks=[[watch] for watch in watches])
        found.append([stage.weight.grad for stage in stages])
        most.append(max(watch.most[0] / stages[0].weight.nbytes for watch in watches))
    assert all(map(torch.equal, *found))
    assert most[1] <= limit * plain.num_chunks
    assert most[1] < most[0]
    assert any(a.kind is ActionKind.RELOAD for a in offload(plain, limit).actions(0))
