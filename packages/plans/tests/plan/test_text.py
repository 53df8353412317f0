"""Text, CSV and JSON, both ways; and what a mistake in a table is told."""

import json
import re

import pytest

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans import (
    SCHEDULES,
    PlanError,
    PlanFault,
    PlanSyntaxError,
    compute_plan,
    forward_only,
    from_csv,
    from_json,
    from_text,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    offload,
    one_f_one_b,
    seq1f1b,
    to_csv,
    to_json,
    to_text,
    to_torch,
    verify,
    with_reduce,
)
from pipegrid.plans.plan import backward, forward
from plan_kit.plans import compute_plans, random_module_plan

FORMS = [(to_text, from_text), (to_csv, from_csv), (to_json, from_json)]


@pytest.mark.parametrize(("write", "read"), FORMS, ids=["text", "csv", "json"])
def test_every_generators_plan_reads_back(write, read):
    for num_positions, num_microbatches in [(1, 1), (2, 3), (3, 7)]:
        for name, plan in compute_plans(num_positions, num_microbatches):
            for form in (plan, lower(plan)):
                assert read(write(form)) == form, name


@pytest.mark.parametrize(("write", "read"), FORMS, ids=["text", "csv", "json"])
def test_graphs_of_modules_read_back_with_groups_and_placement(write, read):
    for seed in range(30):
        computes, options = random_module_plan(seed)
        plan = lower(computes, **options)
        assert read(write(plan)) == plan, seed


@pytest.mark.parametrize(("write", "read"), FORMS, ids=["text", "csv", "json"])
def test_names_of_modules_are_free(write, read):
    graph = ModuleGraph({'a "b" > c:1, #': 1, "ü ö": 2}, {'a "b" > c:1, #': ["ü ö"]})
    plan = lower(multi_module_1f1b(graph, 2, forward_only=['a "b" > c:1, #']))
    assert read(write(plan)) == plan


def test_the_text_is_what_a_person_would_write():
    assert to_text(lower(one_f_one_b(2, 2))) == (
        "microbatches 2\n"
        "modules model:2\n"
        "placement 0 1\n"
        "0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] 0B0 0RECV_B1<1 0B1\n"
        "1: 1RECV_F0<0 1F0 1B0 [1RECV_F1<0 1SEND_B0>0] 1F1 1B1 1SEND_B1>0\n"
    )
    assert str(one_f_one_b(1, 1)) == "microbatches 1\nmodules model:1\nplacement 0\n0: 0F0 0B0\n"


def test_a_bare_table_tells_its_shape():
    plan = from_text("# by hand\n\n0: 0F0 2F0 2B0 0B0   # first and last\n1: 1F0 1B0\n")
    assert plan.placement == ((0,), (1,), (0,))
    assert plan.num_microbatches == 1
    assert plan == from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert from_text("0: 0F0 0F1\n").forward_only == (0,)
    assert from_csv(to_csv(forward_only(3, 4))) == forward_only(3, 4)


def test_csv_of_torch_reads_and_is_written_alike():
    # As ScheduleInterleaved1F1B(2 ranks, 2 chunks, 4 microbatches) writes it, idle slots and all.
    written = (
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\r\n"
        ",1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\r\n"
    )
    plan = from_csv(written)
    assert plan.placement == ((0,), (1,), (0,), (1,))
    assert plan.num_microbatches == 4
    ours = to_csv(interleaved_1f1b(2, 4))
    assert from_csv(ours) == interleaved_1f1b(2, 4)


def test_torchs_overlapped_pair_is_a_pair_in_every_form():
    table = "0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1\n"
    plan = from_csv(table)
    assert str(plan).splitlines()[-1] == "0: 0F0 0F1 1F0 (1F1;1B0) 0B0 1B1 0B1"
    assert plan.pairs == (frozenset({3}),)
    assert [str(action) for action in plan.actions(0)][3:5] == ["1F1", "1B0"]
    assert from_text(to_text(plan)) == from_json(to_json(plan)) == from_csv(to_csv(plan)) == plan
    assert '"(1F1;1B0)"' in to_json(plan)
    assert to_csv(plan) == to_torch(plan) == table


