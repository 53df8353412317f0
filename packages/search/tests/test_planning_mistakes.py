"""The mistakes of a user's first hour with planning: each is one typed error that names the value and the rule."""

from pathlib import Path

import pytest

from pipegrid.core.graph import ModuleGraph, ModuleGraphError
from pipegrid.plans import (
    Action,
    ActionKind,
    Costs,
    CostsError,
    Group,
    Plan,
    PlanError,
    chain,
    compute_plan,
    find_schedule,
    from_csv,
    from_json,
    from_text,
    gpipe,
    interleaved_1f1b,
    lower,
    multi_module_1f1b,
    offload,
    one_f_one_b,
    simulate,
    to_text,
    u_shape,
    verify,
    zero_bubble_h1,
)
from pipegrid.search import compare, greedy
from pipegrid.timeline import TimelineError, ascii_timeline, scaled, timeline, write_svg

PLAN = one_f_one_b(2, 3)
GRAPH = ModuleGraph({"enc": 1, "llm": 2}, {"enc": ["llm"]})

MISTAKES = {
    "no positions": (PlanError, lambda: one_f_one_b(0, 8), "num_positions is 0; it must be an integer of at least 1"),
    "no microbatches": (PlanError, lambda: gpipe(4, 0), "num_microbatches is 0; it must be an integer of at least 1"),
    "a size as text": (PlanError, lambda: gpipe("4", 8), "num_positions is '4'; it must be an integer"),
    "a size as float": (PlanError, lambda: zero_bubble_h1(4.0, 8), "num_positions is 4.0; it must be an integer"),
    "a flag as size": (PlanError, lambda: gpipe(True, 8), "num_positions is True; it must be an integer"),
    "no chunks": (PlanError, lambda: interleaved_1f1b(2, 4, num_chunks=0), "num_chunks is 0; it must be an integer"),
    "stages that do not fit": (
        PlanError,
        lambda: interleaved_1f1b(2, 4, num_chunks=2, num_stages=5),
        "num_stages is 5; 2 chunks on 2 positions are 3..4",
    ),
    "a schedule that is none": (PlanError, lambda: find_schedule("1f2b"), "no schedule '1f2b' .did you mean '1f1b'"),
    "stages of a V": (
        PlanError,
        lambda: find_schedule("zero_bubble_v").plan(2, 4, num_stages=3),
        "num_stages is 3; zero_bubble_v has 4 on 2",
    ),
    "chunks of a V": (
        PlanError,
        lambda: find_schedule("zero_bubble_v").plan(2, 4, 3),
        "zero_bubble_v has 2 per",
    ),
    "a dict as graph": (PlanError, lambda: multi_module_1f1b({"a": 1}, 2), "graph is {'a': 1}.*give a ModuleGraph"),
    "an unknown module": (
        ModuleGraphError,
        lambda: multi_module_1f1b(GRAPH, 2, forward_only=["vision"]),
        "there is no module 'vision'; the graph has .*'enc', 'llm'",
    ),
    "a name for a list of names": (
        PlanError,
        lambda: multi_module_1f1b(GRAPH, 2, forward_only="enc"),
        "forward_only is 'enc'; ",
    ),
    "a short placement": (
        PlanError,
        lambda: multi_module_1f1b(GRAPH, 2, placement=[0, 1]),
        "the placement covers 2 stages and the graph has 3",
    ),
    "a placement that is none": (
        PlanError,
        lambda: multi_module_1f1b(GRAPH, 2, placement=3),
        "placement is 3; it",
    ),
    "a placement on a string": (
        PlanError,
        lambda: compute_plan([[]], graph=1, placement=["0"], num_microbatches=1),
        "placement\\[0\\] is '0'; it must be one position from 0, or several",
    ),
    "a chain of nothing": (ModuleGraphError, lambda: chain(0), "num_stages is 0; it must be an integer of at least 1"),
    "an action as text": (
        PlanError,
        lambda: compute_plan([["0F0"]], graph=1, placement=[0], num_microbatches=1),
        "step '0F0' is neither an Action nor a batch of Actions",
    ),
    "one order for orders": (
        PlanError,
        lambda: compute_plan([Action(ActionKind.F, 0, 0)], graph=1, placement=[0], num_microbatches=1),
        "positions is .*; it must be a list with the steps of each position",
    ),
    "a kind that is none": (
        PlanError,
        lambda: Action("f", 0, 0),
        "'f' is not a kind of action; the kinds are F, B, I, W",
    ),
    "a group of nothing": (PlanError, lambda: Group("g", []), "Group.positions is .*; it must be one position from 0"),
    "a generator that was not called": (PlanError, lambda: verify(gpipe), "plan is <function gpipe.*give a Plan, such"),
    "nothing to lower": (PlanError, lambda: lower(None), "plan is None; give a Plan"),
    "a word for receives": (PlanError, lambda: lower(PLAN, receives="now"), "receives is 'now'; .*'late' or 'early'"),
    "a word for lanes": (PlanError, lambda: verify(PLAN, lanes="both"), "lanes is 'both'; .*'separate' or 'shared'"),
    "a limit with a unit": (PlanError, lambda: verify(PLAN, memory_limit="4GB"), "memory_limit is '4GB'"),
    "a limit below zero": (PlanError, lambda: greedy(Costs(), -1, num_positions=2, num_microbatches=4), "memory_limit"),
    "a cap that is too low": (
        PlanError,
        lambda: greedy(Costs(), 0.5, num_positions=2, num_microbatches=4),
        "memory_limit 0.5 does not hold one microbatch at a time; the least that works is 1",
    ),
    "costs below zero": (CostsError, lambda: Costs(F=-1), "F is -1"),
    "costs as text": (CostsError, lambda: Costs(F="12"), "F is '12'"),
    "costs of other stages": (
        CostsError,
        lambda: simulate(PLAN, Costs(F=[1, 2, 3])),
        "F is given for 3 stages",
    ),
    "a dict for costs": (CostsError, lambda: simulate(PLAN, {"F": 1}), "costs is .*{'F': 1}.*it must be Costs"),
    "a dict for costs of a comparison": (
        PlanError,
        lambda: compare(2, 4, costs={"F": 1}),
        "costs is .*it must be Costs",
    ),
    "a dict for costs of a search": (
        PlanError,
        lambda: greedy({"F": 1}, num_positions=2, num_microbatches=4),
        "costs is .*it must be Costs",
    ),
    "costs without work": (CostsError, lambda: u_shape(2, 2, costs=Costs(F=0, I=0, W=0)), "no stage takes any time"),
    "costs in a set": (CostsError, lambda: Costs(F={1.0, 2.0}), "F is {1.0, 2.0} .*; it must be a finite number"),
    "the least that works, in full": (
        PlanError,
        lambda: greedy(Costs(activation=[12345678.7, 1]), 1, num_positions=2, num_microbatches=4),
        "the least that works is 12345678.7",
    ),
    "costs for a duration": (
        PlanError,
        lambda: lower(PLAN, duration=Costs()),
        "duration is Costs.*; it must be a function from an action",
    ),
    "an edge as text": (
        PlanError,
        lambda: lower(PLAN, collectives={"0>1": "bridge"}),
        "collectives is {'0>1': 'bridge'} .*; it must be a dict from an Edge to its group's name",
    ),
    "sizes that are no numbers": (
        PlanError,
        lambda: offload(PLAN, 1, sizes=[1.0, float("nan")]),
        r"sizes\[1\] is nan; it must be a finite number",
    ),
    "a schedule to compare": (
        PlanError,
        lambda: compare(2, 4, names=["gpip"]),
        "there is no schedule 'gpip'",
    ),
    "a generator to draw": (TimelineError, lambda: timeline(gpipe), "source is .*<function gpipe.*give a Plan"),
    "nothing to draw": (TimelineError, lambda: write_svg([], "x.svg"), "timeline is .*; give timeline"),
    "a plan to write": (TimelineError, lambda: write_svg(PLAN, "x.svg"), "give timeline"),
    "no room": (TimelineError, lambda: ascii_timeline(timeline(PLAN), width=0), "width is 0; it must be an integer"),
    "no scale": (TimelineError, lambda: scaled(timeline(PLAN), 0, unit="s"), "factor is 0; "),
    "a path for text": (PlanError, lambda: from_text(Path("plan.txt")), "it must be the text itself"),
    "a path for CSV": (PlanError, lambda: from_csv(Path("plan.csv")), "it must be the text itself"),
    "a path for JSON": (PlanError, lambda: from_json(Path("plan.json")), "it must be the text itself"),
    "a generator to write": (PlanError, lambda: to_text(gpipe), "plan is <function gpipe.*give a Plan, such"),
    "a position too far": (
        PlanError,
        lambda: list(PLAN.actions(2)),
        "there is no position 2; the plan has",
    ),
    "a stage too far": (
        PlanError,
        lambda: Plan(positions=[[]], graph=chain(1), placement=[1], num_microbatches=1),
        "stage 0 is placed on position 1; the plan has 0..0",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_first_mistake_is_a_typed_error_that_names_value_and_rule(what):
    error, call, text = MISTAKES[what]
    with pytest.raises(error, match=text):
        call()
