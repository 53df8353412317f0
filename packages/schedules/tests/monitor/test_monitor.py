"""Where every rank stands, whose failure came first, and whether all run the same step: told beside the pipeline."""

import gc
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from pipegrid.gradients.all_reduce import all_reduce, reduce_few
from pipegrid.monitor import Control
from pipegrid.monitor.collectives import Waiting
from pipegrid.monitor.control import Failure
from pipegrid.monitor.device_progress import DeviceProgress
from pipegrid.schedules import (
    Action,
    ActionKind,
    DisagreementError,
    JobFailedError,
    Monitor,
    PipelineError,
    PipelineRuntime,
    StepArgumentError,
    lower,
    one_f_one_b,
)
from pipegrid.topology import control_store
from pipegrid.transport.collectives.starting import start
from pipegrid.transport.collectives.waiting import device_collectives, host_collectives
from pipegrid.transport.errors import CollectiveFailedError

from ..kit.stages import Scale, raising
from ..kit.threads import MemoryCommunicator, Network, in_threads


def run(stage, store, before=lambda microbatch: None, *, network, microbatches=4, steps=1, monitors=None, **settings):
    """One position of a chain of two, watched; the text of its error, or None."""
    plan = lower(one_f_one_b(2, microbatches))
    monitor = Monitor(store, rank=stage, ranks=range(2), **{"interval": 0.02, **settings})
    if monitors is not None:
        monitors.append(monitor)
    communicator = Breakable(network, 2, stage)
    runtime = PipelineRuntime(plan, {stage: Scale(plan, stage, before)}, communicator, monitor=monitor)
    try:
        for _ in range(steps):
            runtime.step()
    except (PipelineError, DisagreementError, JobFailedError) as error:
        return str(error)
    finally:
        monitor.close()
    return None


class Breakable(MemoryCommunicator):
    """Lanes of this process that `abort` ends on this side, as real ones do."""

    def abort(self, reason):
        self.network.end(RuntimeError(f"the lane was ended: {reason}"))


