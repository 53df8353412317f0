"""Orders of communication are proved, or their cycle is named; a slow player with rules of its own agrees."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.edge import Edge
from pipegrid.core.graph import ModuleGraph
from pipegrid.core.order import ORDER_MODELS
from pipegrid.plans import Action, Group, Plan, PlanError, from_csv, verify
from pipegrid.plans.orders import (
    Launch,
    Orders,
    orders_from_csv,
    orders_from_json,
    orders_of_plan,
    prove_order,
)
from pipegrid.plans.plan import forward
from plan_kit.launches import MODELS, random_orders
from plan_kit.order_player import OrderPlayer
from plan_kit.plans import GENERATORS, lowered


def orders(*ranks, placement=None):
    document = {"ranks": ranks} | ({} if placement is None else {"placement": placement})
    return orders_from_json(json.dumps(document))


def rule_of(found, model, **options):
    """The rule that orders break under a model; None where they are proved."""
    try:
        prove_order(found, ORDER_MODELS[model], **options)
    except PlanError as error:
        return error.faults[0].rule
    return None


@given(random_orders(), st.sampled_from(MODELS), st.booleans(), st.booleans())
def test_the_slow_player_agrees_whether_orders_end(found, model, buffered, drains):
    try:
        prove_order(found, model, buffered=buffered, drains=drains)
        proved = True
    except PlanError as error:
        if error.faults[0].rule != "cycle":
            assert {fault.rule for fault in error.faults} <= {"order", "communicator"}
            return
        proved = False
    assert OrderPlayer(found, model, buffered=buffered, drains=drains).ends() == proved


@given(random_orders(only_waits=True), st.booleans())
def test_the_slow_player_agrees_whether_waits_for_sends_end(found, buffered):
    """On gloo, where nothing else holds a rank."""
    assert OrderPlayer(found, ORDER_MODELS["gloo"], buffered=buffered, drains=False).ends() == (
        rule_of(found, "gloo", buffered=buffered) is None
    )


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("name", GENERATORS)
def test_every_lowered_plan_ends_under_every_model(name, lanes, drains):
    for positions, microbatches in ((2, 4), (3, 3), (4, 8)):
        found = orders_of_plan(lowered(name, positions, microbatches), lanes="separate" if lanes else "one")
        for model in MODELS:
            prove_order(found, model, drains=drains)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_v", "interleaved_1f1b"])
def test_receives_one_compute_earlier_do_not_survive_a_wait_for_the_whole_device(name):
    plan = lowered(name, 4, 8)
    found = orders_of_plan(plan, lanes="separate")
    early = []
    for launches in found.ranks:
        row = []
        for launch in launches:
            received = tuple(m for m in launch.messages if m.way == "receive")
            if received:
                computes = [index for index, one in enumerate(row) if one.is_compute]
                row.insert(computes[-1] if computes else 0, evolve(launch, messages=received))
            if sent := tuple(m for m in launch.messages if m.way == "send"):
                row.append(evolve(launch, messages=sent))
            if launch.is_compute:
                row.append(launch)
        early.append(tuple(row))
    moved = Orders(tuple(early), found.begins, found.ends)
    assert rule_of(moved, "nccl-legacy", drains=True) == "cycle"
    assert rule_of(moved, "nccl-legacy") is None


def test_what_verify_proves_for_lanes_ends_with_waits_for_the_whole_device():
    """The rule of `verify`, each message holds its position, is the stronger one."""
    plan = from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    )
    verify(plan)
    for model in MODELS:
        prove_order(orders_of_plan(plan, lanes="separate"), model, drains=True)


def test_sends_at_both_ends_hang_on_one_stream_and_pass_where_sends_are_buffered():
    found = orders(["...", "0SEND_F1", "2RECV_F0", "2F0"], ["...", "1SEND_F0", "1RECV_F1", "1F1"])
    for model in ("nccl-legacy", "nccl2", "nccl-lazy", "nccl-serial"):
        assert rule_of(found, model) == "cycle"
        assert rule_of(found, model, buffered=True) is None
    assert rule_of(found, "gloo") is None


def test_a_wait_for_a_send_holds_the_host_where_the_send_alone_does_not():
    def both(*waits):
        return orders(
            ["...", "0SEND_F1", *waits[:1], "2RECV_F0", "2F0"], ["...", "1SEND_F0", *waits[1:], "1RECV_F1", "1F1"]
        )

    assert rule_of(both(), "gloo") is None
    assert rule_of(both("0WAIT_SEND_F1"), "gloo") is None  # the other rank goes on
    stuck = both("0WAIT_SEND_F1", "1WAIT_SEND_F0")
    assert rule_of(stuck, "gloo") == "cycle"
    assert rule_of(stuck, "gloo", buffered=True) is None
    with pytest.raises(PlanError, match="rank 0, launch 1: 0WAIT_SEND_F1 waits for rank 0, launch 0: 0SEND_F1>1"):
        prove_order(stuck, "gloo")


@pytest.mark.parametrize("lanes", ["one", "separate"])
@given(st.sampled_from(sorted(GENERATORS)), st.integers(2, 4), st.randoms(use_true_random=False))
def test_what_verify_proves_holds_with_waits_anywhere_behind_their_sends(lanes, name, positions, random):
    """So a table's waits are no part of its plan."""
    found = orders_of_plan(lowered(name, positions, 4), lanes=lanes)
    ranks = []
    for launches in found.ranks:
        row = list(launches)
        for label in [one.label for launch in launches for one in launch.messages if one.way == "send"]:
            sent = next(
                i for i, launch in enumerate(row) if ("send", label) in {(m.way, m.label) for m in launch.messages}
            )
            if random.random() < 0.7:
                row.insert(
                    random.choice([sent + 1, random.randint(sent + 1, len(row))]),
                    Launch("wait", waits=frozenset({label})),
                )
        ranks.append(tuple(row))
    for model in MODELS:
        prove_order(evolve(found, ranks=tuple(ranks)), model, drains=not model.host_waits)


