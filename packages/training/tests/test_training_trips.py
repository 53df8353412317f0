"""What a step of a `Pipeline` costs beside its computes, in counts: headers, store calls, collectives, Python calls."""

import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import (
    DisagreementError,
    Forwarded,
    JobFailedError,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    lower,
    one_f_one_b,
)
from pipegrid.topology import HyperCommGrid
from pipegrid.topology.bounded_calls import BoundedCalls
from pipegrid.training import Names, Pipeline
from pipegrid.transport import CollectiveFailedError, Edge, P2PCommunicator, P2PConfig
from pipegrid.transport.collectives.small_all_gather import SmallAllGather
from stages_kit.models import llama

WIDTH = 8


class Model(nn.Module):
    """Layers, and the mean square of each row."""

    def __init__(self, ranks=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(ranks))

    def forward(self, x, y):
        h = x
        for layer in self.layers:
            h = layer(h)
        return (h - y).square().mean(dim=-1)


def pipeline(ranks, model=Model, **given):
    given = {"num_microbatches": 4, "monitor": False, "loss": lambda squares, _: squares.mean()} | given
    grid = HyperCommGrid([ranks.world_size], ["pp"])
    layout = "|".join("t" * ranks.world_size)
    return Pipeline(lambda: model(ranks.world_size), layout, grid, names=Names("layers"), **given)


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.flip(0)}


def headers(job):
    """Sent and received by this rank."""
    return sum(lane.stats.headers for lane in job.communicator.lanes.values())


def one_process(job, ranks, each):
    """The mean loss of a batch, with the parameters of all ranks."""
    whole = Model(ranks.world_size)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
    for name, parameter in job.named_parameters():
        parameter.data.copy_(dict(whole.named_parameters())[name])
    return whole(**each).mean()


@pytest.mark.ranks(2)
def test_only_the_first_step_of_a_signature_has_headers(ranks):
    """Whole and ragged batches by turns (7 rows are cut into 2, 2, 2 and 1), an evaluation of another shape."""
    with pipeline(ranks) as job:
        learned = {}
        for turn, (rows, evaluates) in enumerate([(8, 0), (7, 0), (6, 1)] * 3 + [(8, 1)]):
            each, before = batch(rows, seed=turn), headers(job)
            expected = one_process(job, ranks, each)
            found = job.evaluate(each) if evaluates else job.step(each)
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0.0)
            sent = headers(job) - before
            assert sent == (0 if (rows, evaluates) in learned else 4 if evaluates else 8)
            learned[rows, evaluates] = True


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{"strict": True}, {"communicators": "shared"}], ids=["strict", "shared"])
def test_so_in_strict_mode_and_on_shared_communicators(ranks, settings):
    with pipeline(ranks, config=PipelineConfig(variable_seq_lengths=True, **settings)) as job:
        for turn, rows in enumerate([8, 7, 8, 7]):
            before, each = headers(job), batch(rows, seed=turn)
            expected = one_process(job, ranks, each)
            torch.testing.assert_close(job.step(each), expected.detach(), rtol=1e-12, atol=0.0)
            assert (headers(job) == before) == (turn > 1)


@pytest.mark.ranks(2)
def test_with_headers_asked_for_every_message_has_one(ranks):
    with pipeline(ranks, config=PipelineConfig(variable_seq_lengths=True, shapes="header")) as job:
        for turn in range(3):
            job.step(batch(8))
            assert headers(job) == 8 * (turn + 1)


@pytest.mark.ranks(2)
def test_ranks_that_are_given_other_parts_of_the_batch_announce_every_message(ranks):
    """The first stage needs no labels; those that it has here are of another dtype."""
    with pipeline(ranks) as job:
        for turn in range(3):
            each = batch(8, seed=turn)
            expected = one_process(job, ranks, each)
            found = job.step(each if ranks.rank else dict(each, y=each["y"].float()))
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0.0)
            assert headers(job) == 8 * (turn + 1)


@pytest.mark.ranks(2)
def test_ranks_whose_batches_were_alike_and_are_no_more_are_told_so(ranks):
    with pipeline(ranks) as job:
        for _ in range(2):
            job.step(batch(8))
        with pytest.raises((DisagreementError, PipelineError), match="has other shapes than that of rank"):
            job.step(batch(8 if ranks.rank else 12))


class Widening(nn.Linear):
    """Gives as many columns more as its input's first value says."""

    def forward(self, x):
        h = super().forward(x)
        return torch.cat([h, h[:, : int(x[0, 0])]], dim=1)


class Narrowing(nn.Linear):
    """Takes the first columns."""

    def forward(self, x):
        return super().forward(x[:, :WIDTH])


