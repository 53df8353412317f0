"""Steps on a device that runs late: what the host waits for, when transfers start, what memory lives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator, VTPCommunicator, VTPTopology
from pipegrid.fake_nccl import Mark
from pipegrid.schedules import (
    SCHEDULES,
    Costs,
    Monitor,
    PipelineConfig,
    PipelineRuntime,
    clip_grad_norm_,
    lower,
    multi_module_1f1b,
    offload,
    reduce_gradients,
    simulate,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator, P2PConfig, streams

from .kit.grids import grids_of
from .kit.models import Part, call, chain_in_one_process, forward_step, require_same_gradients
from .kit.stages import Stage, in_one_process

MICROBATCHES, ROWS, WIDTH = 8, 16, 8
MOST_AHEAD = 3  # microbatches, of `HostLead`


def layers(number, graph):
    """A stage: two linear layers on the sum of its inputs; the mean square of the last one is the loss."""
    torch.manual_seed(number)
    data = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, 1, WIDTH)
    return Stage(
        graph,
        number,
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        data=lambda microbatch: data * (microbatch + 1),
        loss=lambda y: y.square().sum() / MICROBATCHES,
    )


class Marks:
    """A hook that marks every compute, before and after."""

    def __init__(self, device):
        self.device = device

    def before(self, action):
        if action.kind.is_compute:
            self.device.mark(f"{action} begins")

    def after(self, action):
        if action.kind.is_compute:
            self.device.mark(f"{action} ends")


def late_step(runtime, stages, device, finish=None):
    """One step in the steady state on the late device, as late as can be: the run, and the host's waits."""
    with device.late():
        runtime.step(finish=finish)  # connects, and agrees on shapes
    for stage in stages.values():
        stage.model.zero_grad()
    device.timeline.clear()
    with device.late(patience=5.0) as late:
        runtime.step(finish=finish)
        syncs = late.syncs
    return late, syncs


def opened(plan, **options):
    places = [positions[0] for positions in plan.placement]
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=30.0, **options)
    return P2PCommunicator(dist.group.WORLD, config, placement=places)


def require_no_wait_but_back_pressure(syncs):
    assert not [sync for sync in syncs if "schedules/runtime/stages/hooks.py" not in sync.where], syncs
    assert len(syncs) <= MICROBATCHES


def require_gradients_of_one_process(graph, stages):
    every = [layers(number, graph) for number in range(graph.num_stages)]
    in_one_process(every, MICROBATCHES)
    for number, stage in stages.items():
        require_same_gradients(stage.model, every[number].model, rtol=1e-4, atol=1e-6)


def most_ahead(timeline, plan, position):
    """The most microbatches that the host had issued whole and the device had not ended, where a compute begins."""
    last = {action.microbatch: f"{action} ends" for action in plan.actions(position) if action.kind.is_compute}
    most = issued = 0
    for moment in timeline:
        if isinstance(moment.of, Mark):
            if moment.of.text in last.values():
                issued += {"marked": 1, "reached": -1}[moment.what]
            elif moment.what == "marked":
                most = max(most, issued)
    return most


def is_transfer(launch, kind):
    return launch.kind == "p2p" and launch.operations[0].kind == kind


def places(timeline, what):
    """Where in the timeline each launch is ``started``, or ``ended``, by its number."""
    return {moment.of.number: index for index, moment in enumerate(timeline) if moment.what == what}


def late_receives(timeline):
    """The receives that had not started when the device ended the compute before it had to wait for them."""
    started, before, found = places(timeline, "started"), -1, []
    for index, moment in enumerate(timeline):
        if moment.what == "reached" and moment.of.text.endswith("ends"):
            before = index
        elif moment.what == "awaited" and is_transfer(moment.of, "recv") and before >= 0:
            found += [moment.of] * (started.get(moment.of.number, index) > before)
    return found


