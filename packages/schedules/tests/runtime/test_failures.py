"""What a failing step says first, and that neither a silent store nor a stopped peer delays it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges.collectives import CollectiveWaits
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules import (
    DisagreementError,
    JobFailedError,
    Monitor,
    PipelineError,
    PipelineRuntime,
    gpipe,
    lower,
    one_f_one_b,
)
from pipegrid.transport import Communicator, P2PCommunicator, P2PConfig, streams
from pipegrid.transport.collectives.waiting import device_collectives

from ..kit.stages import Scale, raising

PLAN = lower(one_f_one_b(1, 3))


class Stoppable:
    """A store of one process whose server can be stopped: it answers nothing from then on; or ended."""

    def __init__(self):
        self.store, self.stopped, self.ended = dist.HashStore(), threading.Event(), False
        self.released = threading.Event()

    def __getattr__(self, verb):
        def call(*arguments):
            if self.ended:
                raise dist.DistNetworkError("connection reset by peer")
            if self.stopped.is_set():
                self.released.wait(30)
            return getattr(self.store, verb)(*arguments)

        return call


@pytest.fixture
def store():
    stoppable = Stoppable()
    yield stoppable
    stoppable.released.set()


class Lanes(Communicator):
    """A communicator without messages, which notes that it was ended."""

    def __init__(self, seconds=0.0):
        self.seconds, self.reasons = seconds, []

    def abort(self, reason):
        self.reasons.append(reason)
        time.sleep(self.seconds)


def failed(runtime, error=PipelineError):
    """The text of a failed step, and the seconds it took to fail."""
    began = time.monotonic()
    with pytest.raises(error) as found:
        runtime.step()
    return str(found.value), time.monotonic() - began


# What is said


def test_the_first_line_is_the_cause():
    text, _ = failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(ValueError("bad\nsample")))}, None))
    assert text.splitlines()[0] == "stage 0, microbatch 1: ValueError: bad sample"
    assert text.splitlines()[1] == "  at position 0, step 3 of 6: 0F1"


def test_a_failure_that_came_through_the_lanes_keeps_its_cause_first():
    lanes = Lanes()
    failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(ValueError("bad sample")))}, lanes))
    (reason,) = lanes.reasons
    wrapped = ConnectionError(f"rank 3 ended lane 3>2: lane 3>2 was aborted on rank 3: {reason}")
    lanes = Lanes()
    text, _ = failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(wrapped, at=2))}, lanes))
    assert text.splitlines()[0] == "stage 0, microbatch 1: ValueError: bad sample"
    assert text.splitlines()[1].startswith(
        "  stage 0, microbatch 2 stopped at position 0, step 5 of 6: 0F2: Connection"
    )
    assert "was aborted on rank 3" in text.splitlines()[1]
    assert lanes.reasons == [reason], "the next rank hears of the same cause"


class UnspeakableError(Exception):
    def __str__(self):
        raise ZeroDivisionError


def test_an_error_without_a_text_does_not_hide_the_step():
    text, _ = failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(UnspeakableError()))}, None))
    assert "microbatch 1: UnspeakableError: (its text is not known: str() of it raised ZeroDivisionError)" in text


# One step at a time


def test_a_step_inside_a_step_is_an_error():
    stages = {}
    runtime = PipelineRuntime(PLAN, stages | {0: Scale(PLAN, 0, lambda microbatch: runtime.step())}, None)
    text, _ = failed(runtime)
    assert "PipelineError: step() or eval() inside a step, at position 0, step 1" in text


def test_a_step_beside_a_step_is_an_error_and_harms_nothing():
    inside, go_on = threading.Event(), threading.Event()

    def first(microbatch):
        inside.set()
        go_on.wait(20)

    stage = Scale(PLAN, 0, first)
    runtime = PipelineRuntime(PLAN, {0: stage}, None)
    thread = threading.Thread(target=runtime.step)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(PipelineError, match="inside a step, at position 0, step 1 of 6: 0F0"):
        runtime.eval()
    go_on.set()
    thread.join()
    assert stage.weight.grad.item() == 12  # the sum of two elements that are 1, 2, 3
    runtime.step()
    assert stage.weight.grad.item() == 24


# Before an update


def test_a_runtime_that_failed_fails_its_check():
    runtime = PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(ValueError("bad sample")))}, None)
    runtime.check()
    failed(runtime)
    with pytest.raises(PipelineError, match="failed before: stage 0, microbatch 1: ValueError: bad sample"):
        runtime.check()


def test_the_failure_of_another_rank_between_steps_fails_the_check(store):
    monitor = Monitor(store, rank=0, ranks=[0], interval=0.02)
    runtime = PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, Lanes(), monitor=monitor)
    runtime.step()
    runtime.check()
    store.compare_set("failure", "", '[7, "rank 7: it is out of memory", false]')
    with pytest.raises(JobFailedError, match=r"rank 7: it is out of memory\. Rebuild"):
        for _ in range(200):
            runtime.check()
            time.sleep(0.02)
    monitor.close()


# A store that does not answer


def watched(store, first, **settings):
    monitor = Monitor(store, rank=0, ranks=[0], **{"interval": 0.05, "deadline": 1.0, **settings})
    lanes = Lanes()
    return PipelineRuntime(PLAN, {0: Scale(PLAN, 0, first)}, lanes, monitor=monitor), lanes, monitor


@pytest.mark.parametrize("how", ["stopped", "ended"])
def test_a_store_that_is_gone_in_a_step_delays_no_error_and_no_abort(store, how):
    def first(microbatch):
        if microbatch == 1:
            store.ended = how == "ended"
            store.stopped.set()
            raise ValueError("bad sample")

    runtime, lanes, monitor = watched(store, first)
    text, seconds = failed(runtime)
    monitor.close()
    assert text.startswith("rank 0, stage 0, microbatch 1: ValueError: bad sample\n")
    assert "The ranks were at:\n  not known: the control store does not answer" in text
    assert len(lanes.reasons) == 1
    assert seconds < 2.0


@pytest.mark.parametrize("how", ["stopped", "ended"])
def test_a_store_that_is_gone_before_a_step_is_a_typed_error(store, how):
    runtime, lanes, monitor = watched(store, lambda microbatch: None)
    runtime.step()
    store.ended = how == "ended"
    store.stopped.set()
    text, seconds = failed(runtime, JobFailedError)
    ended = time.monotonic() + 10.0
    while not lanes.reasons and time.monotonic() < ended:  # the monitor's thread may end lanes after the step
        time.sleep(0.01)
    monitor.close()
    # By the step, or by the monitor's thread, which looks whether it was announced.
    when, _, rest = text.partition(
        "the control store does not answer: it is out of reach, or its process has stopped or ended ("
    )
    assert when in ("before step 2, ", "rank 0 failed before this step: ")
    assert rest
    assert len(lanes.reasons) >= 1
    assert seconds < 1.0 + 2.0


def test_the_deadline_holds_while_the_store_is_silent(store):
    over = threading.Event()
    runtime, lanes, monitor = watched(store, lambda microbatch: None, deadline=0.5)
    lanes.abort = lambda reason: (lanes.reasons.append(reason), over.set())
    runtime.step()
    store.stopped.set()
    began = time.monotonic()
    monitor.look(began)  # a look that gets no answer ends as well
    assert time.monotonic() - began < 1.0
    over.clear()
    store.stopped.clear()
    store.released.set()

    def stop_then_wait(microbatch):
        if microbatch == 1:
            monitor.announce()
            monitor._calls.wait(monitor._announcement, seconds=20)  # the store is silent only then
            store.released.clear()
            store.stopped.set()
            over.wait(20)

    runtime._bound.runners[0][0].stage.before = stop_then_wait
    began = time.monotonic()
    runtime.step()  # its lanes were ended, which this stage does not notice
    assert time.monotonic() - began < 0.5 + 1.5
    assert "has been at position 0, step 3 of 6: 0F1" in lanes.reasons[-1]
    with pytest.raises(JobFailedError, match="the deadline is 0.5 s"):
        runtime.check()
    monitor.close()


def test_a_peer_that_takes_no_note_delays_the_error_by_less_than_a_second():
    lanes = Lanes(seconds=30.0)
    _, seconds = failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0, raising(ValueError("bad sample")))}, lanes))
    assert seconds < 1.0


def test_the_first_step_of_a_plan_has_a_deadline_of_its_own(store):
    monitor = Monitor(store, rank=0, ranks=[0], deadline=0.2, first_deadline=30.0, interval=0.05)
    slow = Scale(PLAN, 0, lambda microbatch: time.sleep(0.5 if microbatch == 0 else 0.0))
    runtime = PipelineRuntime(PLAN, {0: slow}, Lanes(), monitor=monitor)
    runtime.step()
    runtime.check()
    runtime.step()
    with pytest.raises(JobFailedError, match=r"has been at position 0, step 1 of 6: 0F0 .* the deadline is 0\.2 s"):
        runtime.check()
    monitor.close()


def test_a_rank_that_does_not_come_to_the_first_step_is_named_at_its_deadline(store):
    monitor = Monitor(store, rank=0, ranks=[0, 1], deadline=30.0, first_deadline=0.3)
    _, seconds = failed(PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, Lanes(), monitor=monitor), DisagreementError)
    monitor.close()
    assert seconds < 1.0


# Collectives beside the plan


class Collective:
    """Ends when told."""

    def __init__(self):
        self.over = threading.Event()

    def wait(self, timeout=timedelta(0)):
        if not self.over.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self):
        return self.over.is_set()


def test_a_collective_that_ends_is_waited_for(store):
    monitor = Monitor(store, rank=0, ranks=[0])
    work = Collective()
    threading.Timer(0.2, work.over.set).start()
    monitor.wait(work, "all-reduce of gradients")
    assert work.is_completed()
    monitor.close()


def test_a_collective_ends_at_the_deadline_and_with_the_failure_of_another_rank(store):
    monitor = Monitor(store, rank=0, ranks=[0], deadline=0.3, interval=0.05)
    PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, Lanes(), monitor=monitor).step()
    with pytest.raises(JobFailedError, match=r"rank 0 has been at all-reduce of gradients for 0\.3\d* s"):
        monitor.wait(Collective(), "all-reduce of gradients")
    monitor.close()
    other = Monitor(dist.PrefixStore("other", store.store), rank=0, ranks=[0], deadline=30.0, interval=0.05)
    PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, Lanes(), monitor=other).step()
    store.store.compare_set("other/failure", "", '[3, "rank 3: boom", false]')
    began = time.monotonic()
    with pytest.raises(JobFailedError, match="rank 3: boom"):
        other.wait(Collective(), "all-reduce of gradients")
    assert time.monotonic() - began < 2.0
    other.close()


@pytest.mark.ranks(2)
def test_a_real_reduction_ends_when_a_rank_of_it_has_failed(ranks):
    from pipegrid.topology import control_store

    monitor = Monitor(control_store("reduction"), rank=ranks.rank, ranks=[0, 1], deadline=30.0, interval=0.05)
    runtime = PipelineRuntime(lower(gpipe(1, 2)), {0: Scale(PLAN, 0)}, None, monitor=monitor)
    runtime.step()
    total = torch.ones(4)
    monitor.wait(dist.all_reduce(total, async_op=True), "the first")
    assert total.tolist() == [2.0] * 4
    ranks.barrier()
    if ranks.rank == 1:
        monitor.failed("rank 1: ZeroDivisionError: boom")
    else:
        began = time.monotonic()
        with pytest.raises(JobFailedError, match="rank 1: ZeroDivisionError: boom"):
            monitor.wait(dist.all_reduce(total, async_op=True), "the second")
        assert time.monotonic() - began < 2.0
    ranks.barrier()
    if ranks.rank == 1:
        dist.all_reduce(total)  # so that the other's ends, too
    monitor.close()


@pytest.mark.ranks(2)
def test_a_failure_that_one_rank_alone_met_is_not_the_cause_of_the_next(ranks):
    """Rank 0 leaves before its step, so rank 1 alone records a failure; then rank 0 is the first to fail."""
    plan = lower(gpipe(2, 2))
    for leaves, cause in (True, "rank 0 leaves"), (False, "boom on rank 0"):
        communicator = P2PCommunicator(config=P2PConfig(pipeline_dtype=torch.float64, deadline=30.0))
        stage = Scale(plan, 0, raising(ValueError(cause))) if ranks.rank == 0 else Scale(plan, 1)
        if leaves and ranks.rank == 0:
            communicator.abort(cause)
        else:
            text, _ = failed(PipelineRuntime(plan, {ranks.rank: stage}, communicator))
            assert cause in text.splitlines()[0]
            assert leaves or "leaves" not in text
        communicator.close()
        ranks.barrier()


# Collectives beside the plan, on a device


def device_work(*, ended, error=None):
    """As NCCL has it: a failed one counts as completed; a wait orders a stream, and takes no timeout."""
    return SimpleNamespace(is_completed=lambda: ended, wait=lambda: None, exception=lambda: error)


def test_a_reduction_that_failed_on_the_device_fails_the_check():
    runtime = PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, None)
    device_collectives.add("a reduction of gradients", device_work(ended=True), None)
    runtime.check()
    device_collectives.add(
        "a reduction of gradients", device_work(ended=True, error=ValueError("connection lost")), None
    )
    for _ in range(2):
        with pytest.raises(PipelineError, match="a reduction of gradients failed: .*connection lost"):
            runtime.check()


def test_a_completion_that_fails_after_a_step_fails_the_check():
    """The last of a step has no later wait that would ask for its error."""

    class Bridge(Lanes):
        waits = CollectiveWaits("images>language", 0, torch.device("cpu"), 1.0, "the copies of {} did not come")

        def check(self):
            self.waits.check()

    bridge = Bridge()
    runtime = PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, bridge)
    runtime.step()
    bridge.waits.pending.add([0, 1], device_work(ended=True), None)
    runtime.check()
    bridge.waits.pending.add([0, 1], device_work(ended=True, error=RuntimeError("connection lost")), None)
    for _ in range(2):
        with pytest.raises(PipelineError, match="CollectiveFailedError: .*connection lost"):
            runtime.check()


def test_a_monitor_without_the_device_holds_the_host_without_a_timeout_of_nccls(store, monkeypatch):
    monkeypatch.setattr(streams, "types", {"cpu"})
    monitor = Monitor(store, rank=0, ranks=[0], deadline=0.3, interval=0.05)
    PipelineRuntime(PLAN, {0: Scale(PLAN, 0)}, Lanes(), monitor=monitor).step()
    waiting = Waiting(monitor=monitor)
    waiting.wait(device_work(ended=True), torch.zeros(1), None)
    with pytest.raises(JobFailedError, match="rank 0 has been at a reduction of gradients"):
        waiting.wait(device_work(ended=False), torch.zeros(1), None)
    monitor.close()
