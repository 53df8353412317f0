"""The pure half: lanes as data, settings, errors, what a header says."""

import pickle
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.lanes import direction_lane
from pipegrid.transport import (
    Direction,
    Edge,
    LaneSpec,
    P2PConfig,
    P2PError,
    P2PMismatchError,
    P2PPeerError,
    P2PTimeoutError,
    P2PUsageError,
    pipeline_lanes,
)
from pipegrid.transport.config import as_config
from pipegrid.transport.messages.message import ShapeContract, Signature, StepShapes, TensorSpec, decode, encode
from pipegrid.transport.messages.trees import places


class TestLaneSpec:
    def test_orders_by_ranks_then_label_and_names_itself(self):
        specs = [LaneSpec(1, 0), LaneSpec(0, 1, "b"), LaneSpec(0, 1, "a"), LaneSpec(0, 0)]
        assert [str(spec) for spec in sorted(specs)] == ["0>0", "0>1[a]", "0>1[b]", "1>0"]

    def test_knows_its_pair_and_whether_it_stays_on_one_rank(self):
        assert LaneSpec(3, 1).pair == LaneSpec(1, 3).pair == (1, 3)
        assert LaneSpec(2, 2).is_local
        assert not LaneSpec(2, 3).is_local

    @pytest.mark.parametrize(("arguments", "text"), [((-1, 0), "-1"), ((0, "1"), "'1'"), ((0.5, 1), "0.5")])
    def test_refuses_what_is_no_rank(self, arguments, text):
        with pytest.raises(P2PUsageError, match=rf"LaneSpec\.\w+ is {text}; it must be an integer of at least 0"):
            LaneSpec(*arguments)

    def test_refuses_a_label_that_is_no_text(self):
        with pytest.raises(P2PUsageError, match="LaneSpec.label is 3; it must be a string of at most 4096 bytes"):
            LaneSpec(0, 1, 3)


class TestPipelineLanes:
    @pytest.mark.parametrize("count", range(1, 9))
    def test_every_neighbour_pair_has_a_lane_in_each_direction(self, count):
        ranks = [10 + 3 * index for index in range(count)]
        lanes = pipeline_lanes(ranks)
        expected = {
            direction_lane(ranks[index], ranks[(index + 1) % count], direction)
            for index in range(count)
            for direction in Direction
        }
        assert set(lanes) == expected
        assert len(lanes) == 2 * count
        assert list(lanes) == sorted(lanes)

    def test_of_two_stages_activations_and_gradients_never_share_a_lane(self):
        # Next and previous are the same rank here.
        assert [str(lane) for lane in pipeline_lanes([0, 1])] == [
            "0>1[backward]", "0>1[forward]", "1>0[backward]", "1>0[forward]",
        ]  # fmt: skip

    def test_a_v_turns_on_one_rank_and_comes_back(self):
        lanes = {str(lane) for lane in pipeline_lanes([0, 1], placement=[0, 1, 1, 0])}
        assert lanes == {
            "0>1[forward]", "1>0[backward]", "1>1[forward]", "1>1[backward]", "1>0[forward]", "0>1[backward]",
        }  # fmt: skip

    @pytest.mark.parametrize("placement", [[0], [], [0, 2], [0, -1], "01", (0.0, 1.0), (False, True), 3, (0, None)])
    def test_refuses_a_placement_that_is_none(self, placement):
        with pytest.raises(P2PUsageError, match="an index below 2 each|must be an integer|must be a list"):
            pipeline_lanes([0, 1], placement=placement)


class TestEdge:
    @pytest.mark.parametrize("stages", [("0", 1), (0, 1.0), (0, None), (False, True)])
    def test_leads_from_stage_to_stage(self, stages):
        with pytest.raises(P2PUsageError, match=r"Edge\.(source|destination) is .*; it must be an integer"):
            Edge(*stages)

    @pytest.mark.parametrize("direction", ["forward", "F", None, True])
    def test_has_a_direction_and_no_text_is_one(self, direction):
        with pytest.raises(P2PUsageError, match=f"direction is {direction!r}; it must be Direction.FORWARD or"):
            direction_lane(0, 1, direction)