class Varying(Model):
    """Passes on messages whose shape depends on the values of the batch."""

    def __init__(self, ranks=2):
        super().__init__(ranks)
        form = {"bias": False, "dtype": torch.float64}
        self.layers = nn.ModuleList([Widening(WIDTH, WIDTH, **form), Narrowing(WIDTH, WIDTH, **form)])


@pytest.mark.ranks(2)
def test_a_message_of_another_shape_for_a_signature_that_is_known_is_not_sent(ranks):
    each = batch(8)
    with pipeline(ranks, Varying) as job:
        for columns in (1, 1):
            each["x"][:, 0] = columns
            job.step(each)
        each["x"][:, 0] = 2
        with pytest.raises(PipelineError, match=r'P2PMismatchError: message 8 .* a batch of the same shapes.*"header"'):
            job.step(each)


@pytest.mark.ranks(2)
def test_which_needs_headers(ranks):
    each = batch(8)
    with pipeline(ranks, Varying, config=PipelineConfig(variable_seq_lengths=True, shapes="header")) as job:
        for columns in (1, 2, 0, 3):
            each["x"][:, 0] = columns
            job.step(each)


COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "barrier"),
    *("reduce", "reduce_scatter_tensor", "reduce_scatter_single"),
)
OF_GROUPS = ("alltoall_base", "broadcast")  # which torch's own functions of these names call as well


@pytest.fixture
def started(monkeypatch):
    """The collectives that this rank has started, by name and in order."""
    found = []

    def note(name, function):
        def call(*arguments, **named):
            found.append(name)
            return function(*arguments, **named)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, note(name, getattr(dist, name)))
    monkeypatch.setattr(SmallAllGather, "send", note("all-gather", SmallAllGather.send))
    for name in OF_GROUPS:
        monkeypatch.setattr(dist.ProcessGroup, name, note(name, getattr(dist.ProcessGroup, name)))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("monitored", [False, True])