def test_a_pair_is_a_forward_and_then_b_or_i_of_stages_on_one_position():
    for pair in ("(0B0;0F1)", "(0F1;0W0)", "(0F1;0F2)", "(0F1;0SEND_F0>1)", "(0F1;0B0;0F2)", "(0F1 0B0)", "(0F1;0B0)x"):
        with pytest.raises(PlanSyntaxError, match="expected an action"):
            from_text(f"0: 0F0 {pair} 0B1")
    with pytest.raises(PlanError, match="is no batch"):
        compute_plan([[(backward(0, 0), forward(0, 1))]], graph=1, placement=[0], num_microbatches=2)
    listed = to_json(from_text("0: 0F0 (0F1;0B0) 0B1")).replace('"(0F1;0B0)"', '["0F1", "0B0"]')
    with pytest.raises(PlanError, match=r"is no batch"):
        from_json(listed)
    with pytest.raises(PlanError, match=r"\(0F1;0B0\); stage 0 lies on positions \[0, 1\], those of a pair on one"):
        from_text("placement 0,1\n0: 0F0 (0F1;0B0) 0B1\n1: 0F0 0F1 0B0 0B1")


def test_torch_is_given_messages_without_peers_and_reductions_at_the_end():
    assert (
        to_torch(lower(one_f_one_b(2, 1))) == "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )
    assert to_torch(one_f_one_b(2, 1)) == to_csv(one_f_one_b(2, 1))
    reduced = from_text("0: 0F0 0B0 0REDUCE 1F0 1B0 1REDUCE")  # in the place of the plan's own reductions
    assert to_torch(reduced) == "0UNSHARD,0F0,0B0,0REDUCE_GRAD,1UNSHARD,1F0,1B0,1REDUCE_GRAD,0RESHARD,1RESHARD\n"
    batched = lower(one_f_one_b(2, 2))
    assert "1B0 [1RECV_F1<0 1SEND_B0>0] 1F1" in to_text(batched)
    assert "1B0,1RECV_F1,1SEND_B0,1F1" in to_torch(batched)


def test_the_lowered_form_of_torch_2_15_waits_for_each_send_and_reduction():
    assert (
        to_torch(lower(one_f_one_b(2, 1)), waits=True)
        == "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0\n"
    )
    assert to_torch(one_f_one_b(2, 1), waits=True) == to_csv(one_f_one_b(2, 1))


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.trains])
def test_what_torch_is_given_is_proved_as_it_is_written(name):
    plan = lower(SCHEDULES[name].plan(2, 4))
    read = from_csv(to_torch(plan))
    assert verify(read).num_messages == verify(plan).num_messages
    assert to_torch(read) == to_torch(plan)
    assert from_csv(to_torch(plan, waits=True)) == read


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (forward_only(2, 2), "runs no plan with stages without a backward"),
        (seq1f1b(2, 2, num_slices=2), "runs no plan with slices"),
        (from_text("modules a:1 b:1\n0: 0F0 0B0\n1: 1F0 1B0"), "runs no plan with modules beside each other"),
        (
            from_text("placement 0 0,1\n0: 0F0 1F0 1B0 0B0\n1: 1F0 1B0"),
            "runs no plan with a stage on several positions",
        ),
        (offload(lower(one_f_one_b(4, 8)), 2.5), "has no action such as 0OFFLOAD0"),
        (with_reduce(lower(one_f_one_b(2, 2)), {"word": (0, 1)}), "has no action such as 0REDUCE@word"),
    ],
)
def test_what_torch_does_not_run_is_an_error(plan, text):
    with pytest.raises(PlanError, match=re.escape(text)):
        to_torch(plan)


