"""Every plan, whatever its names and however wrong: what is written reads back equal, or raises."""

import random
import re
import string

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.plans import (
    Action,
    ActionKind,
    Group,
    Plan,
    PlanError,
    from_csv,
    from_json,
    from_text,
    gpipe,
    interleaved_1f1b,
    lower,
    seq1f1b,
    to_csv,
    to_json,
    to_text,
    verify,
    with_reduce,
)
from pipegrid.plans.plan import parse_action
from plan_kit.plans import examples, module_graphs

FORMS = [(to_text, from_text), (to_csv, from_csv), (to_json, from_json)]
IDS = ["text", "csv", "json"]
# Names with the characters that the forms themselves use, and any others.
LETTERS = st.sampled_from('ab09_.-:>#," \\\n\r\t\x0b\x1c\x85\u2028\ud800é[]@') | st.characters()
MODULES = st.just("model") | st.text(LETTERS, min_size=1, max_size=6)
GROUPS = st.text(string.ascii_letters + string.digits + "_.:-", min_size=1, max_size=5)
KINDS = list(ActionKind)


@st.composite
def plans(draw):
    """Plans of any actions at all: most cannot run, some are tables that imply their header."""
    graph = draw(module_graphs(MODULES, most=3, depth=2))
    positions = draw(st.integers(1, 3))
    stages = range(graph.num_stages)
    microbatches = draw(st.integers(1, 2))
    slices = draw(st.integers(1, 2)) if len(graph.modules) == 1 else 1
    placement = [draw(st.sets(st.integers(0, positions - 1), min_size=1, max_size=2)) for _ in stages]
    groups = []
    for name in draw(st.lists(GROUPS, unique=True, max_size=2)):
        members = set(draw(st.sets(st.integers(0, positions - 1), min_size=1)))
        free = [edge for edge in graph.stage_edges if not any(edge in other.edges for other in groups)]
        edges = draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
        for edge in edges:
            members |= {*placement[edge.source], *placement[edge.destination]}
        groups.append(Group(name, members, edges=edges))

    def action():
        kind, stage = draw(st.sampled_from(KINDS)), draw(st.sampled_from(stages))
        part = draw(st.integers(0, slices - 1)) if slices > 1 else None
        piece = {"microbatch": draw(st.integers(0, microbatches - 1)), "slice": part}
        group = draw(st.sampled_from([group.name for group in groups])) if groups else None
        if kind is ActionKind.REDUCE:
            return Action(kind, stage, group=draw(st.sampled_from([None, group])))
        if kind is ActionKind.COLLECTIVE and group is not None:
            return Action(kind, stage, group=group, **draw(st.sampled_from([{}, piece])))
        if kind.is_message and graph.stage_edges:
            edge = draw(st.sampled_from(graph.stage_edges))
            return Action(kind, edge.source if kind.is_at_source else edge.destination, edge=edge, **piece)
        return Action(draw(st.sampled_from([k for k in KINDS if k.is_compute])), stage, **piece)

    def step():
        found = [action() for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
        if len(found) == 2 and all(each.kind.is_compute and len(placement[each.stage]) == 1 for each in found):
            kinds = ActionKind.F, draw(st.sampled_from([ActionKind.B, ActionKind.I]))
            return tuple(evolve(each, kind=kind) for each, kind in zip(found, kinds, strict=True))
        return found[0] if any(each.kind.is_compute for each in found) else tuple(found)

    rows = [[step() for _ in range(draw(st.integers(0, 4)))] for _ in range(positions)]
    if draw(st.booleans()):  # a whole table, where each stage acts at home
        computes = [
            Action(kind, s, m, slice=part if slices > 1 else None)
            for kind in KINDS[:2]
            for m in range(microbatches)
            for part in range(slices)
            for s in stages
        ]
        rows = [[a for a in computes if position in placement[a.stage]] for position in range(positions)]
    trained = draw(st.booleans())
    return Plan(
        positions=rows,
        graph=graph,
        placement=placement,
        num_microbatches=microbatches,
        forward_only=() if trained else stages,
        groups=groups,
        num_slices=slices,
    )


@pytest.mark.parametrize(("write", "read"), FORMS, ids=IDS)
@settings(examples(day=100, night=300), suppress_health_check=list(HealthCheck))
@given(plans())
def test_every_plan_reads_back_equal_or_raises(write, read, plan):
    written = write(plan)
    try:
        again = read(written)
    except PlanError:
        # Only a table that lacks a declared stage, microbatch or slice does not read back.
        actions = [action for position in range(plan.num_positions) for action in plan.actions(position)]
        of_microbatches = [action for action in actions if action.microbatch is not None]
        assert (
            {action.stage for action in actions} != set(range(plan.num_stages))
            or {action.microbatch for action in of_microbatches} != set(range(plan.num_microbatches))
            or {action.slice or 0 for action in of_microbatches} != set(range(plan.num_slices))
        )
        return
    assert again == plan
    assert write(again) == written


@pytest.mark.parametrize(("write", "read"), FORMS, ids=IDS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_positions_that_do_nothing_are_read_back_wherever_they_lie(write, read, rows):
    for at in range(rows + 1):
        whole = gpipe(1, 2)
        positions = [()] * at + [whole.positions[0]] + [()] * (rows - at)
        plan = evolve(whole, positions=positions, placement=[at])
        assert read(write(plan)) == plan
        assert verify(read(write(plan)))


def test_shared_parameters_are_read_back():
    plan = with_reduce(lower(gpipe(2, 2)), {"word:1.0-_": (0, 1)})
    for write, read in FORMS:
        assert read(write(plan)) == plan
    assert Edge(0, 1) in plan.graph.stage_edges


def actions_in(text, row):
    """The actions of all rows of a table, as they are written, in one form; ``row`` matches one."""
    words = [word for found in re.findall(row, text, re.MULTILINE) for word in re.findall(r"[^\s,\[\]]+", found)]
    return [str(parse_action(word)) for word in words]


ROW_OF_TEXT, ROW_OF_CSV = r"^\s*\d+\s*:([^#\n]*)", r"^([^#\n].*)"


@pytest.mark.parametrize(
    ("plan", "write", "read", "row"),
    [
        (lower(gpipe(2, 3)), to_text, from_text, ROW_OF_TEXT),
        (lower(seq1f1b(2, 2, num_slices=2), collectives={Edge(0, 1): "g"}), to_text, from_text, ROW_OF_TEXT),
        (interleaved_1f1b(2, 3), to_csv, from_csv, ROW_OF_CSV),
    ],
    ids=["messages", "slices", "csv"],
)
def test_a_changed_character_is_an_error_with_its_line_or_part_of_what_is_read(plan, write, read, row):
    written, rng, read_back = write(plan), random.Random(0), 0
    for _ in range(600):
        at, length = rng.randrange(len(written)), rng.randint(0, 1)
        changed = written[:at] + rng.choice(["", *'0123 ,:;>#[]".@FBg\n']) + written[at + length :]
        try:
            again = read(changed)
        except PlanError as error:
            assert str(error).startswith("line "), changed
            continue
        read_back += 1
        assert actions_in(write(again), row) == actions_in(changed, row), changed
    assert read_back > 50
