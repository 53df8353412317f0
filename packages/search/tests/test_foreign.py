"""Schedules of other frameworks: read from what they print, proved; mutants against a slow player."""

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
from pipegrid.plans import Plan, PlanError, from_csv, interleaved_1f1b, lower, one_f_one_b, to_csv, verify
from pipegrid.plans.orders import orders_of_plan, prove_order
from pipegrid.search.foreign import (
    dualpipe_calls,
    orders_of_deepspeed,
    orders_of_hyperparallel,
    plan_of_jaxpp,
    read_schedule,
)
from plan_kit.order_player import OrderPlayer

DATA = Path(__file__).parent / "data"
NAMES = {"DeepSpeed": "deepspeed", "HyperParallel": "hyperparallel", "DualPipe": "dualpipe", "JaxPP": "jaxpp"}
FILES = {framework: json.loads((DATA / f"{name}.json").read_text()) for framework, name in NAMES.items()}
DEEPSPEED, JAXPP, DUALPIPE = FILES["DeepSpeed"], FILES["JaxPP"], FILES["DualPipe"]
EVERY = {name: document for found in FILES.values() for name, document in found.items()}
PAGE = (Path(__file__).parents[3] / "docs" / "museum" / "index.md").read_text()
COLUMNS = ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial", "nccl-connecting", "gloo")


def orders_of(name):
    """The orders of a schedule; a plan's after it was lowered."""
    found = read_schedule(json.dumps(EVERY[name]))
    return orders_of_plan(lower(found)) if isinstance(found, Plan) else found


def verdict(name, model):
    """As the page has it."""
    try:
        prove_order(orders_of(name), model, drains=True)
    except PlanError as error:
        return error.faults[0].rule
    return "proved"


ROWS = re.findall(
    rf"^\| `(\w+)` of ({'|'.join(NAMES)}) ((?:[^|]*, M < P)?)[^|]*\|((?: [\w-]+ \|){{6}})$", PAGE, re.MULTILINE
)


def is_short(name):
    """Whether there are fewer microbatches than ranks, which has a row of its own where it matters."""
    ranks, microbatches = map(int, name.split()[1].split("x"))
    return microbatches < ranks


def test_the_page_has_every_schedule():
    assert {row[:2] for row in ROWS} == {(name.split()[0], one) for one, found in FILES.items() for name in found}


@pytest.mark.parametrize(("schedule", "framework", "few", "cells"), ROWS)
def test_the_table_says_what_is_proved(schedule, framework, few, cells):
    names = [name for name in FILES[framework] if name.split()[0] == schedule and is_short(name) == bool(few)]
    assert names
    for name in names:
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


def test_steps_of_hyperparallel_are_read_from_its_objects():
    kinds = enum.Enum("MetaStepType", ["FWD", "BWD", "FWD_RECV", "FWD_SEND", "BWD_RECV", "BWD_SEND"])

    class MetaStep:
        def __init__(self, text):
            kind, microbatch, stage = re.findall(r"[=.](\w+)[,)]", text)
            self.text = f"MetaStep(type={kinds[kind]}, micro_index={microbatch}, stage_index={stage})"

        def __str__(self):
            return self.text

    document = EVERY["Schedule1F1B 2x4"]["hyperparallel"]
    found = orders_of_hyperparallel({rank: [MetaStep(one) for one in document[rank]] for rank in (1, 0)})
    assert found == orders_of("Schedule1F1B 2x4")
    assert all(launch.holds for row in found.ranks for launch in row if launch.messages)


def test_a_wait_for_each_message_is_part_of_the_order():
    """Two neighbours that both send first get stuck where each waits for its own message, and not with waits later."""
    rows = [
        ["FWD 0 0", "FWD_SEND 0 0", "BWD_RECV 0 0", "BWD 0 0"],
        ["BWD 0 1", "BWD_SEND 0 1", "FWD_RECV 0 1", "FWD 0 1"],
    ]
    steps = [
        ["MetaStep(type=MetaStepType.{}, micro_index={}, stage_index={})".format(*one.split()) for one in row]
        for row in rows
    ]
    with pytest.raises(PlanError, match="cycle"):
        prove_order(read_schedule(json.dumps({"hyperparallel": steps})), "gloo")