CONTRADICTIONS = [
    ("microbatches 4\n0: 0F0 0F1", 1, "the table has actions of 2 of 4 microbatches"),
    ("modules m:3\n0: 0F0 1F0", 1, "the table has actions of 2 of 3 stages"),
    ("modules m:60000000\n0: 0F0 0B0\n", 1, "the table has actions of 1 of 60000000 stages"),
    ("modules a:1 b:2\n0: 0F0", 1, "the table has actions of 1 of 3 stages"),
    ("modules a:1 a:1\n0: 0F0", 1, "modules are declared twice"),
    ("modules a:1 b:1\nedges a>b a>c\n0: 0F0 1F0", 2, "edge 'a' -> 'c' names the unknown module"),
    ("modules a:1 b:1\nedges a>b b>a\n0: 0F0", 2, "the modules form a cycle"),
    ("placement 0\n0: 0F0 1F0", 1, "the placement covers 1 stages and the graph has 2"),
    ("placement 0 1\n0: 0F0", 1, "the placement covers 2 stages and the graph has 1"),
    ("placement 0 0,0\n0: 0F0 1F0", 1, "placement[1] is [0, 0] (list); it must be one position from 0, or several"),
    ("group t 0,0\n0: 0F0", 1, "Group.positions is (0, 0) (tuple); it must be one position from 0, or several, each"),
    ("group t 0,1 edges 0>1,0>1\n0: 0F0\n1: 1F0", 1, "group 't' has 0>1, which a group has already"),
    ("placement 0 0,7\n0: 0F0 1F0", 1, "stage 1 is placed on position 7; the plan has 0..0"),
    ("forward_only 0 3\n0: 0F0", 1, "forward_only names stage 3; the graph has 0..0"),
    ("forward_only 1\n0: 0F0 1F0", 1, "stage 0 is trained, but all stages that it feeds (1) are forward_only"),
    ("group t 0 edges 0>1\n0: 0F0", 1, "group 't' names edge 0>1; the graph has none"),
    ("group s 0\ngroup t 0 edges 0>1,0>2\n0: 0F0 1F0", 2, "group 't' names edge 0>2; the graph has 0>1"),
    ("group s 0 edges 0>1\ngroup t 0 edges 0>1\n0: 0F0 1F0", 2, "group 't' has 0>1, which a group has already"),
    ("group t 0\ngroup s 0\ngroup t 0\n0: 0F0", 3, "group 't' has t, which a group has already"),
    ("group t 0 tied 0,3\n0: 0F0 0B0", 1, "group 't' ties stage 3; trained are 0"),
    ("group t 0 tied 0\n0: 0F0", 1, "group 't' ties stage 0; trained are none"),
    ("group t 0,1 tied 0\n0: 0F0 0B0\n1: 1F0 1B0", 1, "group 't' has positions [0, 1]; its tied stages lie on [0]"),
    ("group t 0 tied 0,1\n0: 0F0 0B0\n1: 1F0 1B0", 1, "group 't' has positions [0]; its tied stages lie on [0, 1]"),
    ("group t 0,4\n0: 0F0", 1, "group 't' names position 4; the plan has 0..0"),
    ("edges a>b\n0: 0F0", 1, "the graph has no modules"),
    ("group t 0 edges 1>0\n0: 0F0", 1, "an edge between stages, such as 1>2, not '1>0'"),
    ("group a>b 0\n0: 0F0", 1, "Group.name is 'a>b'; it must be a group name: letters, digits"),
    ("group g 0\n0: 0F0 0B0 1COLLECTIVE@g", None, "placement[1] is [] (list); it must be one position from 0"),
    ("placement 0\ngroup replace 0,9\n0: 0F0", 2, "group 'replace' names position 9"),
]


@pytest.mark.parametrize(("text", "line", "message"), CONTRADICTIONS)
def test_parts_that_contradict_each_other_are_named_with_their_line(text, line, message):
    with pytest.raises(PlanError) as error:
        from_text(text)
    assert str(error.value).startswith(message if line is None else f"line {line}: {message}")