class TestConfig:
    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("pipeline_dtype", "float32"),
            ("variable_seq_lengths", 1),
            ("batch_p2p_comm", None),
            ("virtual_pipeline_model_parallel_size", 0),
            ("timers", 3),
            ("shapes", "fixed"),
            ("communicators", "both"),
            ("strict", "yes"),
            ("deadline", 0),
            ("deadline", float("inf")),
            ("deadline", float("nan")),
            ("deadline", 1e10),
            ("open_deadline", True),
            ("open_deadline", 365 * 24 * 3600 + 1),
            ("receives_ahead", 1025),
            ("receives_ahead", -1),
            ("max_ctas", -1),
        ],
    )
    def test_says_which_setting_has_which_wrong_value(self, setting, value):
        with pytest.raises(P2PUsageError, match=f"{setting} is {value!r}; it must be"):
            P2PConfig(**{setting: value})

    @pytest.mark.parametrize("shapes", ["given", "agreed"])
    def test_refuses_fixed_shapes_that_vary(self, shapes):
        with pytest.raises(P2PUsageError, match=f"shapes is '{shapes}'.*variable_seq_lengths is True"):
            P2PConfig(variable_seq_lengths=True, shapes=shapes)

    def test_lengths_that_vary_come_with_headers(self):
        assert P2PConfig().shape_mode == "agreed"
        assert P2PConfig(variable_seq_lengths=True).shape_mode == "header"
        assert P2PConfig(variable_seq_lengths=True, shapes="learned").shape_mode == "learned"

    def test_takes_any_object_and_what_it_lacks_is_the_default(self):
        theirs = SimpleNamespace(pipeline_dtype=torch.bfloat16, variable_seq_lengths=True, hidden_size=12)
        assert as_config(theirs) == P2PConfig(pipeline_dtype=torch.bfloat16, variable_seq_lengths=True)
        assert as_config(None) == P2PConfig()
        ours = P2PConfig(strict=True)
        assert as_config(ours) is ours

    def test_checks_any_object_like_its_own(self):
        with pytest.raises(P2PUsageError, match="pipeline_dtype is 'bf16'"):
            as_config(SimpleNamespace(pipeline_dtype="bf16"))
        with pytest.raises(P2PUsageError, match="no ring exchange"):
            as_config(SimpleNamespace(use_ring_exchange_p2p=True))

    @pytest.mark.parametrize(
        ("config", "remedy"),
        [
            (
                {"pipeline_dtype": torch.float32},
                "it must be None or have some of P2PConfig's attributes",
            ),
            (3, "the config is 3; it must be None or"),
            (P2PConfig, "P2PConfig.pipeline_dtype is .*; it must be"),
            ([P2PConfig()], "it must be None or have some"),
        ],
    )
    def test_refuses_what_would_silently_be_the_default(self, config, remedy):
        with pytest.raises(P2PUsageError, match=remedy):
            as_config(config)

    def test_is_frozen(self):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            P2PConfig().deadline = 3


class TestErrors:
    def test_subclass_what_callers_may_catch(self):
        assert issubclass(P2PError, RuntimeError)
        assert issubclass(P2PUsageError, ValueError)
        assert issubclass(P2PTimeoutError, TimeoutError)
        assert issubclass(P2PPeerError, ConnectionError)

    def test_a_timeout_tells_and_keeps_who_waited_for_whom(self):
        error = P2PTimeoutError(rank=1, peer=2, lane="2>1[forward]", sequence=7, seconds=2.5, what="receiving")
        assert "rank 1 waited 2.5 s for receiving message 7 of lane 2>1[forward]" in str(error)
        assert "no answer from rank 2, which may itself be waiting for another rank" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert (again.rank, again.peer, again.lane, again.sequence, again.seconds) == (1, 2, "2>1[forward]", 7, 2.5)


specs = st.builds(
    TensorSpec,
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    shape=st.lists(st.integers(0, 5), max_size=5),
    requires_grad=st.booleans(),
)


@st.composite
def signatures(draw):
    tensors = []

    def grow(depth):
        kind = draw(st.sampled_from(["none", "tensor", "tensor"] + ["list", "tuple", "dict"] * (depth < 3)))
        if kind == "none":
            return None
        if kind == "tensor":
            tensors.append(draw(specs))
            return len(tensors) - 1
        size = draw(st.integers(0, 3))
        if kind == "dict":
            keys = draw(st.lists(st.text(max_size=4) | st.integers(), min_size=size, max_size=size, unique=True))
            return kind, tuple((key, grow(depth + 1)) for key in keys)
        return kind, tuple(grow(depth + 1) for _ in range(size))

    return Signature(grow(0), tensors, draw(st.text(max_size=4)))