def test_a_call_has_one_collective_and_its_thread_no_call_of_a_store(ranks, monkeypatch, started, monitored):
    """In which ranks meet and losses come back; in that of a clip, its norm."""
    here, bounded, asked = threading.get_ident(), BoundedCalls.run, []

    def waits(calls, *arguments, **named):  # a thread that asks a store waits in it
        if threading.get_ident() == here:
            asked.append(arguments)
        return bounded(calls, *arguments, **named)

    monkeypatch.setattr(BoundedCalls, "run", waits)
    with pipeline(ranks, monitor=monitored) as job:
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        for _ in range(2):
            for run in (job.step, job.evaluate):
                run(batch(8))  # compares replicas, plans and the first update, and learns the shapes
            optimizer.step()
        assert asked
        for run, rows in ((job.step, 8), (job.evaluate, 8), (job.step, 8), (job.step, 10), (job.step, 7)):
            asked.clear()
            started.clear()
            run(batch(rows, seed=1))  # also where its messages are announced, as those of other shapes are
            assert (started, asked) == (["all-gather"], [])
        started.clear()
        job.clip(1.0)
        assert started == ["all-gather"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("monitored", [False, True])
def test_a_loss_that_fails_in_an_evaluation_is_an_error_on_the_ranks_that_only_wait_for_it(ranks, monitored):
    """They were told that microbatches differ in what their mean is over."""
    left = []

    def loss(squares, _):
        if left and not left.pop():
            raise ValueError("no loss")
        return squares.sum(), squares.shape[0]

    with pipeline(ranks, loss=loss, monitor=monitored) as job:
        for _ in range(8):
            job.step(batch(8))
            torch.optim.SGD(job.parameters(), lr=0.1).step()
        left += [False, True, True, True]  # the last one of four fails: nothing waits for this rank but the mean loss
        with pytest.raises((PipelineError, JobFailedError)) as raised:
            job.evaluate(batch(8))
    known = "ValueError: no loss" if ranks.rank == 1 else "no loss|another rank of the job has failed in evaluate"
    assert re.search(known, str(raised.value))


@pytest.mark.ranks(2, deadline=60)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_loss_that_fails_on_one_replica_ends_the_wait_of_the_others_for_the_mean(ranks, call):
    """They have met in the counts of the call, which came first. Far before the deadline, which is 300 s."""
    fails = []

    def loss(squares, _):
        if fails and fails.pop(0) and ranks.rank == 1:
            raise ValueError("no loss")
        return squares.sum(), squares.shape[0]

    grid = HyperCommGrid([2], ["dp"])
    job = Pipeline(lambda: Model(2), "tt", grid, names=Names("layers"), monitor=False, loss=loss, num_microbatches=2)
    for _ in range(6):
        job.step(batch(4, seed=ranks.rank))
        torch.optim.SGD(job.parameters(), lr=0.1).step()
    fails += [False, True]  # of its last microbatch: the counts have come
    with pytest.raises((PipelineError, JobFailedError, CollectiveFailedError)) as raised:
        getattr(job, call)(batch(4, seed=ranks.rank))
    known = "ValueError: no loss" if ranks.rank == 1 else rf"another rank .* has failed in {call}\(\)|closed its conn"
    assert re.search(known, str(raised.value))
    ranks.barrier()  # until then no process ends a connection by its end
    job.close()


@pytest.mark.ranks(2)
def test_tokens_come_back_by_a_broadcast_each(ranks, started, monkeypatch):
    """Who has the last stage is found out beside the passes: no token waits for it but the first of the first call."""

    def waited(gather):
        started.append("its end")
        return end(gather)

    end = SmallAllGather.end
    monkeypatch.setattr(SmallAllGather, "end", waited)
    grid = HyperCommGrid([2], ["pp"])
    with Pipeline(llama(), "Et*2|t*2L", grid, monitor=False) as job:
        prompt = {"input_ids": torch.arange(1, 9).reshape(2, 4)}
        job.generate(prompt, 2)
        assert started == ["all-gather", "its end", *["broadcast"] * 2]
        started.clear()
        found = job.generate(prompt, 3)
        assert started == ["all-gather", *["broadcast"] * 3, "its end"]
        assert (found is None) == (ranks.rank == 0) or found.shape == (2, 3)


@pytest.mark.ranks(2)
def test_replicas_add_up_counts_losses_and_gradients_in_a_collective_each(ranks, started):
    grid = HyperCommGrid([2], ["dp"])
    torch.manual_seed(0)
    with Pipeline(Model, "tt", grid, names=Names("layers"), monitor=False, loss=lambda s, _: s.mean()) as job:
        for _ in range(3):
            started.clear()
            job.step(batch(4, seed=ranks.rank))
            torch.optim.SGD(job.parameters(), lr=0.1).step()
        assert started == ["all-gather", "all-gather", "all_reduce"]


@pytest.mark.ranks(2)
def test_losses_start_back_behind_the_last_forward_of_a_rank(ranks, started):
    with pipeline(ranks) as job:
        (stage,) = job.stages["model"]
        stage.register_forward_pre_hook(lambda *_: started.append("F"))
        next(stage.parameters()).register_post_accumulate_grad_hook(lambda _: started.append("B"))
        for _ in range(2):
            started.clear()
            job.step(batch(8))
            torch.optim.SGD(job.parameters(), lr=0.1).step()
        started.clear()
        job.step(batch(8))
    steady = "F F B F B F all-gather B B" if ranks.rank == 0 else "F B F B F B F all-gather B"
    assert " ".join(started) == steady


class BareStage:
    """A layer of `Model`, as `PipelineRuntime` takes stages."""

    def __init__(self, number, x, microbatches):
        self.number, self.layer = number, nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.parts = x.chunk(microbatches)

    def forward(self, microbatch, inputs):
        if not self.number:
            return Forwarded({Edge(0, 1): self.layer(self.parts[microbatch])})
        output = self.layer(next(iter(inputs.values())))
        return Forwarded({}, (output - self.parts[microbatch]).square().mean() / len(self.parts))


def calls(step):
    """How many Python functions a step enters on this thread, once it has run a few times."""
    for _ in range(4):
        step()
    entered, before = [], sys.getprofile()
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
    try:
        step()
    finally:
        sys.setprofile(before)
    return len(entered)


@pytest.mark.ranks(2)
def test_a_microbatch_more_has_hardly_more_python_calls_than_in_the_runtime(ranks):
    """On the last stage; what is the same for all microbatches of a step is not found out in each."""
    few, most, added = 4, 16, []
    for number in (few, most):
        x = batch(2 * number)["x"]
        plan = lower(one_f_one_b(2, number))
        stages = {ranks.rank: BareStage(ranks.rank, x, number)}
        with P2PCommunicator(None, P2PConfig(pipeline_dtype=torch.float64)) as communicator:
            runtime = calls(PipelineRuntime(plan, stages, communicator).step)
        with pipeline(ranks, num_microbatches=number) as job:
            added.append((runtime, calls(lambda job=job, x=x: job.step({"x": x, "y": x}))))
    bare, door = ((last - first) / (most - few) for first, last in zip(*added, strict=True))
    if ranks.rank == 1:
        assert bare > 40
        assert door < 1.65 * bare, (door, bare)  # 1.3 of the stages in trips.py, which do more than these