@pytest.mark.parametrize(
    ("text", "line", "column", "found", "expected"),
    [
        ("0: 0F0 0X0", 1, 8, "'0X0'", "'X' is not a kind of action"),
        ("0: 0F0 [0F0 0B0]", 1, 8, "'[0F0 0B0]'", "messages and collectives are batched, and nothing else"),
        ("0: 0F0 0B7", 1, 8, "'0B7'", "a number that fits the rest (the table has actions of 2 of 8 microbatches)"),
        ("0: 0F0 7B0", 1, 8, "'7B0'", "a number that fits the rest (the table has actions of 2 of 8 stages)"),
        ("0: 0F0 2F0 2B0", 1, 8, "'2F0'", "a number that fits the rest (the table has actions of 2 of 3 stages)"),
        ("0: 0F0.0 0B0.3", 1, 10, "'0B0.3'", "a number that fits the rest (the table has actions of 2 of 4 slices)"),
        ("0: [0REDUCE", 1, 4, "'['", "a batch between '[' and ']'"),
        ("0: [0REDUCE [0REDUCE 0REDUCE]]", 1, 4, "'['", "a batch between '[' and ']'"),
        ("0: 0F0] 0B0", 1, 7, "']'", "a batch between '[' and ']'"),
        ("0: 0F0 []", 1, 8, "'[]'", "[] is no batch"),
        ("microbatches 2\n0: 0F0 0F2", 2, 8, "'0F2'", "a microbatch in 0..1"),
        ("modules m:2\n0: 0F0\n1: 2F0", 3, 4, "'2F0'", "a stage in 0..1"),
        ("modules m:2\n0: 0F0 0SEND_F0>2\n1: 1F0", 2, 8, "'0SEND_F0>2'", "an edge of the graph; stage 0 has 0>1"),
        ("modules m:1\n0: 0F0 0REDUCE@t", 2, 8, "'0REDUCE@t'", "a declared group; known: none"),
        ("0: 0F0\n0: 0B0", 2, 1, "'0'", "position 1; positions are written in order from 0, each once"),
        ("0: 0F0\n2: 1F0", 2, 1, "'2'", "position 1; positions are written in order"),
        ("bogus 3\n0: 0F0", 1, 1, "'bogus'", "a position such as '0:', a group, or one line of each of microbatches"),
        ("microbatches 2 3\n0: 0F0", 1, 16, "'3'", "one number"),
        ("microbatches\n0: 0F0", 1, 13, "the end of the line", "one number"),
        (
            "microbatches 1\nmodules m:1\nplacement 0\n0:\n",
            5,
            1,
            "the end",
            "an action of a position, such as '0: 0F0'",
        ),
        ("microbatches 0\n0: 0F0", 1, 14, "'0'", "one number of at least 1"),
        ("microbatches -1\n0: 0F0", 1, 14, "'-1'", "one number of at least 1"),
        ("microbatches 99999999999\n0: 0F0", 1, 14, "'99999999999'", "at most 9 digits, after 'microbatches'"),
        ("microbatches 1\nmicrobatches 1\n0: 0F0", 2, 1, "'microbatches'", "one line of each of microbatches"),
        ("modules m\n0: 0F0", 1, 9, "'m'", "modules as name:depth"),
        ("modules m:x\n0: 0F0", 1, 9, "'m:x'", "modules as name:depth"),
        ("modules m:0\n0: 0F0", 1, 9, "'m:0'", "modules as name:depth"),
        ('modules "m:1\n0: 0F0', 1, 9, "'\"m:1'", "modules as name:depth"),
        ("modules\n0: 0F0", 1, 8, "the end of the line", "modules as name:depth"),
        ("modules a:1 b:1\nedges a-b\n0: 0F0", 2, 7, "'a-b'", "source>destination"),
        ("placement x\n0: 0F0", 1, 11, "'x'", "the position of each stage"),
        ("placement 0 0,,1\n0: 0F0", 1, 13, "'0,,1'", "the position of each stage"),
        ("placement\n0: 0F0", 1, 10, "the end of the line", "the position of each stage"),
        ("forward_only x\n0: 0F0", 1, 14, "'x'", "stages, such as 0 1"),
        ("group t\n0: 0F0", 1, 1, "'group'", "a line such as: group bridge 0,3"),
        ("group t 0 edges\n0: 0F0", 1, 1, "'group'", "a line such as"),
        ("group t 0 edge 0>1\n0: 0F0", 1, 1, "'group'", "a line such as"),
        ("group t 0 tied 0 edges 0>1 tied 0\n0: 0F0", 1, 1, "'group'", "a line such as"),
        ("group t 0 tied 0,x\n0: 0F0", 1, 1, "'group'", "a line such as"),
        ("", 1, 1, "the end", "an action of a position"),
        ("microbatches 1\n", 2, 1, "the end", "an action of a position"),
    ],
)
def test_a_mistake_in_the_text_is_pointed_at(text, line, column, found, expected):
    with pytest.raises(PlanSyntaxError) as error:
        from_text(text)
    caught = error.value
    assert (caught.line, caught.column, caught.found) == (line, column, found)
    assert expected in caught.expected
    assert str(caught) == f"line {line}, column {column}: found {found}; expected {caught.expected}"


