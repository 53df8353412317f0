"""What is drawn of plans with slices, gathered parameters and units that move between replicas."""

from pipegrid.plans import Costs, from_text, lower, orders_of_plan, seq1f1b, simulate, zero_bubble_v
from pipegrid.timeline import ascii_timeline, order_timeline, timeline, write_svg
from pipegrid.timeline.kinds import STUCK
from pipegrid.timeline.svg import svg


def test_a_drawing_has_the_slices():
    plan = seq1f1b(2, 2, num_slices=2)
    text = ascii_timeline(timeline(plan))
    assert "2 positions, 2 microbatches of 2 slices" in text
    assert "F0.0F0.1F1.0" in text.replace("-", "")
    drawn = timeline(lower(plan))
    assert {span.name for span in drawn.spans if span.is_compute} >= {"0F1.1", "1B0.1"}
    assert len(drawn.flows) == 2 * 2 * 2  # an activation and a gradient of each slice
    assert "after the dot, their slices" in svg(drawn)


def test_a_timeline_has_the_gathers_beside_the_work_and_counts_their_memory(tmp_path):
    drawn = timeline(simulate(lower(zero_bubble_v(2, 2), shard="step"), Costs(UNSHARD=1, REDUCE_GRAD=1, parameters=5)))
    assert {"UNSHARD", "RESHARD", "REDUCE_GRAD"} <= {span.kind for span in drawn.spans}
    assert [counter.peak for counter in drawn.counters if "gathered" in counter.name] == [15.0, 20.0]
    write_svg(drawn, tmp_path / "sharded.svg")
    assert "UNSHARD parameters" in (tmp_path / "sharded.svg").read_text()


def test_two_orphans_that_cross_are_drawn_where_they_are_stuck():
    """Each replica sends its unit to the other before it receives: a cycle over replicas."""
    text = """
microbatches 2
modules model:2
placement 0 1
units 1 1
move 1 0@0>1 0@1>0
0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE
1: 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE
2: 0F1 0RECV_B1<1 0SEND_F1>1 0B1 0REDUCE
3: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
"""
    drawn = order_timeline(orders_of_plan(from_text(text), lanes="separate"), "nccl-serial")
    stuck = {(drawn.rows[span.row], span.name) for span in drawn.spans if span.kind == STUCK}
    assert {("rank 1: rank", "1RECV_F1<0"), ("rank 2: rank", "0RECV_B1<1")} <= stuck