class TestMonitor:
    def test_before_its_first_action_a_rank_has_said_where_it_stands(self, store):
        monitor = Monitor(store, rank=0, ranks=[0], interval=600.0)
        monitor.begin(one_f_one_b(1, 1), where=lambda: "position 0, step 1", abort=pytest.fail)
        said = Control(store, 0, (0,)).positions(seconds=0.01)
        monitor.close()
        assert said[0].startswith("position 0, step 1 (last heard")

    def test_the_place_of_a_step_that_fails_during_a_look_is_where_it_failed(self, store):
        monitor = Monitor(store, rank=0, ranks=[0], interval=600.0)
        failing = []

        def where():
            # A look has read a place; the step leaves it, and fails, before the look has written it.
            if failing == [threading.current_thread()]:
                failing.clear()
                monitor.failed("rank 0: ValueError: bad sample")
                return "step 1: 0F0"
            return "step 2: 0F1"

        monitor.begin(one_f_one_b(1, 2), where=where, abort=lambda text: None)
        failing.append(threading.current_thread())
        monitor.look(0.0)
        monitor.close()
        assert Control(store, 0, (0,)).positions(seconds=0.01) == {0: "step 2: 0F1"}

    @pytest.mark.parametrize("value", ["garbage", "[1]", "5", "[", '{"rank": 0}'], ids=range(5))
    def test_a_value_of_the_store_that_no_rank_wrote_ends_the_step_and_not_the_watch_in_silence(self, store, value):
        monitor = Monitor(store, rank=0, ranks=[0], interval=0.01)
        ended, texts = threading.Event(), []
        monitor.begin(one_f_one_b(1, 1), where=lambda: "0F0", abort=lambda text: (texts.append(text), ended.set()))
        store.set("failure", value)
        assert ended.wait(20)
        with pytest.raises(JobFailedError, match="rank 0: the monitor's thread has failed: [A-Za-z]+Error: "):
            monitor.check()
        monitor.close()
        assert texts[0].startswith("rank 0: the monitor's thread has failed: ")

    def test_a_step_without_a_fault_goes_through(self, store):
        network = Network()
        assert in_threads([lambda s=s: run(s, store, network=network, steps=3) for s in range(2)]) == [None, None]

    def test_a_failure_is_told_with_every_ranks_place(self, store):
        network = Network()
        own, other = in_threads(
            [
                lambda: run(0, store, raising(ValueError("bad sample"), 3), network=network),
                lambda: run(1, store, network=network),
            ]
        )
        for text in (own, other):
            assert text.startswith("rank 0, stage 0, microbatch 3: ValueError: bad sample\n  ")
            assert "\nThe ranks were at:\n  rank 0: position 0, step" in text
            assert "\n  rank 1: position 1, step" in text
        assert re.search(r"\n  at position 0, step 9 of 13: 0F3\n", own)
        assert re.search(r"\n  rank 1, stage 1, microbatch \d stopped at position 1, step", other)

    def test_a_rank_that_stands_too_long_is_named_on_all(self, store):
        network = Network()
        noticed = threading.Event()

        def impatient():
            try:
                return run(1, store, network=network, deadline=0.3, first_deadline=0.3)
            finally:
                noticed.set()

        texts = in_threads(
            [
                lambda: run(0, store, lambda microbatch: microbatch == 2 and noticed.wait(60), network=network),
                impatient,
            ]
        )
        for text in texts:
            assert text.startswith("rank 1 has been at position 1, step")
            assert "the deadline is 0.3 s" in text

    def test_different_numbers_of_microbatches_are_seen_before_anything_is_sent(self, store):
        network = Network()
        texts = in_threads([lambda s=s: run(s, store, network=network, microbatches=4 + s) for s in range(2)])
        for text in texts:
            assert "rank 0: 4 microbatches, plan " in text
            assert "rank 1: 5 microbatches, plan " in text
        assert network.messages == 0

    def test_a_change_on_one_rank_alone_stops_both(self, store):
        network = Network()

        def changing(stage):
            plans = [lower(one_f_one_b(2, 4)), lower(one_f_one_b(2, 4 + stage))]
            monitor = Monitor(store, rank=stage, ranks=range(2), interval=0.02)
            communicator = Breakable(network, 2, stage)
            try:
                for plan in plans:
                    PipelineRuntime(plan, {stage: Scale(plan, stage)}, communicator, monitor=monitor).step()
            except (PipelineError, DisagreementError) as error:
                return str(error)
            finally:
                monitor.close()

        for text in in_threads([lambda s=s: changing(s) for s in range(2)]):
            assert "do not run the same step 2: rank 0: 4 microbatches" in text

    def test_a_failure_is_told_although_the_store_is_busy_when_it_comes(self, store, monkeypatch):
        """A call of the thread holds up the record for longer than the record waits."""
        monkeypatch.setattr("pipegrid.monitor.monitor._BRIEF_SECONDS", 2.0)  # the second time as well
        control, held, asked = Control(store, 1, range(2)), threading.Event(), threading.Event()

        class Busy:
            def __getattr__(self, name):
                return getattr(store, name)

            def set(self, key, value):
                if value.startswith('["held up"'):
                    asked.set()
                    held.wait(20)
                store.set(key, value)

        monitor, place = Monitor(Busy(), rank=0, ranks=[0], interval=600.0), ["0F0"]
        monitor.begin(one_f_one_b(1, 1), where=lambda: place[0], abort=lambda _: held.set())
        place[0] = "held up"
        looking = threading.Thread(target=monitor.look, args=(time.monotonic(),))
        looking.start()
        assert asked.wait(20)
        assert monitor.failed("ValueError: bad sample").first.text == "ValueError: bad sample"
        assert control.failure() == Failure(0, "ValueError: bad sample")
        looking.join()
        monitor.close()

    def test_a_rank_has_told_where_it_stays_before_its_transfers_end(self, store):
        """Those that the abort reaches report at once."""
        control, said = Control(store, 0, (0,)), []
        monitor = Monitor(store, rank=0, ranks=[0], interval=600.0)
        monitor.begin(
            one_f_one_b(1, 1), where=lambda: "0F0", abort=lambda _: said.append(control.positions(seconds=0.01))
        )
        monitor.failed("ValueError: bad sample")
        monitor.close()
        assert said == [{0: "0F0"}]

    def test_a_failed_job_runs_no_further_step(self, store):
        network, monitors = Network(), []
        in_threads(
            [
                lambda: run(0, store, raising(ValueError("bad sample"), 0), network=network, monitors=monitors),
                lambda: run(1, store, network=network, monitors=monitors),
            ]
        )
        for monitor in monitors:
            with pytest.raises(JobFailedError, match=r"rank 0 failed before this step.*store of another label"):
                monitor.begin(lower(one_f_one_b(2, 4)), where=str, abort=print)

    def test_a_rank_that_came_after_the_failure_says_so_at_once_after_close(self, store):
        Control(store, 0, range(2)).record("rank 0, stage 0: ValueError: early")
        monitor = Monitor(store, rank=1, ranks=[0, 1])
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(JobFailedError, match="rank 0 failed before this step"):
                monitor.begin(lower(one_f_one_b(2, 4)), where=str, abort=print)
            monitor.close()
        assert time.monotonic() - began < 30  # a call of the closed store waited for its deadline, 60 s

    def test_a_rank_that_is_lost_ends_the_wait_before_a_step_and_the_transfers_of_one(self, store):
        """Noticed in another thread while ranks wait for all of them; or in a step, of which the lanes are ended."""
        waiting, ended = Monitor(store, rank=0, ranks=[0, 1]), []
        threading.Timer(0.2, waiting.lost, (1, "rank 0 lost rank 1")).start()
        began = time.monotonic()
        with pytest.raises(JobFailedError, match="rank 1 failed before this step: rank 0 lost rank 1"):
            waiting.begin(lower(one_f_one_b(2, 4)), where=str, abort=pytest.fail)
        assert time.monotonic() - began < 30  # the first deadline is 60 s
        alone = Monitor(dist.HashStore(), rank=0, ranks=[0])
        alone.begin(lower(one_f_one_b(1, 1)), where=str, abort=ended.append)
        alone.lost(3, "rank 0 lost rank 3")
        alone.lost(4, "rank 0 lost rank 4")
        assert ended == ["rank 0 lost rank 3"]
        with pytest.raises(JobFailedError, match="rank 0 lost rank 3"):
            alone.check()
        for monitor in (waiting, alone):
            monitor.close()

    def test_a_collective_that_ends_just_after_a_slice_of_the_wait_has_not_failed(self, store):
        class JustAfter:
            """gloo's work: the first wait runs out, and the work is complete a moment later."""

            waits = 0

            def wait(self, *_):
                self.waits += 1
                if self.waits == 1:
                    raise RuntimeError("Operation timed out!")

            def is_completed(self):
                return True

        monitor = Monitor(store, rank=0, ranks=[0])
        for waiting in (Waiting(), Waiting(monitor=monitor)):
            work = JustAfter()
            waiting.wait(work, torch.zeros(1), None)
            assert work.waits == 2
        monitor.close()

    def test_the_thread_ends_with_the_monitor(self, store):
        monitor = Monitor(store, rank=0, ranks=[0], interval=0.01)
        monitor.begin(lower(one_f_one_b(1, 1)), where=str, abort=print)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "pipegrid-monitor"]
        del monitor
        thread.join(timeout=10)
        assert not thread.is_alive()

    def test_a_closed_one_watches_nothing(self, store):
        monitor = Monitor(store, rank=0, ranks=[0])
        monitor.close()
        monitor.close()
        with pytest.raises(StepArgumentError, match="was closed"):
            monitor.begin(lower(one_f_one_b(1, 1)), where=str, abort=print)

    def test_one_that_nobody_closed_ends_before_the_interpreter(self, tmp_path):
        script = tmp_path / "leaves_it_open.py"
        script.write_text(
            "import torch.distributed as dist\n"
            "from pipegrid.schedules import Monitor, lower, one_f_one_b\n"
            "monitor = Monitor(dist.HashStore(), rank=0, ranks=[0], interval=0.001)\n"
            "monitor.begin(lower(one_f_one_b(1, 1)), where=str, abort=print)\n"
        )
        assert subprocess.run([sys.executable, script], timeout=120, check=False).returncode == 0

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"deadline": 0.0}, r"deadline is 0\.0; it must be a finite number above 0"),
            ({"interval": -1.0}, r"interval is -1\.0; it must be a finite number above 0"),
            ({"rank": 5}, r"rank 5 is not among the ranks \[0, 1\]"),
        ],
    )
    def test_what_it_cannot_watch_is_refused(self, store, settings, text):
        with pytest.raises(StepArgumentError, match=text):
            Monitor(store, **{"rank": 0, "ranks": [0, 1], **settings})