@pytest.mark.parametrize(
    ("text", "line", "column", "found"),
    [
        ("0F0,0B0\n1F0,1Q0\n", 2, 5, "'1Q0'"),
        ("0F0,, 0B9x\n", 1, 7, "'0B9x'"),
        ("#: microbatches 1\n0F0,0F1\n", 2, 5, "'0F1'"),
        ("#: nonsense\n0F0\n", 1, 4, "'nonsense'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B\n", 1, 10, "'0Q0'"),
        ("0F0,#0F1,0B0,0B1\n", 1, 5, "'#0F1'"),
        ("0F0,0B0# the last\n", 1, 5, "'0B0#'"),
        ("0F0,0WAIT_SEND_F0,0SEND_F0\n1RECV_F0,1F0\n", 1, 5, "'0WAIT_SEND_F0'"),
        ("0F0,0SEND_F0,0WAIT_SEND_F0,0WAIT_SEND_F0\n1RECV_F0,1F0\n", 1, 28, "'0WAIT_SEND_F0'"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,0WAIT_SEND_F0\n", 2, 14, "'0WAIT_SEND_F0'"),
        ("0F0,0B0,0WAIT_REDUCE_GRAD\n", 1, 9, "'0WAIT_REDUCE_GRAD'"),
    ],
)
def test_a_mistake_in_csv_is_pointed_at(text, line, column, found):
    with pytest.raises(PlanSyntaxError) as error:
        from_csv(text)
    assert (error.value.line, error.value.column, error.value.found) == (line, column, found)


def test_csv_may_be_bounded_from_outside():
    assert from_csv("0F0\n1F0\n", num_microbatches=1, num_stages=2).num_stages == 2
    with pytest.raises(PlanSyntaxError, match=r"line 1, column 5: found '0F1'; expected a microbatch in 0..0"):
        from_csv("0F0,0F1\n", num_microbatches=1)
    with pytest.raises(PlanSyntaxError, match=r"line 2, column 1: found '1F0'; expected a stage in 0..0"):
        from_csv("0F0\n1F0\n", num_stages=1)


GOOD = {
    "microbatches": 1,
    "modules": [["a", 1], ["b", 1]],
    "edges": [["a", "b"]],
    "placement": [[0], [1]],
    "positions": [["0F0"], ["1F0"]],
    "forward_only": [0, 1],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [["0F0"], ["1F0", "1X0"]]}, "positions[1][1]: 'X' is not a kind of action"),
        ({"positions": [["0F0"], ["1F1"]]}, "positions[1][0]: found '1F1'; expected a microbatch in 0..0"),
        ({"positions": [["0F0"], ["2F0"]]}, "positions[1][0]: found '2F0'; expected a stage in 0..1"),
        ({"positions": [["0F0", ["0REDUCE", "1REDUCE@g"]], ["1F0"]]}, "positions[0][1][1]: found '1REDUCE@g'; exp"),
        (
            {"positions": [["0F0", ["1F0", "0F0"]], []]},
            "positions[0][1]: [1F0 0F0] is no batch",
        ),
        ({"positions": [["0F0", []], []]}, "positions[0][1]: [] is no batch"),
        ({"positions": [[7], []]}, "positions[0][0]: 7 is not a string"),
        ({"positions": [["0F0"], [["1F0", 7]]]}, "positions[1][0][1]: 7 is not a string"),
        ({"positions": ["0F0"]}, "positions[0][0]: '0' is not an action"),
        ({"positions": 3}, "positions: "),
        ({"microbatches": "1"}, "microbatches: '1' is not an integer"),
        ({"microbatches": True}, "microbatches: True is not an integer"),
        ({"microbatches": 0}, "microbatches is 0; it must be an integer of at least 1"),
        ({"microbatches": 10**400}, "1" + "0" * 39 + " is no finite number"),
        ({"microbatches": 2}, "microbatches: the table has actions of 1 of 2 microbatches"),
        ({"modules": [["a", 1], ["b", 10**9]]}, "modules: the table has actions of 2 of 1000000001 stages"),
        ({"modules": [["a", 1], ["a", 1]]}, "modules: modules are declared twice"),
        ({"positions": [[], []]}, "modules: the table has actions of 0 of 2 stages"),
        ({"positions": []}, "modules: the table has actions of 0 of 2 stages"),
        ({"modules": [["a", -1]]}, "modules: the depth of module 'a' is -1"),
        ({"modules": [["a"]]}, "modules[0]: "),
        ({"modules": [[1, 1]]}, "modules[0][0]: 1 is not a string"),
        ({"edges": [["a", "b"], ["a", "c"]]}, "edges: edge 'a' -> 'c' names the unknown module 'c'"),
        ({"edges": [["a", ["b"]]]}, "edges[0][1]: ['b'] (list) is not a string"),
        ({"placement": [[0], ["x"]]}, "placement[1][0]: 'x' is not an integer"),
        ({"placement": [[0], [1, 7]]}, "placement[1]: stage 1 is placed on position 7; the plan has 0..1"),
        ({"placement": [[0], []]}, "placement: placement[1] is () (tuple); it must be one position from 0, or several"),
        ({"placement": [[0]]}, "placement: the placement covers 1 stages and the graph has 2"),
        ({"placement": [[0], [1], [1]]}, "placement: the placement covers 3 stages and the graph has 2"),
        ({"forward_only": [0, 1, 3]}, "forward_only: forward_only names stage 3; the graph has 0..1"),
        ({"groups": [{"name": "g"}]}, "groups[0].positions: the key 'positions' is missing"),
        ({"groups": [{"name": "a b", "positions": [0]}]}, "groups[0]: Group.name is 'a b'; it must be a group name"),
        ({"groups": [{"name": "g", "positions": [1, 9]}]}, "groups[0].positions: group 'g' names position 9"),
        ({"groups": [{"name": "g", "positions": [0], "edges": ["0>1", "0>2"]}]}, "groups[0].edges: group 'g' names ed"),
        ({"groups": [{"name": 7, "positions": [0]}]}, "groups[0].name: 7 is not a string"),
        ({"groups": [{"name": "g", "positions": [0], "edges": ["1"]}]}, "groups[0].edges[0]: an edge between stages,"),
        ({"groups": [{"name": "g", "positions": [0], "tied": 3}]}, "groups[0].tied: "),
        ({"groups": [{"name": "g", "positions": [0], "color": 3}]}, "groups[0]: unknown keys ['color']"),
        ({"colour": "red"}, "the document: unknown keys ['colour']"),
    ],
)
def test_a_mistake_in_json_is_named_with_its_path(changes, message):
    assert from_json(json.dumps(GOOD)).num_stages == 2
    with pytest.raises(PlanError) as error:
        from_json(json.dumps({**GOOD, **changes}))
    assert str(error.value).startswith(message)


