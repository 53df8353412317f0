"""The control store of a job: positions, the first failure, and what each rank runs, in few calls of the store."""

import random
import re
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from monitor_kit.threads import in_threads
from pipegrid.monitor import Control, DisagreementError, Failure, where_all_stand
from pipegrid.monitor.first_failure import FirstFailure


def dict_store():
    """A store of a person's own, with the least that a control needs and `multi_get`; it counts calls."""
    values, lock = {}, threading.Lock()

    def call(verb):
        def run(key, *given):
            with lock:
                made.calls += 1
                return verb(key, *given)

        return run

    def add(key, amount):
        values[key] = b"%d" % (int(values.get(key, b"0")) + amount)
        return int(values[key])

    def compare_set(key, expected, desired):
        if values.get(key, b"") == expected.encode():
            values[key] = desired.encode()
        return values.get(key, expected.encode())

    made = SimpleNamespace(
        calls=0,
        set=call(lambda key, value: values.__setitem__(key, value.encode())),
        get=call(lambda key: values[key]),
        add=call(add),
        check=call(lambda keys: all(key in values for key in keys)),
        compare_set=call(compare_set),
        delete_key=call(lambda key: values.pop(key, None) is not None),
        multi_get=call(lambda keys: [values[key] for key in keys]),
    )
    return made


def ranks_in(line):
    """The ranks of ``ranks 0-2, 7: text``."""
    runs = [list(map(int, run.split("-"))) for run in re.findall(r"\d+(?:-\d+)?", line.partition(":")[0])]
    return {rank for run in runs for rank in range(run[0], run[-1] + 1)}


def test_the_first_failure_stays_the_first(store):
    controls = [Control(store, rank, range(3)) for rank in range(3)]
    assert controls[0].failure() is None
    assert controls[2].record("broken") == Failure(2, "broken")
    assert controls[0].record("alone") == Failure(2, "broken")
    assert [control.failure() for control in controls] == [Failure(2, "broken")] * 3


def test_without_a_monitor_each_attempt_has_a_first_failure_of_its_own():
    """Attempts in the same processes, where the same rank may fail with the same words."""
    store = dict_store()
    ranks = [FirstFailure(rank, store) for rank in range(3)]
    for first, text in [(1, "broken"), (1, "broken"), (1, "broken"), (0, "other"), (2, "broken"), (0, "broken")]:
        order = [first, *(rank for rank in range(3) if rank != first)]
        told = [ranks[rank].record(text if rank == first else f"rank {rank} saw {text}") for rank in order]
        assert told == [text] * 3


def test_a_failure_that_one_rank_alone_recorded_is_over_in_the_next_attempt():
    """The others had left before their step, and see its record when they fail."""
    ranks = [FirstFailure(rank, store) for store in [dict_store()] for rank in range(4)]
    assert ranks[1].record("rank 0 left", 0) == "rank 0 left"
    assert [ranks[rank].record(f"rank {rank} failed", 1) for rank in (0, 1, 2)] == ["rank 0 failed"] * 3
    assert ranks[3].record("rank 3 was late, in the attempt before", 0) == "rank 0 failed"


def test_positions_are_last_words_or_the_last_that_was_heard(store):
    controls = [Control(store, rank, range(3)) for rank in range(3)]
    controls[0].publish("step 3", last=True)
    controls[1].publish("step 1")
    controls[1].publish("step 2")
    said = controls[0].positions(seconds=0.05)
    assert said[0] == "step 3"
    assert re.fullmatch(r"step 2 \(last heard \d+\.\d s ago\)", said[1])
    assert said[2] == "nothing was heard of it"


def test_ranks_that_stand_together_share_a_line():
    assert where_all_stand({0: "F0", 1: "F0", 2: "F0", 3: "B1", 5: "F0"}) == "  ranks 0-2, 5: F0\n  rank 3: B1"


def test_agreement_waits_for_all(store):
    came = []

    def agree(rank):
        if rank == 2:
            time.sleep(0.2)
            came.append(rank)
        assert Control(store, rank, range(3)).agree(1, "8 microbatches", seconds=20) is None
        return list(came)

    assert in_threads([lambda rank=rank: agree(rank) for rank in range(3)]) == [[2]] * 3