def test_a_cycle_is_told_launch_by_launch():
    found = orders(["...", "0SEND_F1", "2RECV_F0", "2F0"], ["...", "1SEND_F0", "1RECV_F1", "1F1"])
    with pytest.raises(PlanError) as caught:
        prove_order(found, ORDER_MODELS["nccl2"])
    first, second = "rank 0, launch 0: 0SEND_F1>1", "rank 1, launch 0: 1SEND_F0>2"
    assert str(caught.value).splitlines() == [
        "deadlock under nccl2:",
        "    rank 0: ended - | under way 0SEND_F1>1 2RECV_F0<1 2F0 | not launched -",
        "    rank 1: ended - | under way 1SEND_F0>2 1RECV_F1<0 1F1 | not launched -",
        "  [cycle] ranks 0 and 1 wait for each other in a cycle",
        f"      {first} waits for rank 1, launch 1: 1RECV_F1<0, which is behind {second}",
        f"      {second} waits for rank 0, launch 1: 2RECV_F0<1, which is behind {first}",
    ]


def test_a_lone_message_and_a_batch_are_on_two_communicators_of_the_legacy_backend():
    found = orders([{"batch": [{"send": "x", "to": 1}]}], [{"receive": "x", "from": 0}])
    assert {name: rule_of(found, name) for name in ORDER_MODELS} == {
        "nccl-legacy": "communicator",
        "nccl2": None,
        "nccl-lazy": "communicator",
        "nccl-serial": None,
        "nccl-connecting": None,
        "gloo": None,
    }


@pytest.mark.parametrize(
    ("ranks", "rule"),
    [
        ([[{"send": "x", "to": 1}], []], "unpaired"),
        ([[], [{"receive": "x", "from": 0}]], "unpaired"),
        ([[{"send": "x", "to": 2}], []], "unknown-rank"),
        ([[{"send": "x", "to": 0}], []], "unknown-rank"),
        (
            [
                [{"send": "x", "to": 1}, {"send": "y", "to": 1}],
                [{"receive": "y", "from": 0}, {"receive": "x", "from": 0}],
            ],
            "order",
        ),
    ],
)
def test_a_message_with_one_end_or_out_of_order_is_a_fault(ranks, rule):
    assert rule_of(orders(*ranks), "nccl2") == rule


@pytest.mark.parametrize(
    "late",
    [
        (["0F0", "0SEND_F0"], ["1F0", "1RECV_F0"]),
        (["...", "0F0", "0SEND_F0"], ["...", "1F0", "1RECV_F0"]),
        (["0F0", "0SEND_F0", "0F1"], ["1RECV_F0", "1F0", "1F1"]),
        ([{"send": "x", "to": 1}], [{"compute": "y", "needs": ["x"]}, {"receive": "x", "from": 0}]),
        ([], [{"compute": "y", "needs": ["x"]}]),
    ],
)
def test_a_compute_that_reads_what_has_not_come_is_a_fault(late):
    assert rule_of(orders(*late), "gloo") == "late-receive"


@pytest.mark.parametrize("cut", [[], ["..."]])
def test_a_wait_before_its_send_is_a_fault(cut):
    found = orders([*cut, "0F0", "0WAIT_SEND_F0", "0SEND_F0"], [*cut, "1RECV_F0", "1F0"])
    assert rule_of(found, "gloo") == "early-wait"
    before = orders([*cut, "0WAIT_SEND_F0", "0WAIT_REDUCE_GRAD"], [*cut, "1F1"])
    assert rule_of(before, "gloo") == (None if cut else "early-wait")


