"""Actions: what is refused at birth, and tokens both ways."""

import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipegrid.core.edge import Direction, Edge
from pipegrid.plans.errors import PlanError
from pipegrid.plans.plan.actions import COMPUTES, MESSAGES, OFFLOADING, SHARDING, Action, ActionKind, parse_action

NUMBERS = st.integers(0, 10**9 - 1)
NAMES = st.text(string.ascii_letters + string.digits + "_.:-", min_size=1, max_size=9)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(list(ActionKind)))
    if kind in COMPUTES or kind in OFFLOADING:
        return Action(kind, draw(NUMBERS), draw(NUMBERS))
    if kind in SHARDING:
        return Action(kind, draw(NUMBERS))
    if kind is ActionKind.REDUCE:
        return Action(kind, draw(NUMBERS), group=draw(st.none() | NAMES))
    edge = Edge(*sorted(draw(st.lists(NUMBERS, min_size=2, max_size=2, unique=True))))
    if kind is ActionKind.COLLECTIVE:
        along = draw(st.booleans())
        stage = draw(st.sampled_from([edge.source, edge.destination]))
        microbatch = draw(NUMBERS if along else st.none() | NUMBERS)
        return Action(kind, stage, microbatch, edge if along else None, draw(NAMES))
    at_source = kind in (ActionKind.SEND_F, ActionKind.RECV_B)
    return Action(kind, edge.source if at_source else edge.destination, draw(NUMBERS), edge)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions())
def test_a_token_reads_back_to_an_equal_action(action):
    again = parse_action(str(action))
    assert again == action
    assert hash(again) == hash(action)


@pytest.mark.parametrize(
    ("token", "kind", "stage", "microbatch", "edge", "group", "direction"),
    [
        ("3F7", "F", 3, 7, None, None, None),
        ("3W0", "W", 3, 0, None, None, None),
        ("3SEND_F7>4", "SEND_F", 3, 7, Edge(3, 4), None, Direction.FORWARD),
        ("4RECV_F7<3", "RECV_F", 4, 7, Edge(3, 4), None, Direction.FORWARD),
        ("4SEND_B7>3", "SEND_B", 4, 7, Edge(3, 4), None, Direction.BACKWARD),
        ("3RECV_B7<4", "RECV_B", 3, 7, Edge(3, 4), None, Direction.BACKWARD),
        ("3REDUCE@tied", "REDUCE", 3, None, None, "tied", None),
        ("3REDUCE", "REDUCE", 3, None, None, None, None),
        ("3COLLECTIVE7>5@bridge", "COLLECTIVE", 3, 7, Edge(3, 5), "bridge", Direction.FORWARD),
        ("5COLLECTIVE7>3@bridge", "COLLECTIVE", 5, 7, Edge(3, 5), "bridge", Direction.BACKWARD),
        ("5COLLECTIVE@all", "COLLECTIVE", 5, None, None, "all", None),
    ],
)
def test_tokens(token, kind, stage, microbatch, edge, group, direction):
    action = Action(ActionKind[kind], stage, microbatch, edge, group)
    assert str(action) == token
    assert parse_action(token) == action
    assert action.direction is direction
    assert action.kind.is_message == (action.kind in MESSAGES)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "is not an action"),
        ("F7", "is not an action"),
        ("3F7x", "is not an action"),
        ("3 F7", "is not an action"),
        ("٣F7", "is not an action"),
        ("3F99999999999", "is not an action"),
        ("3G7", "'G' is not a kind of action; the kinds are F, B, I, W, SEND_F"),
        ("3SEND_F7<4", "'3SEND_F7<4' points the wrong way; a SEND_F is written with '>'"),
        ("4RECV_F7>3", "a RECV_F is written with '<'"),
        ("3F", "3F: a F needs microbatch"),
        ("3SEND_F7", "3SEND_F7: a SEND_F needs edge"),
        ("3F7>4", "3F7>4: a F takes no edge"),
        ("3F7@g", "3F7@g: a F takes no group"),
        ("3REDUCE7", "3REDUCE7: a REDUCE takes no microbatch"),
        ("3COLLECTIVE7", "3COLLECTIVE7: a COLLECTIVE needs group"),
        ("3COLLECTIVE>4@g", "3COLLECTIVE>4@g: a COLLECTIVE needs microbatch"),
        ("4SEND_F7>3", "a SEND_F of stage 4 names edge 4>3; edges ascend"),
        ("3SEND_F7>3", "a SEND_F of stage 3 names edge 3>3; edges ascend"),
    ],
)
def test_a_bad_token_says_what_would_be_right(token, message):
    with pytest.raises(PlanError) as error:
        parse_action(token)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("G", 0, 0), "'G' is not a kind of action"),
        ((ActionKind.F, -1, 0), "stage of a F is -1; it must be an integer of at least 0"),
        ((ActionKind.F, True, 0), "stage of a F is True; it must be an integer of at least 0"),
        ((ActionKind.F, 0, -1), "microbatch of a F is -1; it must be an integer of at least 0"),
        ((ActionKind.F, 0, 1.0), "microbatch of a F is 1.0; it must be an integer of at least 0"),
        (
            (ActionKind.SEND_F, 0, 0, (0, 1)),
            "edge of a SEND_F is (0, 1) (tuple); it must be an Edge",
        ),
        (
            (ActionKind.SEND_F, 1, 0, Edge(0, 1)),
            "a SEND_F of stage 1 names edge 0>1; its end is stage 0",
        ),
        (
            (ActionKind.SEND_B, 0, 0, Edge(0, 1)),
            "a SEND_B of stage 0 names edge 0>1; its end is stage 1",
        ),
        (
            (ActionKind.COLLECTIVE, 2, 0, Edge(0, 1), "g"),
            "a COLLECTIVE of stage 2 names edge 0>1; its end is stage 0 or 1",
        ),
        ((ActionKind.REDUCE, 0, None, None, "a b"), "group of a REDUCE is 'a b'; it must be a group name"),
    ],
)
def test_a_bad_field_is_refused_at_birth(arguments, message):
    with pytest.raises(PlanError) as error:
        Action(*arguments)
    assert message in str(error.value)