def late_messages(timeline):
    """As `late_receives`, of bridges, which wait on another stream: the k-th message of a lane is for F k or B k."""
    received, started, late = {}, places(timeline, "started"), []
    for moment in timeline:
        if moment.what == "launched" and is_transfer(moment.of, "recv"):
            received.setdefault(moment.of.group, []).append(moment.of)
    reached = [(index, moment.of.text) for index, moment in enumerate(timeline) if moment.what == "reached"]
    for group, launches in received.items():
        kind = "F" if ("/F]" in group or "forward" in group) and " gradients" not in group else "B"
        for microbatch, launch in enumerate(launches):
            place = next(n for n, (_, text) in enumerate(reached) if text.endswith(f"{kind}{microbatch} begins"))
            late += [launch] * (place > 0 and started[launch.number] > reached[place - 1][0])
    return late


def awaited_sends(timeline):
    """The sends that the device had to wait for before its last compute."""
    last = max(index for index, moment in enumerate(timeline) if moment.what == "reached")
    ended = places(timeline, "ended")
    return [
        moment.of
        for index, moment in enumerate(timeline[:last])
        if moment.what == "awaited" and is_transfer(moment.of, "send") and ended[moment.of.number] > index
    ]


# On one serial stream a receive starts when all before it has ended: what starts early needs streams.
@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="streams")
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_the_host_waits_for_nothing_but_its_lead_and_receives_start_before_they_are_needed(ranks, device, name):
    plan = lower(SCHEDULES[name].plan(2, MICROBATCHES))
    communicator = opened(plan)
    stages = {number: layers(number, plan.graph) for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[Marks(device)])
    _, syncs = late_step(runtime, stages, device)
    require_no_wait_but_back_pressure(syncs)
    assert 1 <= most_ahead(device.timeline, plan, ranks.rank) <= MOST_AHEAD
    assert late_receives(device.timeline) == []
    assert awaited_sends(device.timeline) == []
    assert device.violations == []
    require_gradients_of_one_process(plan.graph, stages)
    communicator.close()


def computes_before_completions(timeline):
    """Per completion among copies, the computes that the host began after it launched the receive before it."""
    found, begun = [], 0
    for moment in timeline:
        if moment.what == "launched" and is_transfer(moment.of, "recv"):
            begun = 0
        elif moment.what == "launched" and moment.of.kind != "p2p":
            found.append(begun)
        elif moment.what == "marked" and moment.of.text.endswith("begins"):
            begun += 1
    return found


GRAPHS = {
    "two encoders": ({"image": (0, {}), "audio": (1, {}), "llm": (2, {})}, {"image": ["llm"], "audio": ["llm"]}),
    "copies": ({"enc": (0, {"dp": 1}), "llm": (1, {"tp": 2})}, {"enc": ["llm"]}),
}


def between_modules(graph):
    """A communicator of several modules, where its stages are, and what ends it."""
    config = P2PConfig(pipeline_dtype=torch.float32, deadline=30.0, open_deadline=30.0)
    graph, _, strategy = graph.partition(", ")
    if graph == "variable tp":
        topology = VTPTopology([1, 2])
        communicator = VTPCommunicator(topology, config)
        return communicator, topology.placement, communicator.close
    places, flow = GRAPHS[graph]
    grids = grids_of(places)
    edges = {("enc", "llm"): EdgeOptions(strategy=strategy)} if strategy else None
    topology = {name: flow.get(name, []) for name in grids}
    communicator = MultiModulePipelineCommunicator(grids, topology, config, edges=edges)
    return communicator, communicator.positions.placement, communicator.destroy


@pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="streams")
@pytest.mark.parametrize("graph", ["copies", "variable tp", pytest.param("two encoders", marks=pytest.mark.nightly)])
def test_bridges_between_modules_hold_no_host(ranks, device, graph):
    communicator, placement, end = between_modules(graph)
    plan = lower(multi_module_1f1b(communicator.graph, MICROBATCHES, placement=placement))
    stages = {number: layers(number, communicator.graph) for number in communicator.stages}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[Marks(device)])
    _, syncs = late_step(runtime, stages, device)
    require_no_wait_but_back_pressure(syncs)
    assert 1 <= most_ahead(device.timeline, plan, min(ranks.rank, plan.num_positions - 1)) <= MOST_AHEAD
    assert late_messages(device.timeline) == []
    assert awaited_sends(device.timeline) == []
    assert device.violations == []
    require_gradients_of_one_process(communicator.graph, stages)
    end()


