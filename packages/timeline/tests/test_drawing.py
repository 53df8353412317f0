"""Timelines of plans, simulations and recordings: the right rows, spans and arrows, whichever the source."""

from __future__ import annotations

import pytest

from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import interleaved_1f1b, multi_module_1f1b, one_f_one_b, zero_bubble_v
from pipegrid.plans.passes.lowering import lower
from pipegrid.plans.plan import from_text
from pipegrid.plans.simulate.costs import Costs
from pipegrid.plans.simulate.simulation import simulate
from pipegrid.timeline.ascii import ascii_timeline
from pipegrid.timeline.recording import Aside, Recorded, Recording, Track
from pipegrid.timeline.sources import timeline
from pipegrid.timeline.svg import svg, write_svg
from pipegrid.timeline.timeline import TimelineError, summary

ENCODER = ModuleGraph({"images": 1, "language": 2}, {"images": ["language"]})


def test_a_plan_is_drawn_at_unit_costs():
    drawn = timeline(one_f_one_b(4, 8))
    assert drawn.rows == tuple(f"stage {p} (position {p})" for p in range(4))
    assert drawn.title == "4 positions, 8 microbatches"
    assert summary(drawn) == "makespan 33 · bubble 27.3% · peak live microbatches 4"
    assert drawn.notes[0] == "bubble 27.3%, peak 4"
    assert drawn == timeline(simulate(one_f_one_b(4, 8)))


def test_rows_are_named_after_what_they_hold():
    assert timeline(zero_bubble_v(2, 2)).rows == ("stages 0, 3 (position 0)", "stages 1, 2 (position 1)")
    plan = multi_module_1f1b(ENCODER, 2, placement=((0, 1), (0,), (1,)))
    assert timeline(plan).rows == ("images, language.0 (position 0)", "images, language.1 (position 1)")
    named = timeline(plan, rows=["images (ranks 0-1)", "language.1 (rank 2)"], title="mine")
    assert named.rows == ("images (ranks 0-1)", "language.1 (rank 2)")
    assert named.title == "mine"
    with pytest.raises(TimelineError, match=r"1 names for 2 rows"):
        timeline(plan, rows=["one"])


def test_spans_are_the_simulations_times():
    simulation = simulate(lower(one_f_one_b(2, 2)), Costs(latency=0.5))
    drawn = timeline(simulation, unit="s")
    assert drawn.unit == "s"
    expected = [
        (position, start, end, str(action))
        for position in range(2)
        for start, end, action in zip(
            simulation.start[position],
            simulation.end[position],
            simulation.plan.actions(position),
            strict=True,
        )
    ]
    assert [(s.row, s.start, s.end) for s in drawn.spans] == [entry[:3] for entry in expected]
    assert drawn.makespan == simulation.makespan
    assert drawn.bubble == pytest.approx(simulation.bubble())


@pytest.mark.parametrize("make", [one_f_one_b, interleaved_1f1b, zero_bubble_v])
def test_every_message_is_an_arrow_from_its_send_to_its_receive(make):
    plan = make(3, 4)
    crossing = sum(plan.placement[e.source] != plan.placement[e.destination] for e in plan.graph.stage_edges)
    for source in (plan, lower(plan)):
        drawn = timeline(simulate(source, Costs(latency=0.25)))
        assert len(drawn.flows) == 2 * crossing * 4
        for flow in drawn.flows:
            sent, received = drawn.spans[flow.source], drawn.spans[flow.destination]
            assert sent.microbatch == received.microbatch
            assert sent.row != received.row
            assert abs(sent.stage - received.stage) == 1
            if source is plan:
                assert sent.end + 0.25 <= received.start
            else:
                assert sent.kind.replace("SEND", "RECV") == received.kind
                assert (sent.start, sent.end) == (received.start, received.end)


