"""Text, CSV and JSON, both ways; and what a mistake in a table is told."""

import json

import pytest
from torch.distributed.pipelining.schedules import _Action

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules import (
    PlanError,
    PlanSyntaxError,
    forward_only,
    from_csv,
    from_json,
    from_text,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    one_f_one_b,
    to_csv,
    to_json,
    to_text,
)
from pipegrid.schedules.plan_json import locate

from .schedules_plans import compute_plans, lowered_module_plan

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
        plan = lowered_module_plan(seed)
        assert read(write(plan)) == plan, seed


@pytest.mark.parametrize(("write", "read"), FORMS, ids=["text", "csv", "json"])
def test_names_of_modules_are_free_and_creation_orders_are_kept(write, read):
    graph = ModuleGraph({'a "b" > c:1, #': 1, "ü ö": 2}, {'a "b" > c:1, #': ["ü ö"]})
    plan = lower(multi_module_1f1b(graph, 2, forward_only=['a "b" > c:1, #']))
    assert read(write(plan)) == plan
    from attrs import evolve

    reordered = evolve(plan, creation=[tuple(reversed(names)) for names in plan.creation])
    assert reordered != plan
    assert read(write(reordered)) == reordered
    silent = evolve(plan, creation=[(), (), ()])
    assert read(write(silent)) == silent


