"""Counts and tables: the seed's example to the letter, and properties for every size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.core.errors import StepArgumentError
from pipegrid.plans.plan.actions import ActionKind
from pipegrid.schedules import forward_only, interleaved_1f1b, one_f_one_b
from pipegrid.schedules.megatron.counts import (
    check_first_val_step,
    convert_schedule_table_to_order,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
)
from plan_kit.groups import Group

from ..kit.of_job import OfJob

SMALL = st.integers(1, 8)


@frozen(kw_only=True)
class Config:
    hidden_size: int = 16
    sequence_parallel: bool = False
    variable_seq_lengths: bool = False


def test_the_table_of_five_microbatches_in_groups_of_three_with_two_chunks():
    table = get_schedule_table(5, 2, 3)
    assert [microbatch for microbatch, _ in table] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_the_order_for_that_table_with_a_warmup_of_five():
    order = convert_schedule_table_to_order(5, 2, get_schedule_table(5, 2, 3))
    assert order == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


@given(SMALL, SMALL, SMALL)
def test_a_table_holds_every_pair_once_and_each_chunk_in_microbatch_order(microbatches, chunks, group):
    table = get_schedule_table(microbatches, chunks, group)
    assert sorted(table) == [(m, c) for m in range(microbatches) for c in range(chunks)]
    for chunk in range(chunks):
        assert [m for m, c in table if c == chunk] == list(range(microbatches))


@given(SMALL, SMALL, SMALL, st.integers(0, 64))
def test_an_order_runs_each_chunk_forward_and_backward_once_per_microbatch(m, v, n, warmup):
    table = get_schedule_table(m, v, n)
    order = convert_schedule_table_to_order(min(warmup, len(table)), v, table)
    for chunk in range(v):
        assert order.count(chunk + 1) == m
        assert order.count(chunk - v) == m


@given(st.integers(1, 9), st.integers(1, 20))
def test_warmup_without_chunks_is_the_distance_to_the_last_stage(stages, microbatches):
    for rank in range(stages):
        total, all_warmup, warmup, remaining = get_pp_rank_microbatches(
            microbatches, 1, None, p2p_communicator=OfJob(total_stages=stages, current_stage=rank)
        )
        assert (total, warmup) == (microbatches, min(stages - rank - 1, microbatches))
        assert remaining == total - warmup
        assert all_warmup == (warmup == total)


def test_warmup_with_chunks_counts_both_ways_and_the_groups_of_earlier_chunks():
    place = OfJob(total_stages=4, current_stage=1)
    assert get_pp_rank_microbatches(16, 2, 4, p2p_communicator=place) == (32, False, 2 * 2 + 4, 24)
    assert get_pp_rank_microbatches(16, 2, 4, overlap_moe_expert_parallel_comm=True, p2p_communicator=place) == (
        32,
        False,
        2 * 2 + 4 + 1,
        23,
    )


def chunks_of(order, stages_of_position):
    """An order as `convert_schedule_table_to_order` writes it: chunks from 1, a backward's with a minus.

    Backwards take the table's chunks from the last on, so its chunk 0, less V, is minus the last chunk.
    """
    sign = {ActionKind.F: 1, ActionKind.B: -1}
    return [sign[action.kind] * (stages_of_position.index(action.stage) + 1) for action in order]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_plan_of_interleaved_1f1b_is_what_counts_and_table_say(stages, chunks):
    for group in range(stages, stages + 4):
        for microbatches in range(group, 3 * group + 1):
            if 0 < microbatches % group < stages:
                continue  # the counts are for whole rounds; the plan leaves a gap in a short one
            table = get_schedule_table(microbatches, chunks, group)
            plan = interleaved_1f1b(stages, microbatches, num_chunks=chunks, group_size=group)
            for rank, held in enumerate(plan.stages_at):
                place = OfJob(total_stages=stages, current_stage=rank)
                _, _, warmup, _ = get_pp_rank_microbatches(microbatches, chunks, group, p2p_communicator=place)
                order = list(plan.actions(rank))
                assert chunks_of(order, held) == convert_schedule_table_to_order(warmup, chunks, table)
                forwards = [(a.microbatch, held.index(a.stage)) for a in order if a.kind is ActionKind.F]
                assert forwards == table


@given(st.integers(2, 6), st.integers(1, 20))
def test_the_plan_of_1f1b_warms_up_as_the_counts_say(stages, microbatches):
    for rank in range(stages):
        place = OfJob(total_stages=stages, current_stage=rank)
        _, _, warmup, _ = get_pp_rank_microbatches(microbatches, 1, None, p2p_communicator=place)
        table = get_schedule_table(microbatches, 1, stages)
        order = list(one_f_one_b(stages, microbatches).actions(rank))
        assert chunks_of(order, [rank]) == convert_schedule_table_to_order(warmup, 1, table)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3))
def test_the_plan_of_forwards_alone_is_the_table(stages, microbatches, chunks):
    for rank in range(stages):
        order = list(forward_only(stages, microbatches, num_chunks=chunks).actions(rank))
        assert [(a.microbatch, a.stage // stages) for a in order] == get_schedule_table(microbatches, chunks, stages)


def test_forward_only_is_all_warmup_and_one_stage_has_none():
    assert get_pp_rank_microbatches(
        6, 2, 4, forward_only=True, p2p_communicator=OfJob(total_stages=4, current_stage=1)
    ) == (12, True, 12, 0)
    assert get_pp_rank_microbatches(6, 1, None) == (6, False, 0, 6)


def test_a_graph_of_modules_warms_up_by_its_distance_to_the_loss():
    place = OfJob(total_stages=5, current_stage=0, distance_to_sink=2)
    assert get_pp_rank_microbatches(8, 1, None, p2p_communicator=place)[2] == 2


BAD_COUNTS = [0, -3, "2", 2.0, None, True]


@pytest.mark.parametrize("bad", BAD_COUNTS)
def test_sizes_are_integers_of_at_least_one(bad):
    def refused(name):
        return pytest.raises(StepArgumentError, match=f"^{name} is {bad!r}; it must be an integer of at least 1$")

    with refused("num_microbatches"):
        get_pp_rank_microbatches(bad, 1, None)
    with refused("num_microbatches"):
        get_schedule_table(bad, 2, 2)
    with refused("num_model_chunks"):
        get_pp_rank_microbatches(1, bad, None)
    with refused("num_model_chunks"):
        get_schedule_table(2, bad, 2)
    with refused("num_model_chunks"):
        convert_schedule_table_to_order(1, bad, get_schedule_table(2, 2, 2))
    with refused("microbatch_group_size_per_vp_stage"):
        get_schedule_table(4, 2, bad)


@pytest.mark.parametrize("bad", [size for size in BAD_COUNTS if size is not None])
def test_a_group_without_microbatches_is_not_taken_for_none_given(bad):
    place = OfJob(total_stages=2, current_stage=0)
    with pytest.raises(StepArgumentError, match=f"^microbatch_group_size_per_vp_stage is {bad!r}; it must be an"):
        get_pp_rank_microbatches(4, 2, bad, p2p_communicator=place)
    assert get_pp_rank_microbatches(4, 2, None, p2p_communicator=place) == (8, False, 4, 4)


@pytest.mark.parametrize(
    ("warmup", "table", "text"),
    [
        (7, get_schedule_table(2, 2, 2), "num_warmup_microbatches is 7, and schedule_table has 4 forwards in all"),
        (-1, get_schedule_table(2, 2, 2), "num_warmup_microbatches is -1; it must be an integer of at least 0"),
        (1.0, get_schedule_table(2, 2, 2), "num_warmup_microbatches is 1.0; it must be an integer"),
        (1, get_schedule_table(2, 3, 2), r"entry 4 of schedule_table is \(0, 2\); .* with a chunk of 0..1"),
        (1, [(0, -1)], r"entry 0 of schedule_table is \(0, -1\)"),
        (1, [0], "entry 0 of schedule_table is 0; it must be"),
        (1, [(0, 0, 0)], r"entry 0 of schedule_table is \(0, 0, 0\); it must be \(microbatch, chunk\)"),
    ],
)
def test_an_order_that_would_lose_or_invent_a_backward_is_refused(warmup, table, text):
    with pytest.raises(StepArgumentError, match=text):
        convert_schedule_table_to_order(warmup, 2, table)


def shapes(config, tp=1, cp=1, decoder=None):
    return get_tensor_shapes(
        seq_length=32,
        micro_batch_size=2,
        decoder_seq_length=decoder,
        config=config,
        tp_group=Group(tp),
        cp_group=Group(cp),
    )


def test_tensor_shapes_share_the_sequence_over_cp_and_sequence_parallel_tp():
    assert shapes(Config()) == [(32, 2, 16)]
    assert shapes(Config(), tp=4, cp=2) == [(16, 2, 16)]
    assert shapes(Config(sequence_parallel=True), tp=4, cp=2) == [(4, 2, 16)]
    assert shapes(Config(), decoder=8) == [(8, 2, 16)]
    assert shapes(Config(variable_seq_lengths=True)) == [()]


@pytest.mark.parametrize("bad", BAD_COUNTS)
def test_the_sizes_of_a_shape_are_integers_of_at_least_one(bad):
    sizes = {"seq_length": 4, "micro_batch_size": 2, "decoder_seq_length": None, "tp_group": None, "cp_group": None}
    for name in ("seq_length", "micro_batch_size", "decoder_seq_length"):
        if bad is not None or name != "decoder_seq_length":
            with pytest.raises(StepArgumentError, match=f"^{name} is {bad!r}; it must be an integer of at least 1$"):
                get_tensor_shapes(**{**sizes, name: bad}, config=Config())
    with pytest.raises(StepArgumentError, match=f"^config.hidden_size is {bad!r}; it must be an integer"):
        get_tensor_shapes(**sizes, config=Config(hidden_size=bad))
    assert get_tensor_shapes(**{**sizes, "seq_length": bad}, config=Config(variable_seq_lengths=True)) == [()]


def test_a_sequence_that_cannot_be_shared_says_to_what_to_pad():
    with pytest.raises(ValueError, match=r"32 tokens .* cp 3 x sequence-parallel tp 1 ranks; pad it to 33"):
        shapes(Config(), cp=3)


@pytest.mark.parametrize("cond", [True, False])
def test_the_first_validation_step_counts_in_forward_only_runs(cond):
    assert check_first_val_step(None, True, cond) is cond
    assert check_first_val_step(True, False, cond) is cond
    assert check_first_val_step(False, True, cond) is False
    assert check_first_val_step(True, True, cond) is cond


def test_two_numbers_are_a_place_enough():
    """Nothing is sent: any object with the numbers of a communicator says where the rank is."""
    place = SimpleNamespace(total_stages=4, current_stage=1)
    assert get_pp_rank_microbatches(6, 1, None, p2p_communicator=place) == (6, False, 2, 4)
    with pytest.raises(StepArgumentError, match=r"p2p_communicator\.total_stages is None"):
        get_pp_rank_microbatches(6, 1, None, p2p_communicator=object())
