"""Megatron's schedule table with its warmups: the plan of it is the generator's, and what the table says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.schedules import PlanError, forward_only, interleaved_1f1b, lower, one_f_one_b, verify
from pipegrid.schedules.__main__ import main
from pipegrid.schedules.megatron import convert_schedule_table_to_order, get_schedule_table
from pipegrid.search.foreign import plan_of_megatron

SMALL = st.integers(1, 4)


def warmups(ranks, microbatches, chunks):
    """Megatron's own numbers: the distance to the loss, twice and with the chunks before it where there are several."""
    if chunks == 1:
        return [min(ranks - rank - 1, microbatches) for rank in range(ranks)]
    return [min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, microbatches * chunks) for rank in range(ranks)]


@given(SMALL, SMALL, st.integers(1, 3))
def test_the_plan_of_megatrons_numbers_is_that_of_the_generator(ranks, groups, chunks):
    microbatches = ranks * groups
    plan = plan_of_megatron(get_schedule_table(microbatches, chunks, ranks), warmups(ranks, microbatches, chunks))
    wanted = (
        one_f_one_b(ranks, microbatches) if chunks == 1 else interleaved_1f1b(ranks, microbatches, num_chunks=chunks)
    )
    assert [list(steps) for steps in plan.positions] == [list(steps) for steps in wanted.positions]
    verify(lower(plan))


@given(SMALL, SMALL, st.integers(1, 3))
def test_what_megatron_overlaps_are_the_generators_pairs(ranks, groups, chunks):
    microbatches = ranks * groups
    if chunks > 1 and ranks > 1:
        table = get_schedule_table(microbatches, chunks, ranks)
        warmup = [min(each + 1, len(table)) for each in warmups(ranks, microbatches, chunks)]
        plan = plan_of_megatron(table, warmup, overlap=True)
        assert plan.positions == interleaved_1f1b(ranks, microbatches, num_chunks=chunks, overlap=True).positions
        assert any(plan.pairs) or microbatches * chunks <= max(warmup)
        verify(lower(plan))


@given(SMALL, SMALL, st.integers(1, 3), SMALL)
def test_each_rank_has_the_chunks_of_megatrons_order(ranks, microbatches, chunks, group):
    table = get_schedule_table(microbatches, chunks, group)
    warmup = [min(3 * rank, len(table)) for rank in range(ranks)]
    plan = plan_of_megatron(table, warmup)
    for rank, steps in enumerate(plan.positions):
        order = convert_schedule_table_to_order(warmup[rank], chunks, table)
        names = [(step.stage // ranks + 1) if step.kind.name == "F" else step.stage // ranks - chunks for step in steps]
        backwards = [name for name in order if name < 0]
        assert [name for name in names if name > 0] == [name for name in order if name > 0]
        assert [name > 0 for name in names] == [name > 0 for name in order]
        assert [name for name in names if name < 0] == [-chunks - 1 - name for name in backwards] or chunks == 1


def test_too_few_forwards_before_the_first_backward_are_found():
    with pytest.raises(PlanError, match="2B0 needs 2F0 before it"):
        verify(lower(plan_of_megatron(get_schedule_table(4, 2, 2), [1, 2])))


def test_an_evaluation_has_no_backwards():
    plan = plan_of_megatron(get_schedule_table(3, 1, 1), [0, 0], forward_only=True)
    assert [list(steps) for steps in plan.positions] == [list(steps) for steps in forward_only(2, 3).positions]


@pytest.mark.parametrize(
    ("table", "warmup", "said"),
    [
        ([[0, 0], [0, 0]], [0], "schedule_table has 2 entries up to microbatch 0 and chunk 0; it must have each"),
        ([], [0], "schedule_table has 0 entries"),
        ([[0, 0]], [], "a number for each rank"),
        ([[0, 0]], [2], "of at most the 1 forwards"),
        ([[0]], [0], "schedule_table"),
        ([[0, -1]], [0], "schedule_table"),
    ],
)
def test_a_table_that_is_none_is_refused(table, warmup, said):
    with pytest.raises(PlanError, match=said):
        plan_of_megatron(table, warmup)


def test_the_command_line_reads_a_table(tmp_path, capsys):
    file = tmp_path / "table.json"
    document = {"schedule_table": get_schedule_table(8, 2, 4), "num_warmup_microbatches": warmups(4, 8, 2)}
    file.write_text(json.dumps(document))
    assert main(["verify", str(file), "--order", "nccl2"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[1] == "4 ranks, 112 messages: no deadlock under nccl2 even if sends block"
    )
    file.write_text(json.dumps(document | {"chunks": 2}))
    assert main(["verify", str(file)]) == 2
    assert "not 'chunks'" in capsys.readouterr().err
    file.write_text(json.dumps(document | {"forward_only": 1}))
    assert main(["verify", str(file)]) == 2
    assert "forward_only is 1; it must be true or false" in capsys.readouterr().err
