"""The edge-and-cloud example: gradients of one process, nothing but the stream on the link, and its command."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from digit_reader.encoder import IMAGE_TOKENS
from digit_reader.samples import Samples
from digit_reader.strips import Split, load_scans
from digit_reader.vocabulary import TEXT_LENGTH
from edge_cloud.job import open_job, plans
from edge_cloud.link import Link, SlowLink
from edge_cloud.measuring import message_bytes, seconds_on_link
from edge_cloud.parallel import share_of
from edge_cloud.reader import LAYOUT, SIZES, ReaderStage, stage_module
from pipegrid.schedules import Costs, simulate
from pipegrid.transport import Direction, Edge
from pipegrid.transport.lane.lane import Lane

from .kit.programs import run

MICROBATCHES, SAMPLES = 3, 2
BATCH = [range(index * SAMPLES, (index + 1) * SAMPLES) for index in range(MICROBATCHES)]
STREAM = (SAMPLES, IMAGE_TOKENS + TEXT_LENGTH, SIZES.hidden)
F64 = torch.float64


def in_one_process():
    """The step's loss, and the stages with their gradients."""
    samples = Samples(Split.TRAIN, 0, load_scans(Split.TRAIN))
    modules = [stage_module(stage, seed=0, dtype=F64) for stage in range(len(LAYOUT))]
    edges = [Edge(0, 1), Edge(1, 2), None]
    stages = [ReaderStage(n, module, samples, BATCH, edges[n]) for n, module in enumerate(modules)]
    total = 0.0
    for index in range(MICROBATCHES):
        inputs = {}
        for stage in stages:
            made = stage.forward(index, inputs)
            inputs = made.outputs
        made.loss.backward()
        total += made.loss.item()
    return total, modules


@pytest.mark.ranks(3, backend="gloo")  # the example's link is emulated on the host
@pytest.mark.parametrize("schedule", ["u_shape", "1f1b"])
def test_the_step_has_the_loss_and_the_gradients_of_one_process(schedule):
    job = open_job(dtype=F64, link=Link(delay=0.002, bandwidth=1e9))
    loss, _ = job.step(plans(MICROBATCHES, Costs(latency=2.0))[schedule], BATCH)
    expected, modules = in_one_process()
    if job.is_edge:
        assert loss == pytest.approx(expected, rel=1e-10)
    everything = [p.grad for module in modules for p in module.parameters()]
    floor = 1e-3 * float(sum(g.norm() ** 2 for g in everything)) ** 0.5 / len(everything) ** 0.5
    ranks = job.communicator.get_vtp_stage_ranks()[job.communicator.stage]
    for stage, module in job.modules.items():
        for name, parameter in module.named_parameters():
            whole = modules[stage].get_parameter(name).grad
            share = share_of(name, whole, ranks.index(job.communicator.rank), len(ranks)) if stage == 1 else whole
            assert float((parameter.grad - share).norm()) < 1e-10 * max(float(share.norm()), floor), (stage, name)
    job.close()


@pytest.mark.ranks(3, backend="gloo")  # the example's link is emulated on the host
def test_nothing_but_activations_gradients_and_shapes_crosses(monkeypatch):
    sent = []
    whole = Lane.isend
    for kind in (Lane, *_all_subclasses(Lane)):
        if "isend" in vars(kind):
            monkeypatch.setattr(kind, "isend", _watched(vars(kind)["isend"], sent))
    assert Lane.isend is not whole
    job = open_job(dtype=F64)
    job.step(plans(MICROBATCHES, Costs())["u_shape"], BATCH)
    lanes = job.communicator.lanes.values()
    # Between the sides: an activation and a gradient of each microbatch on each edge; the cloud's ranks send halves.
    outgoing = [lane for lane in lanes if lane.rank == lane.spec.source]
    assert sum(lane.stats.messages for lane in outgoing) == 2 * MICROBATCHES * len(outgoing) // 2
    assert len(sent) == sum(lane.stats.messages for lane in outgoing)
    for flat, note in sent:
        assert note is None or json.loads(note) == [[list(STREAM), "float64", None]]  # what is announced: shape, dtype
        assert flat.dtype is F64
        assert flat.numel() == torch.Size(STREAM).numel() // 2  # one of two messages, to or from the cloud's two ranks
    # No other way leads from the edge to the cloud: strips and words are on the edge alone.
    assert (job.samples is not None) is job.is_edge
    job.close()


