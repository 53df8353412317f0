"""Pairs that a search forms: where they pay, under the cap, and never better than the bound."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipegrid.plans import Costs, dualpipe_v, interleaved_1f1b, lower, simulate, verify, zero_bubble_v
from pipegrid.search import compare, greedy, search
from pipegrid.search.__main__ import main
from pipegrid.search.pairs import without_hidden

SIZES = {"num_positions": 2, "num_microbatches": 6, "num_stages": 4}


def costs(hidden, **others):
    return Costs(F=0.5, I=0.5, W=0.5, hidden=hidden, **others)


@pytest.mark.parametrize("hidden", [0.1, 0.3, [0.0, 0.2, 0.2, 0.4]])
def test_pairs_are_formed_where_they_pay(hidden):
    found = greedy(costs(hidden), **SIZES)
    assert any(found.pairs)
    verify(lower(found))
    makespan = simulate(found, costs(hidden)).makespan
    assert makespan < simulate(greedy(costs(0.0), **SIZES), costs(hidden)).makespan
    for made in (dualpipe_v, zero_bubble_v):
        assert makespan <= simulate(made(2, 6, overlap=True), costs(hidden)).makespan
    assert search(costs(hidden), **SIZES, effort=0.02).makespan <= makespan


def test_without_anything_to_hide_there_are_none():
    assert not any(greedy(costs(0.0), **SIZES).pairs)
    assert not any(search(costs(0.0), **SIZES, effort=0.02).plan.pairs)


@pytest.mark.parametrize("cap", [1.5, 2.0, 2.5])
def test_pairs_keep_to_the_cap(cap):
    """A pair holds its forward and its backward at once: where they fit one after the other it may not."""
    for plan in (greedy(costs(0.3), cap, **SIZES), search(costs(0.3), cap, **SIZES, effort=0.02).plan):
        assert simulate(plan, costs(0.3)).peak() <= cap
        verify(lower(plan), memory_limit=cap)


AMOUNTS = st.integers(1, 20).map(lambda tenths: tenths / 10)


@given(
    st.lists(AMOUNTS, min_size=4, max_size=4),
    AMOUNTS,
    AMOUNTS,
    st.lists(AMOUNTS, min_size=4, max_size=4),
    st.booleans(),
)
def test_no_plan_with_pairs_is_shorter_than_at_the_costs_of_the_bound(forwards, inputs, weights, hidden, whole):
    given_costs = Costs(F=forwards, I=inputs, W=weights, B=inputs + weights if whole else None, hidden=hidden)
    free = without_hidden(given_costs, 4)
    for plan in (
        dualpipe_v(2, 5, overlap=True),
        zero_bubble_v(2, 5, overlap=True),
        interleaved_1f1b(2, 5, overlap=True),
    ):
        apart = [list(plan.actions(position)) for position in range(plan.num_positions)]
        least = simulate(evolve(plan, positions=apart), free).makespan
        assert least <= simulate(plan, given_costs).makespan + 1e-9


def test_a_search_that_proves_all_orders_does_not_call_a_plan_with_pairs_optimal():
    found = search(Costs(F=1.0, I=1.0, W=1.0, hidden=0.3), num_positions=2, num_microbatches=3, effort=0.1)
    assert found.bound <= found.makespan
    assert not found.optimal or found.makespan <= found.bound * (1 + 1e-9)


def test_a_schedule_is_compared_with_its_pairs():
    rows = {hidden: compare(2, 6, costs=costs(hidden), names=["dualpipe_v", "1f1b"]) for hidden in (0.0, 0.2)}
    plans = {hidden: {row.schedule: row for row in found} for hidden, found in rows.items()}
    assert any(plans[0.2]["dualpipe_v"].plan.pairs)
    assert plans[0.2]["dualpipe_v"].makespan < plans[0.0]["dualpipe_v"].makespan
    assert plans[0.2]["1f1b"].makespan == plans[0.0]["1f1b"].makespan


def test_the_command_line_has_pairs(tmp_path, capsys):
    assert main(["simulate", "dualpipe_v", "--pp", "2", "--microbatches", "4", "--pairs"]) == 0
    capsys.readouterr()
    written = tmp_path / "plan.csv"
    command = [
        "export",
        "zero_bubble_v",
        "--pp",
        "2",
        "--microbatches",
        "4",
        "--pairs",
        "--to",
        "torch",
        "--out",
        str(written),
    ]
    assert main(command) == 0
    assert "OVERLAP_F_B" in written.read_text()
    for name, said in (("gpipe", "gpipe has no pairs"), ("greedy", "greedy forms pairs where the costs say")):
        assert main(["simulate", name, "--pp", "2", "--microbatches", "4", "--pairs"]) == 2
        assert said in capsys.readouterr().err