def test_marks_tell_the_first_action_that_a_device_has_not_finished():
    points = []

    def mark():
        points.append(Mock())
        points[-1].query.return_value = False
        return points[-1]

    marks = DeviceProgress(mark)
    actions = [Action(ActionKind.F, 0, microbatch) for microbatch in range(3)]
    assert marks.oldest() is None
    for action in actions:
        marks.before(action)
        marks.after(action)
    assert marks.oldest() == actions[0]
    points[0].query.return_value = points[1].query.return_value = True
    assert marks.oldest() == actions[2]
    points[2].query.return_value = True
    assert marks.oldest() is None


@pytest.mark.ranks(3, backend="gloo")
class TestARankThatDoesNotCome:
    def test_is_named_and_what_waited_for_it_ends(self, ranks):
        group = dist.new_group([0, 1, 2], timeout=timedelta(minutes=10))
        dist.all_reduce(torch.zeros(1), group=group)  # connected
        if ranks.rank == 2:
            ranks.barrier()
            return
        deadline = 3.0 if ranks.rank == 0 else 30.0
        with pytest.raises(CollectiveFailedError) as failed:
            all_reduce(tensor := torch.zeros(8), group)(Waiting(deadline, what="the norm"))
        if ranks.rank == 0:
            assert "the norm did not end within the deadline of 3 s: rank 2 has not joined it" in str(failed.value)
        began = time.monotonic()
        dist.destroy_process_group(group)
        del tensor, group, failed
        gc.collect()  # the group's threads end with the last reference
        assert time.monotonic() - began < 60
        ranks.barrier()

    def test_is_named_to_all_by_a_monitor_before_connections_close(self, ranks):
        group, plan = dist.new_group([0, 1, 2], timeout=timedelta(minutes=10)), lower(one_f_one_b(2, 1))
        deadline = 2.0 if ranks.rank == 0 else 30.0
        monitor = Monitor(control_store("rows"), rank=ranks.rank, ranks=range(3), deadline=deadline, interval=0.02)
        monitor.begin(plan, where=lambda: "a step", abort=device_collectives.abort)
        monitor.end()
        if ranks.rank != 2:
            with pytest.raises(JobFailedError, match="^rank 0 has been at the norm for .*: rank 2 has not joined it"):
                reduce_few(torch.zeros(3, dtype=torch.float64), group)(Waiting(None, monitor, "the norm"))
        ranks.barrier()
        monitor.close()

    def test_waits_for_something_else_by_name(self, ranks):
        group, own = (dist.new_group(each) for each in ([0, 1, 2], [1, 2]))
        if ranks.rank == 1:
            with pytest.raises(CollectiveFailedError):
                all_reduce(torch.zeros(1), own)(Waiting(5.0, what="a save"))
        elif ranks.rank == 0:
            time.sleep(0.5)
            with pytest.raises(
                CollectiveFailedError, match="rank 1 has not joined it, and waits for a save; rank 2 has"
            ):
                all_reduce(torch.zeros(1), group)(Waiting(3.0, what="the norm"))
        ranks.barrier()

    def test_ends_what_a_failed_step_has_begun_but_not_saves(self, ranks):
        group, saves = (dist.new_group([0, 1, 2]) for _ in range(2))
        host_collectives.apart.add(saves)
        if ranks.rank == 0:
            first, second, save = (start(dist.all_reduce, torch.zeros(1), group=each) for each in (group, group, saves))
            device_collectives.abort("a step has failed")
            for work in (first, second):
                with pytest.raises(RuntimeError, match="closure"):
                    work.wait(timedelta(seconds=30))
            ranks.barrier()
            save.wait(timedelta(seconds=60))
        else:
            ranks.barrier()
            dist.all_reduce(torch.zeros(1), group=saves)