def test_a_colocated_module_has_arrows_to_the_other_positions_only():
    plan = multi_module_1f1b(ENCODER, 1, placement=((0, 1), (0,), (1,)))
    drawn = timeline(plan)
    ends = [(drawn.spans[flow.source], drawn.spans[flow.destination]) for flow in drawn.flows]
    arrows = {(source.name, source.row, destination.name) for source, destination in ends}
    assert ("0F0", 1, "1F0") in arrows
    assert ("0F0", 0, "1F0") not in arrows


def recorded(plan, scale, ranks_per_position=1):
    """What a perfect clock would have recorded of ``plan`` at ``scale`` seconds per unit, long after boot."""
    simulation = simulate(plan)
    tracks = []
    for position in range(plan.num_positions):
        times = zip(simulation.start[position], simulation.end[position], strict=True)
        entries = [
            Recorded(index, 1000 + start * scale, 1000 + end * scale) for index, (start, end) in enumerate(times)
        ]
        for replica in range(ranks_per_position):
            rank = position * ranks_per_position + replica
            end = 1000 + simulation.makespan * scale
            tracks.append(Track(rank, position, entries, [Aside("optimizer", end, end + scale)]))
    return Recording(plan, tracks)


def test_a_recording_is_drawn_in_seconds_with_a_row_for_each_rank(tmp_path):
    plan = lower(one_f_one_b(2, 3))
    drawn = timeline(recorded(plan, 1e-3, ranks_per_position=2))
    assert drawn.rows == tuple(f"stage {rank // 2} (rank {rank})" for rank in range(4))
    assert drawn.title == "2 positions, 3 microbatches, measured"
    assert drawn.unit == "s"
    assert drawn.makespan == pytest.approx(13e-3)
    assert drawn.notes == tuple(["bubble 30.8%"] * 4)
    assert sum(span.label == "optimizer" for span in drawn.spans) == 4
    assert len(drawn.flows) == 2 * 2 * 3  # each replica's own messages
    for flow in drawn.flows:
        assert drawn.spans[flow.source].row % 2 == drawn.spans[flow.destination].row % 2
    planned = timeline(simulate(plan, Costs(F=1e-3, I=1e-3, W=1e-3)), unit="s")
    write_svg([planned, drawn], tmp_path / "both.svg")
    text = (tmp_path / "both.svg").read_text()
    assert "makespan 12 ms" in text
    assert "makespan 13 ms" in text
    assert ">optimizer<" in text


def test_a_recording_of_another_plan_is_refused():
    plan = one_f_one_b(2, 1)
    with pytest.raises(TimelineError, match=r"rank 5 recorded position 2; the plan has positions 0..1"):
        Recording(plan, [Track(5, 2, [])])
    with pytest.raises(TimelineError, match=r"rank 0 recorded action 2 of position 0, which has 2"):
        Recording(plan, [Track(0, 0, [Recorded(2, 0.0, 1.0)])])


def test_a_timeline_passes_through():
    drawn = timeline(one_f_one_b(2, 1))
    assert timeline(drawn) == drawn
    assert timeline(drawn, title="named").title == "named"


def test_the_computes_of_a_pair_share_the_height_of_their_row():
    plan = from_text("0: 0F0 (0F1;0B0) 0B1")
    drawn = timeline(plan)
    shares = {span.name: share for span, share in drawn.shares.items()}
    assert shares == {"0F1": (0.0, 0.5), "0B0": (0.5, 1.0)}
    assert drawn.bubble == 0
    assert "F0F1-B0=B1=" in ascii_timeline(drawn, width=44).replace("F0-", "F0").replace("--", "-").replace("==", "=")
    picture = svg(drawn)
    assert picture.count('height="14"') >= 2
    track = Track(0, 0, [Recorded(0, 0.0, 1.0), Recorded(1, 1.5, 4.0), Recorded(2, 1.0, 3.5), Recorded(3, 4.0, 6.0)])
    recorded = timeline(Recording(plan, [track]))
    assert {span.name for span in recorded.shares} == {"0F1", "0B0"}
    assert recorded.busy == (6.0,)
