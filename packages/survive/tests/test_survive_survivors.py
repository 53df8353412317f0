"""When a function runs again, with which state and in which world; the other ranks are a script."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch import nn

from pipegrid.monitor import JobFailedError
from pipegrid.monitor.epochs import Epoch, VoteResult
from pipegrid.schedules import LossScaler, PipelineConfig, one_f_one_b
from pipegrid.survive import Living, PipelineJob, PipelineWorld, RankRetiredError, SurviveError, Survivors
from pipegrid.topology import HyperCommGrid


class Epochs:
    """Of a job whose other ranks do as the test says: ``script`` has (done, result) of each attempt."""

    rank, incarnation, ready = 0, 1, True

    def __init__(self, script):
        self.script, self.calls, self.current, self.alarm = list(script), [], Epoch(0, (0, 1)), None
        self.asking = {}

    def join(self):
        self.calls.append("join")
        self.current = self.script.pop(0)[1].epoch

    def done(self, key):
        self.calls.append(f"done {key}")
        if self.script[0][0]:
            self.script.pop(0)
            return True
        return False

    def vote(self, key, why="", *, edge, asking):
        self.calls.append(f"vote {key}{' at an edge' * edge}{f' for {asking}' if asking else ''}")
        self.asking = {}
        result = self.script.pop(0)[1]
        self.current = result.epoch
        return result

    def check(self, where):
        if self.alarm is not None:
            raise RuntimeError(self.alarm)

    def lost(self, rank, why, epoch):
        self.calls.append(f"lost {rank}")

    def give_up(self, error):
        self.calls.append(f"give up {error}")

    def close(self):
        self.calls.append("close")


def test_the_peers_of_the_dead_retire():
    job = PipelineJob(HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"], world_size=8), one_f_one_b(2, 4))
    assert job.retire(frozenset({0})) == (1,)
    assert job.retire(frozenset({0, 1, 7})) == (6,)


def test_a_world_sets_configs_and_scalers_and_puts_them_back():
    """Of a `PipelineConfig`, and of another framework's; a module without one is left alone."""
    scaler, group = LossScaler(), object()
    ours = PipelineConfig(grad_scale_func=scaler, calculate_per_token_loss=True)
    theirs, stages = SimpleNamespace(hidden_size=4), [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    stages[0].config, stages[1].config = ours, theirs
    living = Living(HyperCommGrid([2, 2], ["dp", "pp"], world_size=4), range(4))
    unused = dict.fromkeys(("actor", "routes", "groups", "checkpoints", "job", "home", "times"))
    communicator = SimpleNamespace(close=lambda: None)
    world = PipelineWorld(epoch=1, living=living, job_group=group, communicator=communicator, made=[], **unused)
    world.configure(stages)
    assert stages[0].config == evolve(ours, job_group=group)
    assert vars(stages[1].config) == {"hidden_size": 4, "job_group": group, "tied_parameters": (), "hooks": ()}
    assert scaler.job_group is group
    world.close()
    assert stages[0].config is ours
    assert stages[1].config is theirs
    assert scaler.job_group is None
    assert not hasattr(stages[2], "config")


class World:
    def __init__(self, epoch):
        self.epoch, self.ended = epoch, None

    def abort(self, cause):
        self.ended = cause

    def close(self):
        self.ended = self.ended or "closed"


def dies(number, *, committed=False):
    return False, VoteResult(Epoch(number, (0,)), {1: "killed"}, (), number, committed)


YES = (True, None)
NO_DEATH = (False, VoteResult(Epoch(1, (0, 1)), {}, (), 0))


class Ring:
    """In place of `Neighbours`: the ring of an epoch, whose ``lost`` a test calls."""

    made = ()

    def __init__(self, lost, *, members, name, timeout):
        self.lost, self.members, self.closed = lost, members, False
        Ring.made += (self,)

    def close(self):
        self.closed = True


@pytest.fixture
def survivors(monkeypatch):
    """Makes `Survivors` of rank 0, the worlds that they get, and their events."""
    monkeypatch.setattr("pipegrid.survive.survivors.require_default_group", lambda: (0, 2))
    monkeypatch.setattr("pipegrid.survive.survivors.require_no_watchdog", lambda: None)

    monkeypatch.setattr("pipegrid.survive.survivors.Neighbours", Ring)
    monkeypatch.setattr(Ring, "made", ())

    def make(*script, stage=None, build=World, incarnation=1, **options):
        worlds, events, epochs = [], [], Epochs(script)
        epochs.incarnation = incarnation
        monkeypatch.setattr("pipegrid.survive.survivors.Epochs", lambda store, **_: epochs)

        def built(epoch):
            worlds.append(build(epoch))
            return worlds[-1]

        return (
            Survivors(None, built, modules=stage or nn.Linear(1, 1), on_event=events.append, **options),
            worlds,
            events,
        )

    return make


class TestSurvivors:
    def test_what_cannot_be_done_again_is_found_before_the_first_function(self, survivors):
        stage = nn.Linear(1, 1)
        stage.register_forward_hook(lambda *_: None)
        with pytest.raises(SurviveError, match=r"the stage has a forward hook .*<lambda>"):
            survivors(YES, stage=stage)
        with survivors(YES, stage=stage, allow=[""])[0] as made:
            made.run("a", lambda world: None)

    def test_ranks_that_do_not_retire_with_this_one_are_its_peers(self, survivors, monkeypatch):
        found = []
        monkeypatch.setattr("pipegrid.survive.survivors.require_redoable", lambda *given, **_: found.append(given[1]))
        survivors(YES)
        survivors(YES, retire=lambda dead: [rank ^ 1 for rank in dead])
        assert found == [{0, 1}, {0}]

    def test_a_world_configures_the_modules_before_the_first_function_of_each_epoch(self, survivors):
        class Configuring(World):
            def configure(self, modules):
                modules.config = self.epoch.number

        stage = nn.Linear(1, 1)
        made, _, _ = survivors(dies(1), YES, stage=stage, build=Configuring)
        seen = []
        with made:
            made.run("a", lambda world: seen.append(stage.config))
        assert seen == [0, 1]

    def test_an_undisturbed_function_runs_once(self, survivors):
        made, worlds, events = survivors(YES, YES)
        with made:
            assert made.run("a", lambda world: world.epoch.number) == 0
            assert made.run("b", lambda world: "b") == "b"
        assert made.epochs.calls == ["done a", "done b", "close"]
        assert ([world.ended for world in worlds], events) == (["closed"], [])

    def test_a_function_that_fails_as_a_rank_dies_runs_again_with_the_state_and_a_new_world(self, survivors):
        stage = nn.Linear(1, 1)
        made, worlds, events = survivors(dies(1), YES, stage=stage)
        seen = []

        def function(world):
            seen.append((world.epoch.number, stage.weight.grad))
            stage(torch.ones(1)).sum().backward()
            if world.epoch.number == 0:
                raise RuntimeError("Connection closed by peer")
            return float(stage.weight.grad)

        with made:
            assert made.run("a", function) == 1.0
        assert seen == [(0, None), (1, None)]
        assert worlds[0].ended == "a: RuntimeError: Connection closed by peer"
        assert made.epochs.calls == ["vote a", "done a", "close"]
        assert [str(event).split(", ")[0] for event in events] == ["epoch 1: rank 1 is dead (killed); a is done again"]

    def test_a_function_that_a_rank_has_not_done_runs_again(self, survivors):
        made, worlds, _ = survivors(dies(1), dies(2), YES)
        with made:
            assert made.run("a", lambda world: world.epoch.number) == 2
        assert made.epochs.calls == ["done a", "vote a", "done a", "vote a", "done a", "close"]
        assert len(worlds) == 3

    def test_a_function_that_all_living_ranks_have_done_does_not_run_again(self, survivors):
        made, _, events = survivors(dies(1, committed=True), YES)
        with made:
            assert made.run("a", lambda world: world.epoch.number) == 0
            assert made.run("b", lambda world: world.epoch.number) == 1
        assert [event.result.committed for event in events] == [True]

    def test_an_error_is_raised_where_no_rank_has_died(self, survivors):
        made, worlds, events = survivors(NO_DEATH)

        def function(world):
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"), made:
            made.run("a", function)
        assert made.epochs.calls[0] == "vote a"
        assert made.epochs.calls[1].startswith("give up no rank has died, but a: RuntimeError: out of memory")
        assert (worlds[0].ended, events) == ("a: RuntimeError: out of memory", [])

    def test_an_error_of_the_scripts_own_ends_the_job_without_a_vote(self, survivors):
        made, worlds, _ = survivors(YES)

        def function(world):
            raise ValueError("a label out of range")

        with pytest.raises(ValueError, match="out of range"), made:
            made.run("a", function)
        assert made.epochs.calls == ["give up ValueError: a label out of range", "close"]
        assert worlds[0].ended == "ValueError: a label out of range"

    def test_a_world_that_cannot_be_made_ends_the_job(self, survivors):
        def build(epoch):
            if epoch.number:
                raise JobFailedError("position 1 is dead in all replicas")
            return World(epoch)

        made, _, _ = survivors(dies(1), build=build)
        with pytest.raises(JobFailedError, match="position 1"), made:
            made.run("a", lambda world: None)
        assert made.epochs.calls[:2] == ["done a", "vote a"]

    def test_a_death_while_the_world_is_made_anew_is_a_death_like_any_other(self, survivors):
        tries = []

        def build(epoch):
            tries.append(epoch.number)
            if epoch.number == 1:
                raise RuntimeError("ranks [2] did not come")
            return World(epoch)

        made, _, _ = survivors(dies(1), dies(2), YES, build=build)
        with made:
            assert made.run("a", lambda world: world.epoch.number) == 2
        assert tries == [0, 1, 2]
        assert made.epochs.calls == ["done a", "vote a", "vote a", "done a", "close"]

    def test_a_key_is_used_once(self, survivors):
        made, _, _ = survivors(YES, YES)
        with made, pytest.raises(SurviveError, match="key 'a' was used before"):
            made.run("a", lambda world: None)
            made.run("a", lambda world: None)

    def test_an_alarm_ends_the_world_that_a_function_is_in_and_no_later_one(self, survivors):
        made, worlds, _ = survivors(YES)
        with made:
            made._alarmed("rank 1 is lost")  # of an epoch before
            assert worlds[0].ended is None
            made.epochs.alarm = "rank 1 is lost"
            made._alarmed("rank 1 is lost")
            assert worlds[0].ended == "rank 1 is lost"

    def test_a_rank_whose_peer_has_died_retires_with_exit_code_0(self, survivors):
        made, _, _ = survivors((False, VoteResult(Epoch(1, (2, 3)), {1: "killed"}, (0,), 0)))
        with pytest.raises(RankRetiredError, match="rank 0 retires.*dead ranks \\[1\\]") as caught, made:
            made.run("a", lambda world: None)
        assert caught.value.code == 0
        assert made.epochs.calls == ["done a", "vote a", "close"]

    def test_a_connection_that_ends_is_a_death_once_all_have_done_a_function_in_the_epoch(self, survivors):
        made, _, _ = survivors(YES, dies(1), YES)

        def dead(world):
            if world.epoch.number == 0:
                Ring.made[0].lost(1, "its process has ended")

        with made:
            Ring.made[0].lost(1, "it could not connect with a third rank")
            made.run("a", lambda world: None)
            made.run("b", dead)
            assert [(ring.members, ring.closed) for ring in Ring.made] == [((0, 1), True), ((0,), False)]
        assert made.epochs.calls == ["done a", "lost 1", "done b", "vote b", "done b", "close"]
        assert Ring.made[1].closed


def test_a_function_that_writes_gradients_which_are_not_kept_is_an_error_in_the_first_step(survivors):
    stage = nn.Linear(1, 1)
    made, _, _ = survivors(YES, YES, stage=stage)
    stage.weight.grad = torch.ones(1, 1)

    def clip(world):
        stage.weight.grad.mul_(0.5)

    with made:
        made.run("clip 0", clip)
        with pytest.raises(SurviveError, match="'clip 1' has changed the gradient of a parameter of shape \\(1, 1\\)"):
            made.run("clip 1", clip, keep_gradients=False)
    assert made.epochs.calls == ["done clip 0", "close"]


class Open(World):
    peers = "the peers"


class State:
    """In place of `JobState`: what was handed over; each of ``fails`` is an error in place of that."""

    def __init__(self, step, *fails):
        self.step, self.fails, self.calls = step, list(fails), []

    def hand_over(self, group, joining, step):
        self.calls.append((group, joining, step))
        if self.fails:
            raise self.fails.pop(0)
        return self.step


def comes(number, keys, *, dead=()):
    members = Epoch(number, (0, 1), {0: 1, 1: 2}, (1,))
    return False, VoteResult(members, dict.fromkeys(dead, "killed"), (), keys, joined=(1,))


class TestNewProcesses:
    def test_they_come_in_at_the_beginning_of_a_step_and_get_the_state_first(self, survivors):
        made, worlds, events = survivors(YES, YES, comes(1, 2), YES, YES, YES, build=Open, state={})
        made._state = state = State(1)
        steps = []
        with made:
            for step in made.steps(range(2)):
                made.run(f"step {step}", lambda world: steps.append((world.epoch.number, step)))  # noqa: B023
                made.epochs.asking = {1: 2}  # not in the middle of a step
                made.run(f"norm {step}", lambda world: None)
        assert steps == [(0, 0), (1, 1)]
        assert state.calls == [("the peers", (1,), 1)]
        calls = [
            "done step 0",
            "done norm 0",
            "vote step 1 at an edge for {1: 2}",
            "done the state in epoch 1",
            "done step 1",
        ]
        assert made.epochs.calls == [*calls, "done norm 1", "close"]
        assert [str(event).split(", ")[0] for event in events] == [
            "epoch 1: a new process of rank 1 has come; step 1 is done again"
        ]
        assert [world.ended for world in worlds] == ["step 1 is not done", "closed"]

    def test_without_steps_they_do_not_come_in(self, survivors):
        made, _, _ = survivors(YES, state={})
        with made:
            made.epochs.asking = {1: 2}
            made.run("a", lambda world: None)
        assert made.epochs.calls == ["done a", "close"]

    def test_one_joins_gets_the_state_and_begins_with_the_step_of_the_others(self, survivors):
        made, _, _ = survivors(comes(3, 8), YES, YES, YES, build=Open, state={}, incarnation=2)
        made._state = State(4)
        with made:
            for step in made.steps(range(2, 6)):
                made.run(f"step {step}", lambda world: None)
        assert made.epochs.calls == ["join", "done the state in epoch 3", "done step 4", "done step 5", "close"]

    def test_one_whose_peer_dies_while_it_sends_gets_the_state_from_another(self, survivors):
        again = (False, VoteResult(Epoch(4, (0, 1), {0: 1, 1: 2}, (1,)), {2: "killed"}, (), 8))
        made, worlds, _ = survivors(comes(3, 8), again, YES, YES, build=Open, state={}, incarnation=2)
        made._state = state = State(4, RuntimeError("Connection closed by peer"))
        with made:
            for step in made.steps([4]):
                made.run(f"step {step}", lambda world: None)
        assert made.epochs.calls[:3] == ["join", "vote the state in epoch 3 at an edge", "done the state in epoch 4"]
        assert len(state.calls) == len(worlds) == 2

    def test_a_step_that_the_others_are_at_and_this_one_has_not_is_an_error(self, survivors):
        made, _, _ = survivors(comes(3, 8), YES, build=Open, state={}, incarnation=2)
        made._state = State(7)
        with pytest.raises(SurviveError, match="are at step 7, which is none of the steps of this one"), made:
            list(made.steps(range(5)))

    def test_one_without_state_or_that_fails_leaves_and_ends_nothing(self, survivors):
        made, _, _ = survivors(comes(3, 8), incarnation=2)
        with pytest.raises(SurviveError, match="rank 0 has died, and Survivors has no state= for a new process"):
            made.__enter__()
        assert made.epochs.calls == ["close"]
        made, worlds, _ = survivors(comes(3, 8), build=Open, state={}, incarnation=2)
        made._state = State(7, SurviveError("the modules of this rank are not those of its peer"))
        with pytest.raises(SurviveError, match="are not those of its peer"):
            made.__enter__()
        assert made.epochs.calls == ["join", "close"]
        assert worlds[0].ended.startswith("SurviveError")

    def test_a_state_that_is_no_plain_data_is_an_error_at_the_start(self, survivors):
        class Odd:
            def state_dict(self):
                return {"function": print}

        with pytest.raises(SurviveError, match=r"cannot get the state of this rank: state\['odd'\]\['function'\] is"):
            survivors(state={"odd": Odd()})