def test_disagreement_is_told_to_all_with_who_runs_what(store):
    texts = []

    def agree(rank):
        found = Control(store, rank, range(3)).agree(1, f"{8 - rank // 2} microbatches", seconds=20)
        assert found.disagreement
        texts.append(found.text)

    in_threads([lambda rank=rank: agree(rank) for rank in range(3)])
    (text,) = set(texts)
    assert "ranks 0-1: 8 microbatches; rank 2: 7 microbatches" in text
    assert "the same plan" in text


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(DisagreementError, match=r"waited 0\.05 s .* nothing was heard of ranks 1-2"):
        Control(store, 0, range(3)).agree(1, "8 microbatches", seconds=0.05)


def test_a_rank_that_does_not_come_is_not_confused_with_those_that_differ(store):
    """Two ranks are at the next step with the plan of before, one with another plan, one is missing."""
    controls = [Control(store, rank, range(4)) for rank in range(4)]
    in_threads([partial(control.agree, 1, "8 microbatches", seconds=20) for control in controls])
    assert controls[1].agree(2, "8 microbatches", seconds=0) is None
    assert controls[2].agree(2, "8 microbatches", seconds=0) is None
    found = controls[0].agree(2, "4 microbatches", seconds=0.05)
    assert found.disagreement
    assert "step 2: rank 0: 4 microbatches; rank 1: 8 microbatches. Give every rank" in found.text


@pytest.mark.parametrize("make", [dist.HashStore, dict_store])
def test_whoever_comes_first_and_last_all_are_named_with_what_they_run(make):
    """Plans change at some steps, and ranks run ahead; at the last step some rank runs another plan."""
    draw = random.Random(29)
    for seed in range(60):
        store, steps, num_ranks = make(), draw.randint(1, 6), draw.randint(2, 6)
        plans, odd = ["a"], {draw.randrange(num_ranks): "other", draw.randrange(num_ranks): "third"}
        for _ in range(steps - 1):
            plans.append(draw.choice([plans[-1], plans[-1], "b", "c"]))

        def play(rank, *, plans=plans, odd=odd, store=store, num_ranks=num_ranks, seed=seed):
            control, pause = Control(store, rank, range(num_ranks)), random.Random(f"{seed} {rank}")
            for step, plan in enumerate(plans, 1):
                time.sleep(pause.choice([0, 0, 0.002]))
                assert control.agree(step, plan, seconds=20) is None
            return control.agree(len(plans) + 1, odd.get(rank, plans[-1]), seconds=20) or control

        ended = in_threads([partial(play, rank) for rank in range(num_ranks)])
        # A rank that runs what the first one does has gone on, and hears of the difference from its monitor.
        (failure,) = {found if isinstance(found, Failure) else found.failure() for found in ended}
        runs = [odd.get(rank, plans[-1]) for rank in range(num_ranks)]
        for rank, what in enumerate(runs):
            (line,) = (
                line
                for line in re.split("[;.] ", failure.text.partition(f"step {steps + 1}: ")[2])
                if line.endswith(f": {what}")
            )
            assert rank in ranks_in(line), failure.text


def test_the_calls_of_a_rank_in_a_step_do_not_grow_with_the_job():
    """Of the slowest rank, steady and where all ranks change their plan at once."""

    def most_calls(num_ranks):
        store = dict_store()
        controls = [Control(store, rank, range(num_ranks)) for rank in range(num_ranks)]
        most = {}
        for step in range(1, 8):
            what = "first plan" if step < 4 else "second plan"
            for control in controls:
                before = store.calls
                control.announce(step, what)
                control.tidy()
                most[step] = max(most.get(step, 0), store.calls - before)
        return most

    assert most_calls(2) == most_calls(300)
    assert max(most_calls(300).values()) <= 5


def test_the_places_of_many_ranks_of_which_one_is_silent_take_few_calls():
    store = dict_store()
    controls = [Control(store, rank, range(1024)) for rank in range(1024)]
    for control in controls[:700] + controls[701:]:
        control.publish("the end", last=True)
    controls[700].publish("step 1")
    before = store.calls
    said = controls[0].positions(seconds=0)
    assert store.calls - before < 60
    assert said[700].startswith("step 1 (last heard ")
    assert [rank for rank, place in said.items() if place != "the end"] == [700]


def test_old_steps_leave_nothing_behind(store):
    controls = [Control(store, rank, range(2)) for rank in range(2)]
    for step in range(1, 60):
        for control in controls:
            control.announce(step, f"the same in {step // 20}")
            control.tidy()
    # The last step's keys, each rank's plan, and one of the store's own.
    assert store.num_keys() <= 5