def test_text_that_is_not_json_is_an_error_with_its_place():
    with pytest.raises(PlanSyntaxError, match="line 2, column 3"):
        from_json("{\n  microbatches: 1}")
    with pytest.raises(PlanSyntaxError, match="line 1, column 1: found the end; expected JSON"):
        from_json("")
    with pytest.raises(PlanError, match="modules: the key 'modules' is missing"):
        from_json('{"microbatches": 1}')
    with pytest.raises(PlanError, match="an object has the key 'microbatches' twice"):
        from_json('{"microbatches": 1, "modules": [["a", 1]], "microbatches": 2}')
    for text in ("[]", "3", "null", '"x"'):
        with pytest.raises(PlanError, match="it must be an object with"):
            from_json(text)
    with pytest.raises(PlanSyntaxError, match=r"column 1: found '\[\[.*expected JSON .brackets nest too deeply"):
        from_json("[" * 200_000)
    with pytest.raises(PlanError, match="is no finite number"):
        from_json(json.dumps(GOOD).replace('"microbatches": 1', '"microbatches": ' + "9" * 5000))


def test_a_contradiction_is_the_same_error_in_every_form():
    for read, text, where in [
        (from_json, json.dumps({**GOOD, "placement": [[0]]}), "placement"),
        (from_text, "placement 0\n0: 0F0\n1: 1F0\n", "line 1"),
        (from_csv, "# by hand\n#: placement 0\n0F0\n1F0\n", "line 2"),
    ]:
        with pytest.raises(PlanError, match=f"^{where}: the placement covers 1 stages and the graph has 2"):
            read(text)


