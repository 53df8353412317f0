"""Named schedules side by side, and greedy beside them."""

import pytest

from pipegrid.plans import Costs, PlanError, simulate, u_shape
from pipegrid.search import compare, greedy


def test_compare_puts_schedules_in_slices_beside_the_others():
    rows = {row.name: row for row in compare(8, 8, num_slices=4, names=["1f1b", "seq1f1b", "seq1f1b_interleaved"])}
    assert set(rows) == {"1f1b", "seq1f1b (4 slices)", "seq1f1b_interleaved (2 chunks, 4 slices)"}
    whole, cut = rows["1f1b"], rows["seq1f1b (4 slices)"]
    assert (whole.makespan, whole.peak_until_weight) == (24 + 21, 8)
    assert (cut.makespan, cut.peak_until_weight) == (24 + 21 / 4, 2.75)
    with pytest.raises(PlanError, match="there is no schedule 'seq1f1b' to compare"):
        compare(8, 8, names=["seq1f1b"])


def test_the_u_is_compared_at_the_costs_of_its_slices():
    (row,) = compare(4, 8, names=["u_shape"])
    assert (row.makespan, row.peak_until_weight) == (3 * 8 + 3 * 4 - 4, 4)
    # The model's cost is spread over the U, whatever the slices it is given in.
    (row,) = compare(2, 4, costs=Costs(F=[1, 3], I=1, W=[2, 2]), names=["u_shape"])
    assert simulate(row.plan, Costs(F=(0.5, 2, 1.5), I=(0.5, 1, 0.5), W=(1, 2, 1))).makespan == row.makespan


def test_greedy_knows_it_where_the_stages_make_a_u():
    costs = Costs(F=(0.5, 1, 1, 0.5), B=(1, 2, 2, 1))
    plan = greedy(costs, num_positions=3, num_microbatches=6)
    assert simulate(plan, costs).makespan <= simulate(u_shape(3, 6), costs).makespan


@pytest.mark.parametrize("limit", [float("nan"), -1, "3", "321", True, 1j])
def test_a_limit_that_is_none_is_an_error(limit):
    with pytest.raises(PlanError, match=r"memory_limit is .*; give a number from 0, or None for no limit"):
        greedy(Costs(), limit, num_positions=3, num_microbatches=6)
    with pytest.raises(PlanError, match=r"memory_limit is .*; give a number from 0, or None for no limit"):
        compare(3, 6, memory_limit=limit)