class TestSignature:
    @given(st.integers(0, 10**6), st.booleans(), signatures())
    def test_a_header_says_what_it_was_told(self, sequence, agreed, message):
        found = decode(encode(sequence=sequence, agreed=agreed, signature=message))
        assert found == (sequence, agreed, message)
        assert found[2].gradients == message.gradients

    @given(signatures())
    def test_leaves_count_the_tensors_in_order(self, message):
        assert [leaf for _, leaf in places(message.tree) if leaf is not None] == list(range(len(message.tensors)))

    def test_reads_like_a_payload(self):
        two = (TensorSpec("float32", (2, 3)), TensorSpec("int64", ()))
        assert str(Signature(0, two[:1])) == "float32[2, 3]"
        assert str(Signature(("dict", (("a", 0), ("b", ("tuple", (None, 1))))), two)) == (
            "{'a': float32[2, 3], 'b': (None, int64[])}"
        )
        assert str(Signature(("list", (None,)), ())) == "[None]"

    def test_marks_of_the_sender_count_where_there_are_any(self):
        plain, marked = TensorSpec("float32", (1,)), TensorSpec("float32", (1,), requires_grad=True)
        tree = ("list", (0, 1))
        assert Signature(tree, (plain, plain)).gradients == (True, True)
        assert Signature(tree, (plain, marked)).gradients == (False, True)

    def test_marks_are_no_part_of_what_is_agreed(self):
        assert TensorSpec("float32", (1,)) == TensorSpec("float32", (1,), requires_grad=True)
        assert TensorSpec("float32", (1,)) != TensorSpec("float16", (1,))


def one(*shape):
    return Signature(0, (TensorSpec("float32", shape),))


class TestAgreement:
    def test_agreed_once_needs_no_header_again_and_refuses_another_shape(self):
        sender, receiver = (ShapeContract(LaneSpec(0, 1), "agreed") for _ in range(2))
        assert receiver.receive() is None
        assert sender.send(one(2), 0)
        receiver.announce(one(2), agreed=True)
        for sequence in range(1, 4):
            assert not sender.send(one(2), sequence)
            assert receiver.receive() == one(2)
        with pytest.raises(P2PMismatchError, match=r"message 4 of lane 0>1 is float32\[3\], but float32\[2\]"):
            sender.send(one(3), 4)

    def test_renewed_starts_over(self):
        sender = ShapeContract(LaneSpec(0, 1), "agreed")
        assert sender.send(one(2), 0)
        sender.renew()
        assert sender.send(one(3), 1)

    def test_with_headers_each_message_has_one(self):
        sender = ShapeContract(LaneSpec(0, 1), "header")
        assert sender.send(one(2), 0)
        assert sender.send(one(3), 1)

    def test_a_step_begins_with_its_own_messages_whatever_the_one_before_has_left(self):
        sender, receiver = (ShapeContract(LaneSpec(0, 1), "learned") for _ in range(2))
        step = StepShapes((one(2), one(3)), 1)
        for _ in range(2):
            for side in (sender, receiver):
                side.begin_step(step, learn=False)
            assert not sender.send(one(2), 0)
            assert receiver.receive() == one(2)
        sender.begin_step(None, learn=True)
        assert sender.send(one(4), 1)

    def test_each_message_of_a_known_step_is_checked_before_any_of_its_batch_is_sent(self):
        plain, marked = TensorSpec("float32", (1,)), TensorSpec("float32", (1,), requires_grad=True)
        every, first = (Signature(("list", (0, 1)), tensors) for tensors in ((marked, marked), (marked, plain)))
        sender = ShapeContract(LaneSpec(0, 1), "learned")
        sender.begin_step(StepShapes((every, first), 1), learn=False)
        sender.check(every, 0)
        with pytest.raises(P2PUsageError, match="in message 1 of lane 0>1, .*, tensor 1 requires grad, but was"):
            sender.check(every, 1, ahead=1)
        assert not sender.send(every, 0)
        with pytest.raises(P2PMismatchError, match="message 1 of lane 0>1 is .*, but .* was announced to rank 1"):
            sender.send(one(2), 1)