@pytest.mark.parametrize(
    ("table", "position", "step", "found"),
    [
        ("0: 0F0 0F1 0B0 0B1\n1: 0F0 1F1 1B0 1B1\n", 1, 0, "0F0: stage 0 lies on position 0"),
        ("0: 0F0 1F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1\n", 0, 1, "1F1: stage 1 lies on position 1"),
        ("0: 0F0 0SEND_F0>1 0B0\n1: 1F0 0RECV_B0<1 1B0\n", 1, 1, "0RECV_B0<1: stage 0 lies on position 0"),
    ],
)
def test_a_slip_in_a_table_without_placement_is_a_fault_at_its_step(table, position, step, found):
    with pytest.raises(PlanError) as error:
        verify(from_text(table))
    assert PlanFault("misplaced", found, position, step) in error.value.faults
    assert [fault.rule for fault in error.value.faults].count("misplaced") == 1


def test_a_colocated_module_is_where_all_its_computes_are():
    header = "modules enc:1 llm:2\nedges enc>llm\n"
    plan = from_text(header + "0: 0F0 1F0 1B0 0B0\n1: 0F0 2F0 2I0 2W0 0B0\n")
    assert plan.placement == ((0, 1), (0,), (1,))
    bridged = lower(multi_module_1f1b(ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]}), 1), collectives={Edge(0, 1): "g"})
    lines = [line for line in to_text(bridged).splitlines() if not line.startswith("placement")]
    assert from_text("\n".join(lines)) == bridged


def test_waits_of_torch_are_left_out():
    table = "0F0,0SEND_F0{},0RECV_B0,0B0{},0REDUCE_GRAD{}\n1RECV_F0,1F0,1B0,1SEND_B0{}\n"
    waits = ("", ",0WAIT_SEND_F0", ",0WAIT_REDUCE_GRAD", ",1WAIT_SEND_B0")
    assert from_csv(table.format(*waits)) == from_csv(table.format("", "", "", ""))
    assert from_csv(table.format(*waits).replace("0SEND_F0", "0SEND_F0>1")) == from_csv(table.format("", "", "", ""))


def test_nothing_beside_an_overlapped_pair_is_lost():
    plan = from_csv("0F0,1F0,0F1 (1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n")
    assert str(plan).splitlines()[-1] == "0: 0F0 1F0 0F1 (1F1;1B0) 1B1 0B0 0B1"
    with pytest.raises(PlanSyntaxError, match="line 1, column 5: found"):
        from_csv("0F0,(1F1;1B0)OVERLAP_F_B0F1\n")
    spaced = from_csv("0F0,0F1,1F0, ( 1F1 ; 1B0 )OVERLAP_F_B ,0B0,1B1,0B1\n")
    assert spaced == from_csv("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1\n")