def test_a_table_has_the_orders_of_its_plan_and_its_waits():
    text = (
        "0F0,0SEND_F0,0F1,[0SEND_F1 0RECV_B0],0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD\n# a comment\n"
        "1RECV_F0,,1F0,1B0,[1RECV_F1 1SEND_B0],1F1,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n\n"
    )
    for batched in (True, False):
        found = orders_from_csv(text, batched=batched)
        assert [launch.text for launch in found.ranks[1] if launch.waits] == ["1WAIT_SEND_B0", "1WAIT_SEND_B1"]
        ranks = [
            tuple(
                Launch(
                    launch.text if launch.is_compute else "",
                    tuple(evolve(message, lane=None) for message in launch.messages),
                    launch.batched,
                    launch.needs,
                )
                for launch in launches
                if not launch.waits
            )
            for each in (found, orders_of_plan(from_csv(text), batched=batched))
            for launches in each.ranks
        ]
        assert ranks[:2] == ranks[2:]
    with pytest.raises(PlanError, match="a table with a header"):
        orders_from_csv("#: microbatches 1\n0F0\n")


def test_what_a_fragment_reads_and_does_not_receive_came_before_it():
    proof = prove_order(orders(["...", "0SEND_F1"], ["...", "1F0", "1RECV_F1", "1F1"]), ORDER_MODELS["nccl2"])
    assert (proof.num_messages, proof.num_outside) == (1, 0)
    proof = prove_order(orders(["...", "0SEND_F1"], ["...", "1F0"]), ORDER_MODELS["nccl2"])
    assert (proof.num_messages, proof.num_outside) == (1, 1)
    assert "1 messages (1 with an end before the fragments)" in str(proof)


def test_a_compute_waits_for_what_a_collective_brings():
    """Two positions that share a stage's edge by a group: the consumer's forward ends after the collective."""
    graph = ModuleGraph({"a": 1, "b": 1}, [("a", "b")])
    group = Group("g", (0, 1), edges=(Edge(0, 1),))
    exchange = Action("COLLECTIVE", 0, 0, Edge(0, 1), "g")
    plan = Plan(
        positions=[[forward(0, 0), exchange], [exchange, forward(1, 0)]],
        graph=graph,
        placement=(0, 1),
        num_microbatches=1,
        forward_only=(0, 1),
        groups=(group,),
    )
    (label,) = orders_of_plan(plan).ranks[1][1].needs
    assert {message.label for message in orders_of_plan(plan).ranks[1][0].messages} == {label}


def test_what_a_fragment_lacks_was_launched_before_it_or_comes_last():
    sent = [{"send": "x", "to": 1}, {"send": "y", "to": 1}]
    other = {"send": "z", "to": 0}, {"receive": "y", "from": 0}
    assert rule_of(orders([{"receive": "z", "from": 1}, *sent], ["...", *other]), "nccl2") is None
    # Rank 1 receives x after its own send, which rank 0 receives after x.
    assert rule_of(orders([sent[0], {"receive": "z", "from": 1}], [other[0], "..."]), "nccl2") == "cycle"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "ranks"),
        ('{"ranks": []}', "ranks"),
        ('{"ranks": [["0F0"]], "stages": 1}', "stages"),
        ('{"ranks": ["0F0"]}', "ranks[0]"),
        ('{"ranks": [["0Q0"]]}', "ranks[0][0]"),
        ('{"ranks": [["0F0", "..." , "0F1"]]}', "ranks[0][1]"),
        ('{"ranks": [[{"batch": []}]]}', "ranks[0][0]"),
        ('{"ranks": [[{"batch": ["0F0"]}]]}', "ranks[0]"),
        ('{"ranks": [[{"send": "x"}]]}', "ranks[0][0]"),
        ('{"ranks": [[{"send": "x", "to": -1}]]}', "ranks[0][0].to"),
        ('{"ranks": [[{"send": 3, "to": 1}]]}', "ranks[0][0].send"),
        ('{"ranks": [[{"send": "x", "to": 1, "group": ""}]]}', "ranks[0][0].group"),
        ('{"ranks": [[{"send": "x", "to": 1, "holds": 1}]]}', "ranks[0][0]"),
        ('{"ranks": [[{"compute": "x", "needs": "abc"}]]}', "ranks[0][0].needs"),
        ('{"ranks": [[{"compute": "x", "to": 1}]]}', "ranks[0][0]"),
        ('{"ranks": [["0SEND_F0"]]}', "stage 1"),
        ('{"ranks": [["0F0"], ["0F1"]]}', "stage 0"),
        ('{"ranks": [["0F0"]], "placement": "x"}', "placement"),
    ],
)
def test_what_is_no_document_of_orders_is_an_error_that_names_the_part(text, part):
    with pytest.raises(PlanError, match=part.replace("[", r"\[")):
        orders_from_json(text)


def test_actions_may_be_lists_of_kind_stage_microbatch_and_peer():
    assert orders([["F", 0, 0], ["SEND_F", 0, 0, 1]], [["RECV_F", 1, 0, 0], ["F", 1, 0]]) == orders(
        ["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]
    )
