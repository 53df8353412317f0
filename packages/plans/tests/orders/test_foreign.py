"""Schedules of DeepSpeed and JaxPP: read from what they print, proved; mutants against a slow player."""

from __future__ import annotations

import enum
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import PlanError, interleaved_1f1b, lower, one_f_one_b, verify
from pipegrid.plans.orders import orders_of_deepspeed, orders_of_plan, plan_of_jaxpp, prove_order, read_schedule
from plan_kit.order_player import OrderPlayer

DATA = Path(__file__).parent / "data"
DEEPSPEED, JAXPP = (json.loads((DATA / f"{name}.json").read_text()) for name in ("deepspeed", "jaxpp"))
PAGE = (Path(__file__).parents[4] / "docs" / "museum" / "index.md").read_text()
COLUMNS = ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial", "nccl-connecting", "gloo")


def orders_of(name):
    """The orders of a schedule; a plan's after it was lowered."""
    found = read_schedule(json.dumps((DEEPSPEED | JAXPP)[name]))
    return orders_of_plan(lower(found)) if name in JAXPP else found


def verdict(name, model):
    """As the page has it."""
    try:
        prove_order(orders_of(name), model, drains=True)
    except PlanError as error:
        return error.faults[0].rule
    return "proved"


ROWS = re.findall(r"^\| `(\w+)` of (DeepSpeed|JaxPP) [^|]*\|((?: [\w-]+ \|){6})$", PAGE, re.MULTILINE)


def test_the_page_has_every_schedule():
    assert {row[0] for row in ROWS} == {name.split()[0] for name in (*DEEPSPEED, *JAXPP)}


@pytest.mark.parametrize(("schedule", "framework", "cells"), ROWS)
def test_the_table_says_what_is_proved(schedule, framework, cells):
    for name in (one for one in (DEEPSPEED if framework == "DeepSpeed" else JAXPP) if one.split()[0] == schedule):
        for model, said in zip(COLUMNS, cells.strip(" |").split(" | "), strict=True):
            assert verdict(name, model) == said, name


def test_what_a_schedule_has_is_its_papers():
    assert read_schedule(json.dumps(JAXPP["Std1F1B 4x8"])) == one_f_one_b(4, 8)
    assert read_schedule(json.dumps(JAXPP["Interleaved1F1B 2x4"])) == interleaved_1f1b(2, 4, num_chunks=2)
    for number, row in enumerate(orders_of("TrainSchedule 4x8").ranks):
        assert [one.text for one in row if one.is_compute] == [str(one) for one in one_f_one_b(4, 8).actions(number)]


def test_a_schedule_that_repeats_a_backward_is_no_plan():
    with pytest.raises(PlanError, match="2B0 has been done before"):
        verify(read_schedule(json.dumps(JAXPP["InterleavedGPipe 2x4"])))


def test_live_objects_are_read_as_what_they_print():
    class Instruction:
        def __init__(self, text):
            self.text = text

        def __repr__(self):
            return self.text

    class Schedule:
        def __init__(self, steps):
            self.found = steps

        def steps(self):
            for step in self.found:
                yield [Instruction(one) for one in step]

    document = DEEPSPEED["DualPipeVSchedule 2x4"]["deepspeed"]
    assert orders_of_deepspeed([Schedule(own) for own in document]) == orders_of("DualPipeVSchedule 2x4")
    kinds = enum.Enum("TaskType", ["FWD", "BWD", "BWD_I", "BWD_W"])

    def task(one):
        return one and SimpleNamespace(stage_id=one[0], mubatch_idx=one[1], fwd_or_bwd=kinds[one[2]])

    rows = [[task(one) for one in row] for row in JAXPP["ZeroBubble 2x4"]["jaxpp"]]
    assert plan_of_jaxpp(rows) == read_schedule(json.dumps(JAXPP["ZeroBubble 2x4"]))


def test_fused_tasks_are_one_after_the_other():
    plan = plan_of_jaxpp([[[0, 0, "FWD"], [[0, 1, "FWD"], [0, 0, "BWD"]], None, [0, 1, "BWD"]]])
    assert [str(action) for action in plan.actions(0)] == ["0F0", "0F1", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"deepspeed": [[["Jump(buffer_id=0)"]]]}, r"deepspeed\[0\]\[0\]: 'Jump\(buffer_id=0\)' is no instruction"),
        ({"deepspeed": [[["SendGrad(buffer_id=3)"]], []]}, "SendGrad of buffer 3, which has no microbatch yet"),
        ({"deepspeed": [[["ForwardPass(0)", "x"]]]}, "is no instruction that is known"),
        ({"deepspeed": [["ForwardPass(buffer_id=0)"]]}, "is neither a schedule with steps"),
        ({"deepspeed": [[1]]}, "is neither a schedule with steps"),
        (
            {"deepspeed": [[["CommitP2P()", "ForwardPass(buffer_id=0)", "SendActivation(buffer_id=0)"]], []]},
            "rank 0 queues 0SEND_F0 and never comes to CommitP2P",
        ),
        ({"deepspeed": 3}, "deepspeed is alone in its document, a list"),
        ({"jaxpp": [[]], "more": 1}, "jaxpp is alone in its document, a list"),
        ({"jaxpp": [[[0, 0, "FORWARD"]]]}, r"jaxpp\[0\]\[0\] is .*its type one of FWD, BWD, BWD_I, BWD_W"),
        ({"jaxpp": [[[0, -1, "FWD"]]]}, r"jaxpp\[0\]\[0\] is "),
        ({"jaxpp": [[5]]}, r"jaxpp\[0\]\[0\] is 5"),
    ],
)
def test_what_is_no_such_document_is_an_error_that_names_the_part(document, text):
    with pytest.raises(PlanError, match=text):
        read_schedule(json.dumps(document))


@pytest.mark.parametrize("text", ["", "0F0,0B0", "[1]", '{"schedule": 1}', "nonsense"])
def test_any_other_text_is_none(text):
    assert read_schedule(text) is None


def mutant(found, chosen):
    """The orders with one or two launches of a rank moved by a place or two."""
    ranks = [list(row) for row in found.ranks]
    for _ in range(chosen.choice((1, 1, 2))):
        row = ranks[chosen.randrange(len(ranks))]
        one = chosen.randrange(len(row) - 1)
        row.insert(min(one + chosen.choice((1, 2)), len(row) - 1), row.pop(one))
    return evolve(found, ranks=tuple(map(tuple, ranks)))


SMALL = [
    name for name in (*DEEPSPEED, *JAXPP) if re.search(r" (2x3|3x4|2x4)$", name) and "InterleavedGPipe" not in name
]


@pytest.mark.parametrize("number", [12, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SMALL)
def test_mutants_are_proved_where_the_slow_player_comes_to_their_end(name, number):
    chosen, whole = random.Random(f"{name} {number}"), orders_of(name)
    verdicts = set()
    for _ in range(number):
        found, model = mutant(whole, chosen), ORDER_MODELS[chosen.choice(COLUMNS)]
        try:
            prove_order(found, model)
            rule = "proved"
        except PlanError as error:
            rule = error.faults[0].rule
        verdicts.add(rule)
        if rule in ("proved", "cycle"):  # other faults are of messages that a player cannot match
            assert OrderPlayer(found, model, buffered=False, drains=False).ends() == (rule == "proved")
    assert number < 100 or {"proved"} < verdicts