def test_the_calls_of_a_step_are_noted_without_modules_and_groups():
    class Schedule:
        def __init__(self):
            raise AssertionError("the class is not made")

        def _forward_chunk(self, phase, recv=True, send=True):
            if recv:
                self._recv_forward(phase)
            self._commit_and_wait_comm()
            self._forward_compute_chunk(phase)
            if send:
                self._send_forward(phase)

        def _backward_chunk(self, phase, enable_zb=False):
            self._recv_backward(phase)
            self._commit_and_wait_comm()
            self._backward_compute_chunk(phase, enable_zb)
            self._send_backward(phase)

        def _forward_backward_chunk(self, phase0, phase1):
            self._forward_backward_compute_chunk(phase0, phase1)

        def step(self, *, num_chunks):
            self._reset_states()
            for _ in range(num_chunks):
                self._forward_chunk(0, send=not self.is_last_rank)
                self._forward_chunk(1, recv=not self.is_last_rank)
                self._backward_chunk(1, enable_zb=True)
                self._backward_chunk(0)
                self._weight_chunk()
            self._commit_and_wait_comm()

    calls = dualpipe_calls(Schedule, 2, 1)
    assert calls[1][:5] == [
        "_recv_forward(0)",
        "_commit_and_wait_comm()",
        "_forward_compute_chunk(0)",
        "_commit_and_wait_comm()",
        "_forward_compute_chunk(1)",
    ]
    found = read_schedule(json.dumps({"dualpipev": calls}))
    assert [[one.text for one in row if one.is_compute] for row in found.ranks] == [
        ["0F0", "3F0", "3I0", "0B0", "3W0"],
        ["1F0", "2F0", "2I0", "1B0", "2W0"],
    ]
    prove_order(found, "gloo")


def test_dualpipe_is_two_copies_of_a_model_and_dualpipev_one():
    both, folded = orders_of("DualPipe 4x8"), orders_of("DualPipeV 3x7")
    for found, stages, microbatches in ((both, 8, 4), (folded, 6, 7)):
        texts = [one.text for row in found.ranks for one in row if one.is_compute]
        forwards = sorted(word for text in texts for word in text.strip("()").split(";") if "F" in word)
        assert forwards == sorted(f"{stage}F{number}" for stage in range(stages) for number in range(microbatches))
    sent = {one.label for row in both.ranks for launch in row for one in launch.messages}
    assert not any("3>4" in label for label in sent)
    assert {"forward 2>3 0", "backward 4>5 3"} <= sent


def test_a_forward_and_a_backward_that_dualpipe_computes_at_once_are_a_pair():
    texts = [one.text for row in orders_of("DualPipeV 3x7").ranks for one in row if one.is_compute]
    assert [text for text in texts if text.startswith("(")][:2] == ["(0F5;5B2)", "(5F3;0B0)"]
    assert {word for text in texts if text.startswith("(") for word in re.findall("[A-Z]", text)} == {"F", "B"}