def test_the_text_is_what_a_person_would_write():
    assert to_text(lower(one_f_one_b(2, 2))) == (
        "microbatches 2\n"
        "modules model:2\n"
        "placement 0 1\n"
        "0: 0F0 0SEND_F0>1 0F1 [0SEND_F1>1 0RECV_B0<1] 0B0 0RECV_B1<1 0B1\n"
        "1: 1RECV_F0<0 1F0 1B0 [1SEND_B0>0 1RECV_F1<0] 1F1 1B1 1SEND_B1>0\n"
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
    for row in ours.splitlines():
        assert [str(_Action.from_str(cell)) for cell in row.split(",")] == row.split(",")


def test_torchs_overlapped_pair_is_read_as_one_after_the_other():
    plan = from_csv("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1\n")
    assert str(plan).splitlines()[-1] == "0: 0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1"


@pytest.mark.parametrize(
    ("text", "line", "column", "found", "expected"),
    [
        ("0: 0F0 0X0", 1, 8, "'0X0'", "'X' is not a kind of action"),
        ("0: 0F0 [0F0 0B0]", 1, 9, "'0F0'", "a communication; computes stand alone"),
        ("0: [0F0", 1, 4, "'[0F0'", "']' at the end of the batch"),
        ("0: [0REDUCE [0REDUCE 0REDUCE]]", 1, 13, "'[0REDUCE'", "']' first"),
        ("0: 0F0] 0B0", 1, 4, "'0F0]'", "'[' before ']'"),
        ("0: 0F0 []", 1, 8, "'[]'", "communications between '[' and ']'"),
        ("microbatches 2\n0: 0F0 0F2", 2, 8, "'0F2'", "a microbatch in 0..1"),
        ("modules m:2\n0: 0F0\n1: 2F0", 3, 4, "'2F0'", "a stage in 0..1"),
        ("modules m:2\n0: 0F0 0SEND_F0>2\n1: 1F0", 2, 8, "'0SEND_F0>2'", "an edge of the graph; stage 0 has 0>1"),
        ("modules m:1\n0: 0F0 0REDUCE@t", 2, 8, "'0REDUCE@t'", "a declared group; known: none"),
        ("0: 0F0\n0: 0B0", 2, 1, "'0'", "one line for position 0"),
        ("0: 0F0\n2: 1F0", 2, 1, "'2'", "position 1; positions are written in order"),
        ("0: 0F0 0B7", 1, 8, "'0B7'", "a microbatch below 2, the number of actions"),
        ("0: 0F0 7B0", 1, 8, "'7B0'", "a stage below 2, the number of actions"),
        ("0: 0F0 2F0 2B0", 1, 1, "no action of stage 1", "actions of all stages 0..2, or a 'placement' line"),
        ("bogus 3\n0: 0F0", 1, 1, "'bogus'", "a position such as '0:' or one of microbatches, modules"),
        ("microbatches 2 3\n0: 0F0", 1, 1, "'microbatches'", "one number"),
        ("microbatches 0\n0: 0F0", 1, 14, "'0'", "at least 1 microbatch"),
        ("microbatches -1\n0: 0F0", 1, 14, "'-1'", "an integer from 0"),
        ("microbatches 99999999999\n0: 0F0", 1, 14, "'99999999999'", "of at most 9 digits"),
        ("microbatches 1\nmicrobatches 1\n0: 0F0", 2, 1, "'microbatches'", "no second 'microbatches' line"),
        ("modules m\n0: 0F0", 1, 9, "'m'", "a module as name:depth"),
        ("modules m:x\n0: 0F0", 1, 11, "'x'", "a depth, an integer"),
        ("modules m:0\n0: 0F0", 1, 1, "'modules'", "a depth is an integer of at least 1"),
        ('modules "m:1\n0: 0F0', 1, 9, "'\"m:1'", "the closing"),
        ("modules\n0: 0F0", 1, 1, "'modules'", "modules as name:depth"),
        ("edges a>b\n0: 0F0", 1, 1, "'edges'", "a 'modules' line"),
        ("modules a:1 b:1\nedges a-b\n0: 0F0", 2, 7, "'a-b'", "source>destination"),
        ("modules a:1 b:1\nedges a>c\n0: 0F0", 2, 1, "'edges'", "the unknown module 'c'"),
        ("modules a:1 b:1\nedges a>b b>a\n0: 0F0", 2, 1, "'edges'", "the modules form a cycle"),
        ("placement x\n0: 0F0", 1, 11, "'x'", "positions such as 0 or 0,1"),
        ("placement 0 0\n0: 0F0", 1, 1, "'placement'", "covers 2 stages and the graph has 1"),
        ("placement 1\n0: 0F0", 1, 1, "'placement'", "the plan has positions 0..0"),
        ("forward_only x\n0: 0F0", 1, 14, "'x'", "a stage, an integer"),
        ("group t\n0: 0F0", 1, 1, "'group'", "a name and positions"),
        ("group t 0 edges\n0: 0F0", 1, 1, "'group'", "a name and positions"),
        ("group t 0 edge 0>1\n0: 0F0", 1, 11, "'edge'", "'edges' or 'tied', once"),
        ("group t 0 tied 0 tied 0\n0: 0F0", 1, 18, "'tied'", "'edges' or 'tied', once"),
        ("group t 0 edges 1>0\n0: 0F0", 1, 17, "'1>0'", "an edge between stages, such as 1>2"),
        ("group t 0 edges 0>1\n0: 0F0", 1, 1, "'group'", "group 't' names edge 0>1; the graph has none"),
        ("group t 0 tied x\n0: 0F0", 1, 16, "'x'", "stages such as 0,3"),
        ("group t 4\n0: 0F0", 1, 1, "'group'", "names position 4"),
        ("group a>b 0\n0: 0F0", 1, 7, "'a>b'", "is not a group name"),
        ("create 3 F0>1\n0: 0F0", 1, 1, "'create'", "positions in 0..0"),
        ("create 0\ncreate 0\n0: 0F0", 2, 8, "'0'", "one 'create' line for position 0"),
        ("", 1, 1, "the end", "a position"),
        ("microbatches 1\n", 2, 1, "the end", "a position"),
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
        ("0F0,, 0B9\n", 1, 7, "'0B9'"),
        ("#: microbatches 1\n0F0,0F1\n", 2, 5, "'0F1'"),
        ("#: nonsense\n0F0\n", 1, 4, "'nonsense'"),
        ("0F0,(0F1;0Q0)OVERLAP_F_B\n", 1, 10, "'0Q0'"),
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
    ("changes", "path", "expected"),
    [
        ({"positions": [["0F0"], ["1F0", "1X0"]]}, ("positions", 1, 1), "'X' is not a kind"),
        ({"positions": [["0F0"], ["1F1"]]}, ("positions", 1, 0), "a microbatch in 0..0"),
        ({"positions": [["0F0"], ["2F0"]]}, ("positions", 1, 0), "a stage in 0..1"),
        ({"positions": [["0F0", ["1F0"]], []]}, ("positions", 0, 1, 0), "a communication"),
        ({"positions": [["0F0", []], []]}, ("positions", 0, 1), "communications in the batch"),
        ({"positions": [[7], []]}, ("positions", 0, 0), "an action, such as"),
        ({"positions": ["0F0"]}, ("positions", 0), "a list of steps"),
        ({"positions": 3}, ("positions",), "a list of positions"),
        ({"microbatches": "1"}, ("microbatches",), "an integer from 0"),
        ({"microbatches": True}, ("microbatches",), "an integer from 0"),
        ({"modules": [["a", -1]]}, ("modules", 0, 1), "a depth, an integer"),
        ({"modules": [["a"]]}, ("modules", 0), "a pair of a name and a depth"),
        ({"edges": [["a", "c"]]}, ("edges",), "the unknown module 'c'"),
        ({"placement": [[0], ["x"]]}, ("placement", 1, 0), "a position, an integer"),
        ({"groups": [{"name": "g"}]}, ("groups", 0), 'a group as {"name"'),
        ({"groups": [{"name": "a b", "positions": [0]}]}, ("groups", 0), "is not a group name"),
        ({"groups": [{"name": 7, "positions": [0]}]}, ("groups", 0, "name"), "a name"),
        ({"groups": [{"name": "g", "positions": [0], "edges": ["1"]}]}, ("groups", 0, "edges", 0), "such as 1>2"),
        ({"groups": [{"name": "g", "positions": [0], "tied": 3}]}, ("groups", 0, "tied"), "a list of stages"),
        ({"creation": [[1], []]}, ("creation", 0, 0), "the name of a group, or a lane"),
        ({"colour": "red"}, ("colour",), "one of the keys microbatches"),
    ],
)
def test_a_mistake_in_json_is_pointed_at(changes, path, expected):
    text = json.dumps({**GOOD, **changes}, indent=1)
    assert from_json(json.dumps(GOOD)).num_stages == 2
    with pytest.raises(PlanSyntaxError) as error:
        from_json(text)
    assert expected in error.value.expected
    assert (error.value.line, error.value.column) == locate(text, path)[:2]
    value = {**GOOD, **changes}
    for key in path:
        value = value[key]
    rest = "\n".join(text.splitlines()[error.value.line - 1 :])[error.value.column - 1 :]
    assert json.JSONDecoder().raw_decode(rest)[0] == value


def test_json_that_is_none_is_pointed_at():
    with pytest.raises(PlanSyntaxError, match="line 2, column 3"):
        from_json("{\n  microbatches: 1}")
    with pytest.raises(PlanSyntaxError, match="line 1, column 1: found an object without it; expected the key 'mod"):
        from_json('{"microbatches": 1}')
    with pytest.raises(PlanSyntaxError, match="expected an object"):
        from_json("[]")


def test_parts_that_do_not_fit_are_a_plan_error_in_every_form():
    with pytest.raises(PlanError, match="covers 1 stages"):
        from_json(json.dumps({**GOOD, "placement": [[0]]}))
