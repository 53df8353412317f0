"""Text, CSV and JSON, both ways; and what a mistake in a table is told."""

import json

import pytest
from torch.distributed.pipelining.schedules import _Action

from pipegrid.bridges.graph import ModuleGraph
from pipegrid.schedules import (
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
from pipegrid.schedules.plan.json_reading import locate
from pipegrid.transport.edge import Edge

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
        ("0: 0F0 2F0 2B0", 1, 8, "'2F0'", "actions of stage 1 too, which the table lacks, or a 'placement' line"),
        ("bogus 3\n0: 0F0", 1, 1, "'bogus'", "a position such as '0:' or one of microbatches, modules"),
        ("microbatches 2 3\n0: 0F0", 1, 16, "'3'", "one number"),
        ("microbatches\n0: 0F0", 1, 13, "the end of the line", "one number"),
        ("microbatches 4\n0: 0F0 0F1", 1, 14, "'4'", "2, the microbatches that the table has"),
        ("microbatches 1\nmodules m:1\nplacement 0\n0:\n", 5, 1, "the end", "an action; no position does anything"),
        ("microbatches 0\n0: 0F0", 1, 14, "'0'", "at least 1 microbatch"),
        ("microbatches -1\n0: 0F0", 1, 14, "'-1'", "an integer from 0"),
        ("microbatches 99999999999\n0: 0F0", 1, 14, "'99999999999'", "of at most 9 digits"),
        ("microbatches 1\nmicrobatches 1\n0: 0F0", 2, 1, "'microbatches'", "no second 'microbatches' line"),
        ("modules m\n0: 0F0", 1, 9, "'m'", "a module as name:depth"),
        ("modules m:x\n0: 0F0", 1, 11, "'x'", "a depth, an integer"),
        ("modules m:0\n0: 0F0", 1, 11, "'0'", "a depth of at least 1"),
        ("modules m:3\n0: 0F0 1F0", 1, 11, "'3'", "a depth of at most 2, as the table has only stages 0..1"),
        ("modules a:1 b:2\n0: 0F0", 1, 15, "'2'", "stages of this module in the table, which has only stages 0..0"),
        ("modules a:1 a:1\n0: 0F0", 1, 13, "'a:1'", "a module that fits (modules are declared twice"),
        ('modules "m:1\n0: 0F0', 1, 9, "'\"m:1'", "the closing"),
        ("modules\n0: 0F0", 1, 8, "the end of the line", "modules as name:depth"),
        ("edges a>b\n0: 0F0", 1, 7, "'a>b'", "a 'modules' line"),
        ("modules a:1 b:1\nedges a-b\n0: 0F0", 2, 7, "'a-b'", "source>destination"),
        (
            "modules a:1 b:1\nedges a>b a>c\n0: 0F0 1F0",
            2,
            11,
            "'a>c'",
            "an edge that fits (edge 'a' -> 'c' names",
        ),
        ("modules a:1 b:1\nedges a>b b>a\n0: 0F0", 2, 11, "'b>a'", "an edge that fits (the modules form a cycle"),
        ("placement x\n0: 0F0", 1, 11, "'x'", "a position, an integer from 0"),
        ("placement 0 0,,1\n0: 0F0", 1, 15, "''", "a position, an integer from 0"),
        ("placement 0,0\n0: 0F0", 1, 11, "'0,0'", "one or more positions, each once"),
        ("placement\n0: 0F0", 1, 10, "the end of the line", "the position of stage 0; the graph has 1 stage"),
        ("placement 0\n0: 0F0 1F0", 1, 12, "the end of the line", "the position of stage 1; the graph has 2"),
        ("placement 0 1\n0: 0F0", 1, 13, "'1'", "no more than the positions of 1 stage"),
        ("placement 0 0,7\n0: 0F0 1F0", 1, 15, "'7'", "a position in 0..0"),
        ("forward_only x\n0: 0F0", 1, 14, "'x'", "a stage, an integer"),
        ("forward_only 0 3\n0: 0F0", 1, 16, "'3'", "a stage in 0..0"),
        ("forward_only 1\n0: 0F0 1F0", 1, 14, "'1'", "stage 0 beside it: of all that it feeds (1), no gradient"),
        ("group t\n0: 0F0", 1, 8, "the end of the line", "a name and positions"),
        ("group t 0 edges\n0: 0F0", 1, 16, "the end of the line", "a name and positions"),
        ("group t 0 edge 0>1\n0: 0F0", 1, 11, "'edge'", "'edges' or 'tied', once"),
        ("group t 0 tied 0 tied 0\n0: 0F0", 1, 18, "'tied'", "'edges' or 'tied', once"),
        ("group t 0 edges 1>0\n0: 0F0", 1, 17, "'1>0'", "an edge between stages, such as 1>2"),
        ("group t 0 edges 0>1\n0: 0F0", 1, 17, "'0>1'", "an edge of the graph, which has none"),
        ("group s 0\ngroup t 0 edges 0>1,0>2\n0: 0F0 1F0", 2, 21, "'0>2'", "an edge of the graph, which has 0>1"),
        ("group s 0 edges 0>1\ngroup t 0 edges 0>1\n0: 0F0 1F0", 2, 17, "'0>1'", "no other group carries; 's' has"),
        ("group t 0\ngroup s 0\ngroup t 0\n0: 0F0", 3, 7, "'t'", "a name that no other group has"),
        ("group t 0,0\n0: 0F0", 1, 9, "'0,0'", "one or more positions, each once"),
        ("group t 0 tied 0,3\n0: 0F0 0B0", 1, 18, "'3'", "a stage in 0..0"),
        ("group t 0 tied 0\n0: 0F0", 1, 16, "'0'", "a stage that is trained; 0 is forward_only"),
        ("group t 0,1 tied 0\n0: 0F0 0B0\n1: 1F0 1B0", 1, 11, "'1'", "only the positions of the tied stages, [0]"),
        ("group t 0 tied 0,1\n0: 0F0 0B0\n1: 1F0 1B0", 1, 9, "'0'", "all positions of its stages, [0, 1]"),
        ("group t 0 tied 0,x\n0: 0F0", 1, 18, "'x'", "a stage, an integer"),
        ("group t 0,4\n0: 0F0", 1, 11, "'4'", "a position in 0..0"),
        ("placement 0\ngroup replace 0,9\n0: 0F0", 2, 17, "'9'", "a position in 0..0"),
        ("group a>b 0\n0: 0F0", 1, 7, "'a>b'", "a group name: letters, digits"),
        ("create 0\ncreate 3 F0>1\n0: 0F0", 2, 8, "'3'", "a position in 0..0"),
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
        ({"microbatches": "1"}, ("microbatches",), "an integer from 1"),
        ({"microbatches": True}, ("microbatches",), "an integer from 1"),
        ({"microbatches": 0}, ("microbatches",), "an integer from 1"),
        ({"microbatches": 10**400}, ("microbatches",), "an integer from 1"),
        ({"microbatches": 2}, ("microbatches",), "1, the microbatches that the table has"),
        ({"modules": [["a", 1], ["b", 10**9]]}, ("modules", 1, 1), "a depth of at most 1"),
        ({"modules": [["a", 1], ["a", 1]]}, ("modules", 1), "a module that fits (modules are declared twice"),
        ({"positions": [[], []]}, ("positions",), "an action; no position does anything"),
        ({"positions": []}, ("positions",), "an action"),
        ({"modules": [["a", -1]]}, ("modules", 0, 1), "a depth, an integer"),
        ({"modules": [["a"]]}, ("modules", 0), "a pair of a name and a depth"),
        ({"edges": [["a", "b"], ["a", "c"]]}, ("edges", 1), "the unknown module 'c'"),
        ({"edges": [["a", ["b"]]]}, ("edges", 0, 1), "the name of a module"),
        ({"placement": [[0], ["x"]]}, ("placement", 1, 0), "a position, an integer"),
        ({"placement": [[0], [1, 7]]}, ("placement", 1, 1), "a position in 0..1"),
        ({"placement": [[0], []]}, ("placement", 1), "one or more positions, each once"),
        ({"placement": [[0]]}, ("placement",), "the position of stage 1; the graph has 2 stages"),
        ({"placement": [[0], [1], [1]]}, ("placement", 2), "no more than the positions of 2 stages"),
        ({"forward_only": [0, 1, 3]}, ("forward_only", 2), "a stage in 0..1"),
        ({"groups": [{"name": "g"}]}, ("groups", 0), 'a group as {"name"'),
        ({"groups": [{"name": "a b", "positions": [0]}]}, ("groups", 0, "name"), "a group name: letters"),
        ({"groups": [{"name": "g", "positions": [1, 9]}]}, ("groups", 0, "positions", 1), "a position in 0..1"),
        ({"groups": [{"name": "g", "positions": [0], "edges": ["0>1", "0>2"]}]}, ("groups", 0, "edges", 1), "0>1"),
        ({"groups": [{"name": 7, "positions": [0]}]}, ("groups", 0, "name"), "a name"),
        ({"groups": [{"name": "g", "positions": [0], "edges": ["1"]}]}, ("groups", 0, "edges", 0), "such as 1>2"),
        ({"groups": [{"name": "g", "positions": [0], "tied": 3}]}, ("groups", 0, "tied"), "a list of stages"),
        ({"creation": [[]]}, ("creation",), "one list for each of 2 positions"),
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
    with pytest.raises(PlanSyntaxError, match="line 1, column 1: found the end; expected a JSON value"):
        from_json("")
    with pytest.raises(PlanSyntaxError, match=r"column 1: found '\[\[.*expected brackets that nest less deeply"):
        from_json("[" * 200_000)
    with pytest.raises(PlanSyntaxError, match=r"line 1, column 18: found 9{57}\.\.\.; expected a number of microb"):
        from_json(json.dumps(GOOD).replace('"microbatches": 1', '"microbatches": ' + "9" * 5000))


def test_parts_that_do_not_fit_are_a_plan_error_in_every_form():
    expected = "the position of stage 1; the graph has 2 stages"
    for read, text in [
        (from_json, json.dumps({**GOOD, "placement": [[0]]})),
        (from_text, "placement 0\n0: 0F0\n1: 1F0\n"),
        (from_csv, "#: placement 0\n0F0\n1F0\n"),
    ]:
        with pytest.raises(PlanSyntaxError) as error:
            read(text)
        assert error.value.expected == expected


@pytest.mark.parametrize(
    ("table", "line", "column", "found", "home"),
    [
        ("0: 0F0 0F1 0B0 0B1\n1: 0F0 1F1 1B0 1B1\n", 2, 4, "'0F0'", "stage 0 is at home on position 0"),
        ("0: 0F0 1F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1\n", 1, 8, "'1F1'", "stage 1 is at home on position 1"),
        ("0: 0F0 0SEND_F0>1 0B0\n1: 1F0 0RECV_B0<1 1B0\n", 2, 8, "'0RECV_B0<1'", "stage 0 is at home on position 0"),
    ],
)
def test_a_slip_in_a_table_without_placement_is_one_fault_at_its_token(table, line, column, found, home):
    with pytest.raises(PlanSyntaxError) as error:
        from_text(table)
    assert (error.value.line, error.value.column, error.value.found) == (line, column, found)
    assert home in error.value.expected


def test_a_colocated_module_is_where_all_its_computes_are():
    header = "modules enc:1 llm:2\nedges enc>llm\n"
    plan = from_text(header + "0: 0F0 1F0 1B0 0B0\n1: 0F0 2F0 2I0 2W0 0B0\n")
    assert plan.placement == ((0, 1), (0,), (1,))
    bridged = lower(multi_module_1f1b(ModuleGraph({"a": 1, "b": 1}, {"a": ["b"]}), 1), collectives={Edge(0, 1): "g"})
    lines = [line for line in to_text(bridged).splitlines() if not line.startswith("placement")]
    assert from_text("\n".join(lines)) == bridged


def test_a_depth_beyond_the_table_is_refused_before_its_stages_are_counted_out():
    with pytest.raises(PlanSyntaxError, match="line 1, column 11: found '60000000'; expected a depth of at most 1"):
        from_text("modules m:60000000\n0: 0F0 0B0\n")


def test_nothing_beside_an_overlapped_pair_is_lost():
    with pytest.raises(PlanSyntaxError, match=r"column 9: found '0F1 \(1F1;1B0\)OVERLAP_F_B'; expected a cell of"):
        from_csv("0F0,1F0,0F1 (1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n")
    with pytest.raises(PlanSyntaxError, match="line 1, column 5: found"):
        from_csv("0F0,(1F1;1B0)OVERLAP_F_B 0F1\n")
    spaced = from_csv("0F0,0F1,1F0, ( 1F1 ; 1B0 )OVERLAP_F_B ,0B0,1B1,0B1\n")
    assert spaced == from_csv("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1\n")