def test_a_fused_forward_and_backward_of_two_microbatches_are_a_pair():
    plan = plan_of_jaxpp([[[0, 0, "FWD"], [[0, 1, "FWD"], [0, 0, "BWD"]], None, [0, 1, "BWD"]]])
    assert str(plan).splitlines()[-1] == "0: 0F0 (0F1;0B0) 0B1"
    plan = plan_of_jaxpp([[[[0, 0, "FWD"], [0, 0, "BWD"]]]])
    assert str(plan).splitlines()[-1] == "0: 0F0 0B0"


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
        ({"hyperparallel": [["FWD(0)"]]}, r"hyperparallel\[0\]\[0\]: 'FWD\(0\)' is no MetaStep of FWD, FWD_RECV"),
        ({"hyperparallel": [1]}, "hyperparallel is alone in its document, a list"),
        (
            {"dualpipe": [["_forward_compute_chunk(2)"]]},
            r"dualpipe\[0\]\[0\]: '_forward_compute_chunk\(2\)' is no call",
        ),
        ({"dualpipe": [["_forward_compute_chunk()"]]}, "has not the phases of _forward_compute_chunk"),
        ({"dualpipev": [["_weight_chunk()"]]}, r"dualpipev\[0\]\[0\]: a weight chunk, and no backward"),
        ({"dualpipev": [["_send_forward(1)"], ["_send_forward(1)"]]}, "rank 1 ends with 2SEND_F0 not launched"),
        ({"jaxpp": [[]], "more": 1}, "jaxpp is alone in its document, a list"),
        ({"jaxpp": [[[0, 0, "FORWARD"]]]}, r"jaxpp\[0\]\[0\] is .*its type one of FWD, BWD, BWD_I, BWD_W"),
        ({"jaxpp": [[[0, -1, "FWD"]]]}, r"jaxpp\[0\]\[0\] is "),
        ({"jaxpp": [[5]]}, r"jaxpp\[0\]\[0\] is 5"),
        ({"jaxpp": [[[True, 0, "FWD"]]]}, r"jaxpp\[0\]\[0\] is "),
        ({"jaxpp": [[[10**20, 0, "FWD"]]]}, r"jaxpp\[0\]\[0\] is "),
        ({"jaxpp": [[[[0, 0, "FWD"], 3]]]}, r"jaxpp\[0\]\[0\] is 3"),
        *(({name: []}, f"{name} is alone in its document") for name in ("deepspeed", "dualpipe", "jaxpp")),
        ({"deepspeed": [[[f"ForwardPass(buffer_id={'9' * 5000})"]]]}, r"deepspeed\[0\]\[0\]: .* is no instruction"),
        (
            {"hyperparallel": [[f"MetaStep(type=FWD, micro_index={'9' * 5000}, stage_index=0)"]]},
            r"hyperparallel\[0\]\[0\]: .* is no MetaStep",
        ),
        ({"schedule_table": [[10**9, 10**9]], "num_warmup_microbatches": [1]}, "schedule_table has 1 entries"),
        ({"schedule_table": [[0, 0]] * 4000, "num_warmup_microbatches": [1] * 4000}, "at most 10000000 of all"),
        ({"schedule_table": [[0, 0], [0, 0]], "num_warmup_microbatches": [1]}, "each microbatch with each chunk, once"),
        ({"schedule_table": [[0, 0]], "num_warmup_microbatches": [1e308]}, r"num_warmup_microbatches\[0\] is 1e\+308"),
    ],
)
def test_what_is_no_such_document_is_an_error_that_names_the_part(document, text):
    with pytest.raises(PlanError, match=text):
        read_schedule(json.dumps(document))


@pytest.mark.parametrize("text", ["", "0F0,0B0", "[1]", '{"schedule": 1}', "nonsense"])
def test_any_other_text_is_none(text):
    assert read_schedule(text) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_document_with_changed_characters_is_read_or_an_error_of_its_kind(seed):
    chosen = random.Random(seed)
    wholes = [json.dumps(FILES[framework][name]) for framework in NAMES for name in sorted(FILES[framework])[:1]]
    wholes += [to_csv(lower(one_f_one_b(2, 3))), '{"ranks": [["0SEND_F1", {"send": "a", "to": 1}], ["1RECV_F1"]]}']
    wholes += ['{"schedule_table": [[0, 0], [1, 0]], "num_warmup_microbatches": [1, 0]}']
    for _ in range(100):
        text = list(chosen.choice(wholes))
        for _ in range(chosen.choice((1, 3, 20))):
            at = chosen.randrange(len(text))
            text[at : at + chosen.choice((0, 1, 1, 5))] = chosen.choice(
                ['"', "9" * 12, "[", "]", "{", ",", "-", "\u0663", "null", ""]
            )
        try:
            found = read_schedule("".join(text)) or from_csv("".join(text))
        except PlanError as error:
            assert len(str(error)) < 1000
        else:
            assert found


def mutant(found, chosen):
    """The orders with one or two launches of a rank moved by a place or two."""
    ranks = [list(row) for row in found.ranks]
    for _ in range(chosen.choice((1, 1, 2))):
        row = ranks[chosen.randrange(len(ranks))]
        one = chosen.randrange(len(row) - 1)
        row.insert(min(one + chosen.choice((1, 2)), len(row) - 1), row.pop(one))
    return evolve(found, ranks=tuple(map(tuple, ranks)))


SMALL = [name for name in EVERY if re.search(r" (2x3|3x4|2x4)$", name) and "InterleavedGPipe" not in name]


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