def kinds(launches):
    """What was launched, in order."""
    return [(one.kind, *((each.kind, each.peer) for each in one.operations)) for one in launches]


on_streams = pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="streams")
on_one_stream = pytest.mark.ranks(3, backend="fake_nccl", fake_nccl="serial")


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("copies, direct", marks=on_one_stream),
        pytest.param("copies, auto", marks=on_streams),
        pytest.param("variable tp", marks=on_one_stream),
    ],
)
def test_receives_of_a_bridge_land_when_they_are_posted(ranks, device, graph):
    communicator, placement, end = between_modules(graph)
    computes = multi_module_1f1b(communicator.graph, MICROBATCHES, placement=placement)
    plan = lower(computes, receives="early")
    stages = {number: layers(number, communicator.graph) for number in communicator.stages}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[Marks(device)])
    before = len(device.launches)
    with device.late():
        runtime.step()  # agrees on shapes
    first = len(device.launches)
    late_step(runtime, stages, device)
    if "auto" not in graph or ranks.rank == 1:  # with "auto", the other copy gets nothing but the first shape
        assert computes_before_completions(device.timeline) == [0] * (MICROBATCHES if ranks.rank else 0)
        assert kinds(device.launches[before:first]) == kinds(device.launches[first : 2 * first - before])
    assert device.violations == []
    require_gradients_of_one_process(communicator.graph, stages)
    end()


KEPT = 2**20