def _all_subclasses(kind):
    return {found for direct in kind.__subclasses__() for found in (direct, *_all_subclasses(direct))}


def _watched(original, sent):
    def isend(lane, payload, *, note=None):
        sent.append((payload, note))
        return original(lane, payload, note=note)

    return isend


# -- the link -------------------------------------------------------------------------------------------


def test_messages_cross_the_link_one_after_another_and_their_delays_overlap():
    arrived = []

    def isend(payload, *, edge, direction):
        arrived.append((float(payload[0]), time.perf_counter()))
        return SimpleNamespace(wait=lambda timeout=None: None, is_completed=lambda: True)

    delay = 3.0  # no machine is so slow that the lines up to the time-out take as long
    link = SlowLink(SimpleNamespace(isend=isend), Link(delay=delay, bandwidth=8e3))
    start = time.perf_counter()
    sent = [link.isend(torch.full((10,), float(n)), edge=Edge(0, 1), direction=Direction.FORWARD) for n in range(3)]
    assert not sent[0].is_completed()
    with pytest.raises(TimeoutError, match="did not cross the link in 0.001 s"):
        sent[2].wait(0.001)
    for each in sent:
        each.wait()
        each.wait()
    assert all(each.is_completed() for each in sent)
    assert [value for value, _ in arrived] == [0.0, 1.0, 2.0]
    for number, (_, when) in enumerate(arrived, start=1):
        assert when - start >= delay + number * 0.005  # 40 bytes each at 8 kB/s, delayed together
    link.close()
    assert not any(thread.name == "edge-cloud-link" for thread in threading.enumerate())


def test_an_error_behind_the_link_reaches_who_waits():
    def isend(payload, *, edge, direction):
        raise ConnectionError("the cloud is gone")

    link = SlowLink(SimpleNamespace(isend=isend), Link(delay=0.0, bandwidth=1e9))
    with pytest.raises(ConnectionError, match="the cloud is gone"):
        link.isend(torch.ones(1), edge=Edge(0, 1), direction=Direction.FORWARD).wait()
    link.close()


def test_the_time_on_the_link_counts_every_message_by_itself():
    link = Link(delay=0.03, bandwidth=1e6)
    nbytes = message_bytes(SAMPLES, torch.float32)
    assert nbytes == torch.Size(STREAM).numel() * 4
    assert seconds_on_link(link, 8, nbytes) == pytest.approx(32 * (0.03 + nbytes / 1e6))
    with pytest.raises(ValueError, match="a delay of at least 0 and a bandwidth above 0"):
        Link(delay=-1.0, bandwidth=1.0)


# -- the command --------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent.parent / "docs" / "examples" / "edge_cloud" / "run.py"


@pytest.mark.parametrize("delay", [0.02, 0.05, 0.1])
def test_the_u_hides_more_of_the_link_than_plain_1f1b(delay):
    """By simulation: what the example measures is printed, and times decide no test."""
    compute = {"F": (0.005, 0.02, 0.005), "B": (0.01, 0.04, 0.01)}
    slow, free = Costs(**compute, latency=delay), Costs(**compute, latency=0.0)
    lengthened = {
        name: simulate(plan, slow).makespan - simulate(plan, free).makespan for name, plan in plans(8, slow).items()
    }
    assert lengthened["u_shape"] < lengthened["1f1b"]


@pytest.mark.nightly
def test_the_command_measures_both_schedules():
    done = run(SCRIPT, "--steps", "3", "--rounds", "3", "--delay", "0.1")
    assert done.returncode == 0, done.stderr
    hidden = re.findall(r"(\w+): .*; (-?\d+)% of the link's time hidden", done.stdout)
    assert {name for name, _ in hidden} == {"1f1b", "u_shape"}


def test_options_that_cannot_be_are_refused_before_any_process_starts():
    done = run(SCRIPT, "--microbatches", "0")
    assert done.returncode == 2
    assert "--microbatches 0: give at least 1" in done.stderr