class Keeps(torch.autograd.Function):
    """One big tensor is all that the backward keeps, or uses."""

    @staticmethod
    def forward(ctx, x, weight):
        big = x.new_ones(KEPT // 4)
        ctx.save_for_backward(big)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        (big,) = ctx.saved_tensors
        return gradient * big[0], gradient.sum()


class Big(nn.Linear):
    """Each microbatch keeps `KEPT` bytes for the backward."""

    def forward(self, x):
        # The detached input: of a split backward the half of the weights needs what is kept.
        return x + Keeps.apply(x.detach(), self.weight[0, 0])


def on_fakes(size, *names):
    mark = pytest.mark.ranks(size, backend="fake_nccl")
    always = {"interleaved_1f1b", "gpipe"}
    return [pytest.param(name, marks=[mark] if name in always else [mark, pytest.mark.nightly]) for name in names]


@pytest.mark.parametrize(
    "name",
    [
        *on_fakes(2, "interleaved_1f1b", "gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_v"),
        *on_fakes(3, "two encoders", "copies"),
    ],
)
def test_the_peak_of_live_memory_is_the_plans_figure(ranks, device, name):
    if name in GRAPHS:
        communicator, placement, end = between_modules(name)
        plan = lower(multi_module_1f1b(communicator.graph, 4, placement=placement))
        numbers = communicator.stages
    else:
        plan = lower(SCHEDULES[name].plan(2, 4))
        communicator = opened(plan)
        numbers, end = plan.stages_at[ranks.rank], communicator.close
    stages = {
        number: Stage(plan.graph, number, Big(1, 1, bias=False), data=lambda _: torch.ones(4, 1, 1), loss=torch.sum)
        for number in numbers
    }
    late, _ = late_step(PipelineRuntime(plan, stages, communicator), stages, device)
    peaks = simulate(plan, Costs(activation=(1.0,) * plan.num_stages)).peaks()
    assert late.peak_bytes // KEPT == peaks[min(ranks.rank, plan.num_positions - 1)]
    assert late.live_bytes < KEPT // 16
    assert device.violations == []
    end()


@pytest.mark.ranks(2, backend="fake_nccl")
@pytest.mark.parametrize("name", ["gpipe", pytest.param("1f1b", marks=pytest.mark.nightly)])
def test_a_reused_buffer_waits_for_its_last_reader_and_the_plans_peak_is_all_that_is_allocated(ranks, device, name):
    plan = lower(SCHEDULES[name].plan(2, MICROBATCHES))
    communicator = opened(plan)
    stages = {number: layers(number, plan.graph) for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator, reuse_buffers=True)
    late_step(runtime, stages, device)
    if ranks.rank == 1:
        (lane,) = [lane for lane in communicator.lanes.values() if lane.spec.destination == 1]
        assert lane.stats.allocations == simulate(plan).peaks()[1]
    assert device.violations == []
    require_gradients_of_one_process(plan.graph, stages)
    communicator.close()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_reducing_and_clipping_hold_no_host_however_many_buckets(ranks, device):
    grid = HyperCommGrid([2], ["dp"])
    grid.create_pgs(["dp"])
    groups = ProcessGroupCollection.from_grid(grid)
    model = layers(0, lower(SCHEDULES["1f1b"].plan(1, 1)).graph).model
    with device.late() as late:
        for _ in range(2):
            (model(torch.full((4, WIDTH), ranks.rank + 1.0)) ** 2).sum().backward()
        before = len(device.launches)
        reduce_gradients(model, groups, num_tokens=3.0 + ranks.rank, bucket_bytes=64)
        buckets = len(device.launches) - before - 1  # the tokens are one more
        norm = clip_grad_norm_(model, groups, 1.0)
        assert late.syncs == []
    assert buckets == len(list(model.parameters()))
    assert norm > 1.0
    whole = sum(parameter.grad.double().square().sum() for parameter in model.parameters()).sqrt()
    assert whole.item() == pytest.approx(1.0, rel=1e-5)
    assert device.violations == []
    grid.destroy()


@pytest.mark.ranks(1, backend="fake_nccl")
def test_a_monitor_sees_what_the_device_has_not_done(ranks, device):
    monitor = Monitor(dist.HashStore(), rank=0, ranks=[0], device=torch.device("cpu"))
    with device.late():
        torch.ones(WIDTH).sum()
        monitor.progress.mark("a sum")
        assert monitor.progress.oldest() == "a sum"
        device.streams.synchronize()
        assert monitor.progress.oldest() is None
    monitor.close()


@pytest.mark.ranks(2, backend="fake_nccl")
def test_a_step_function_with_losses_per_token_and_freed_outputs_holds_no_host(ranks, device):
    grid = HyperCommGrid([2], ["pp"])
    grid.create_pgs(["pp"])
    config = PipelineConfig(
        pipeline_dtype=torch.float32,
        deadline=30.0,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
    )
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    groups = ProcessGroupCollection.from_grid(grid)
    part = Part(ranks.rank, WIDTH, config, dtype=torch.float32)

    def loss(y):
        return y.square().sum(), torch.ones_like(y, dtype=torch.int64).sum(), {"loss": y.detach()}

    step = partial(
        call,
        model=part,
        count=MICROBATCHES,
        forward_step_func=partial(forward_step, data=lambda _: torch.ones(ROWS, WIDTH), loss=loss),
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    with device.late():
        step()
    part.zero_grad()
    with device.late() as late:
        infos = step()
        clip_grad_norm_(part, groups, 1e9)
        require_no_wait_but_back_pressure(late.syncs)
    assert device.violations == []
    assert len(infos) == (MICROBATCHES if ranks.rank else 0)
    parts = [Part(number, WIDTH, dtype=torch.float32) for number in range(2)]
    chain_in_one_process(parts, [torch.ones(ROWS, WIDTH)], ROWS * WIDTH, loss)
    require_same_gradients(part, parts[ranks.rank], rtol=1e-4, atol=1e-8)
    communicator.close()
    grid.destroy()


@pytest.mark.ranks(2, backend="fake_nccl", fake_nccl="streams")
def test_activations_go_to_the_host_and_back_in_the_order_of_streams(ranks, device, monkeypatch):
    monkeypatch.setattr(streams, "pinned_like", torch.empty_like)  # there is no pinned memory here
    plan = offload(lower(SCHEDULES["gpipe"].plan(2, MICROBATCHES)), 3)
    communicator = opened(plan)
    stages = {number: layers(number, plan.graph) for number in plan.stages_at[ranks.rank]}
    runtime = PipelineRuntime(plan, stages, communicator, hooks=[Marks(device)])
    _, syncs = late_step(runtime, stages, device)
    require_no_wait_but_back_pressure(syncs)
    assert device.violations == []
    require_gradients_of_one_process(plan.graph, stages)
    communicator.close()
